# SPDX-License-Identifier: Apache-2.0
"""The glue to vLLM 0.32: the only package that imports vllm."""
