# SPDX-License-Identifier: Apache-2.0
"""The dense reference against PyTorch's attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_tangram.attention import ragged_attention


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_queries", "lengths"), [(1, [1, 7]), (5, [5, 12]), (9, [40, 9])])
def test_reference_equals_torch_head_by_head(num_queries: int, lengths: list[int], causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    group, head_dim, scale = 3, 8, 0.3
    query = torch.randn(num_queries, group * len(lengths), head_dim, generator=generator)
    keys = [torch.randn(length, head_dim, generator=generator) for length in lengths]
    values = [torch.randn(length, head_dim, generator=generator) for length in lengths]
    out = ragged_attention(query, keys, values, scale, causal_tail=causal)
    assert out.dtype == torch.float64
    for head, length in enumerate(lengths):
        ones = torch.ones(num_queries, length, dtype=torch.bool)
        expected = scaled_dot_product_attention(
            query[:, head * group : (head + 1) * group].transpose(0, 1).double(),
            keys[head].double().expand(group, -1, -1),
            values[head].double().expand(group, -1, -1),
            attn_mask=ones.tril(length - num_queries) if causal else ones,
            scale=scale,
        )
        torch.testing.assert_close(out[:, head * group : (head + 1) * group], expected.transpose(0, 1))


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, short = torch.zeros(3, 4, 2), torch.zeros(2, 2)
    with pytest.raises(ValueError, match="head 0 holds 2 keys"):
        ragged_attention(query, [short, short], [short, short], 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        ragged_attention(query, [short] * 3, [short] * 3, 1.0)
