# SPDX-License-Identifier: Apache-2.0
"""KeyDiff's kernel on a GPU against its scores on the CPU."""

from __future__ import annotations

import pytest
import torch

from vllm_tangram.compression import ChunkContext, select_tokens
from vllm_tangram.compression.scorers.keydiff import KeyDiff

ALONE = ChunkContext(sinks=0, window=0, scale=1.0, start=0)


def rows(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.tensor(lengths).cumsum(0)
    table = torch.stack([ends - torch.tensor(lengths), torch.tensor(lengths)], 1).int().cuda()
    return table[:, 0], table[:, 1]


def keys(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """As the model's projection leaves them, between queries and values."""
    torch.manual_seed(0)
    directions = torch.randn(6 * num_heads, head_dim)
    drawn = (torch.randn(num_tokens, 6 * num_heads, head_dim) + directions).to(dtype)
    return drawn.cuda()[:, 4 * num_heads : 5 * num_heads]


@pytest.mark.parametrize("lengths", [[1], [2048], [1024] * 8, [17, 1500, 1, 1023], [8192]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_scores_are_those_of_the_cpu(head_dim: int, dtype: torch.dtype, lengths: list[int]) -> None:
    key = keys(sum(lengths), 8, head_dim, dtype)
    scores = torch.empty(8, len(key), device="cuda")
    assert KeyDiff().score_rows(key, scores, *rows(lengths))
    for own, ours in zip(key.cpu().split(lengths), scores.cpu().split(lengths, dim=1), strict=True):
        expected = KeyDiff().score(own, own, own, ALONE)
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
        keep = -(-len(own) // 4)
        kept, wanted = (
            torch.zeros(8, len(own)).scatter_(1, torch.stack(chosen.split(keep)), 1).bool()
            for chosen in (select_tokens(x, [keep] * 8, protect_head=0, protect_tail=0) for x in (ours, expected))
        )
        assert ((kept & wanted).sum(1) >= keep - max(1, keep // 1000)).all()


def test_scoring_does_not_wait_for_the_gpu() -> None:
    key, scores = keys(2048, 8, 128, torch.bfloat16), torch.empty(8, 2048, device="cuda")
    chunks = rows([1024, 1024])
    KeyDiff().score_rows(key, scores, *chunks)  # compiles
    expected = scores.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        KeyDiff().score_rows(key, scores.zero_(), *chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(scores, expected)
