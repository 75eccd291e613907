# SPDX-License-Identifier: Apache-2.0
"""Which tokens stay: importance scorers, selection within a head and competition between heads."""

from vllm_tangram.compression.base import ChunkContext, Scorer
from vllm_tangram.compression.competition import compete
from vllm_tangram.compression.scorers import get_scorer, needs_gate, scorer_names
from vllm_tangram.compression.selection import places, select_tokens

__all__ = ["ChunkContext", "Scorer", "compete", "get_scorer", "needs_gate", "places", "scorer_names", "select_tokens"]
