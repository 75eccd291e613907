# SPDX-License-Identifier: Apache-2.0
"""Measurements beside stock vLLM, in one run."""
