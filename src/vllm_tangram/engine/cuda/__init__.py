# SPDX-License-Identifier: Apache-2.0
"""Worker, runner and attention backend for CUDA (vLLM's V2 runner)."""
