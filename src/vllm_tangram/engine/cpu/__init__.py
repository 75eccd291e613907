# SPDX-License-Identifier: Apache-2.0
"""Worker, runner and attention backend for the CPU (vLLM's V1 runner)."""
