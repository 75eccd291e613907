# SPDX-License-Identifier: Apache-2.0
"""Undoing and foretelling RoPE, against rotation matrices in float64 and against the models' own functions."""

from __future__ import annotations

import pytest
import torch
from tests.compression.rotations import rotation, table
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_halves

from vllm_tangram.compression.rope import Rope
from vllm_tangram.errors import TangramError

SHAPES = [
    pytest.param(16, 16, False, 1.0, id="halves"),
    pytest.param(16, 16, True, 1.0, id="interleaved"),
    pytest.param(24, 8, False, 1.0, id="partial"),
    pytest.param(24, 8, True, 1.3, id="partial-interleaved-scaled"),
]


@pytest.mark.parametrize(("head_dim", "rotary_dim", "interleaved", "scaling"), SHAPES)
class TestAgainstMatrices:
    def test_unrotate(self, head_dim: int, rotary_dim: int, interleaved: bool, scaling: float) -> None:
        before = torch.randn(7, 3, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        after = torch.stack(
            [before[t] @ rotation(90 + t, head_dim, rotary_dim, interleaved, scaling).T for t in range(7)]
        )
        rope = Rope(table(100, rotary_dim, scaling), interleaved=interleaved)
        undone = rope.unrotate(after.float(), 90)
        assert undone.dtype == torch.float32
        torch.testing.assert_close(undone.double(), before, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("num_positions", [5, 60, 500])
    def test_mean_of_rotations_ahead(
        self, num_positions: int, head_dim: int, rotary_dim: int, interleaved: bool, scaling: float
    ) -> None:
        """Also where the table ends long before, and for two positions with one table."""
        rope = Rope(table(num_positions, rotary_dim, scaling), interleaved=interleaved)
        vectors = torch.randn(1, 3, head_dim, generator=torch.Generator().manual_seed(1))
        for position in (4, 2):
            matrices = [
                rotation(p, head_dim, rotary_dim, interleaved, scaling) for p in range(position + 1, position + 201)
            ]
            mean = torch.stack(matrices).mean(0)
            turned = rope.turn(vectors, rope.ahead(position, 200))
            torch.testing.assert_close(turned.double(), vectors.double() @ mean.T, rtol=1e-4, atol=1e-5)
            back = rope.turn(vectors, rope.ahead(position, 200).conj())
            torch.testing.assert_close(back.double(), vectors.double() @ mean, rtol=1e-4, atol=1e-5)

    def test_inputs_stay_as_they_are(self, head_dim: int, rotary_dim: int, interleaved: bool, scaling: float) -> None:
        rope = Rope(table(100, rotary_dim, scaling), interleaved=interleaved)
        vectors = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(2))
        before = vectors.clone()
        rope.unrotate(vectors, 3)
        assert torch.equal(vectors, before)


@pytest.mark.parametrize(("interleaved", "apply"), [(False, apply_halves), (True, apply_interleaved)])
def test_undoes_what_transformers_does(interleaved: bool, apply) -> None:  # type: ignore[no-untyped-def]
    query = torch.randn(1, 3, 50, 16, generator=torch.Generator().manual_seed(3))  # [B, heads, T, d]
    own = table(50, 16)
    cos, sin = (half.repeat(1, 2)[None] for half in own.chunk(2, dim=-1))  # as transformers hands them on
    rotated, _ = apply(query, query, cos, sin)
    undone = Rope(own, interleaved=interleaved).unrotate(rotated[0].transpose(0, 1), 0)
    torch.testing.assert_close(undone, query[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_a_rounded_table_is_undone_as_it_was_applied() -> None:
    """Entries of bfloat16 are no exact rotation: the query must come back, not a longer or shorter one."""
    rounded = table(100, 16).bfloat16()
    query = torch.randn(100, 2, 16, generator=torch.Generator().manual_seed(4))
    cos, sin = (half.float().repeat(1, 2) for half in rounded.chunk(2, dim=-1))
    rotated, _ = apply_halves(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos[None], sin[None])
    undone = Rope(rounded).unrotate(rotated[0].transpose(0, 1), 0)
    torch.testing.assert_close(undone, query, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(torch.randn(100, 16), id="noise"),
        pytest.param(table(100, 16).square(), id="not angles"),
        pytest.param(torch.cat([table(50, 16), table(50, 16)]), id="two tables in a row"),
        pytest.param(table(100, 16).roll(1, dims=0), id="does not begin at 0"),
        pytest.param(table(100, 16) * float("nan"), id="nan"),
        pytest.param(table(1, 16), id="one position"),
        pytest.param(table(100, 16)[None], id="dimensions"),
    ],
)
def test_refuses_what_is_no_rotation_by_position(bad: torch.Tensor) -> None:
    with pytest.raises(TangramError, match="rotary"):
        Rope(bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", [1.0, 1.4])
@pytest.mark.parametrize("num_positions", [2, 3, 100, 131072])
def test_takes_tables_of_any_length_and_type(num_positions: int, scaling: float, dtype: torch.dtype) -> None:
    Rope(table(num_positions, 64, scaling).to(dtype))
