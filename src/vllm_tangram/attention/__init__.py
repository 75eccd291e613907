# SPDX-License-Identifier: Apache-2.0
"""How retained keys and values are read."""

from vllm_tangram.attention.reference import ragged_attention

__all__ = ["ragged_attention"]
