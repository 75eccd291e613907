# SPDX-License-Identifier: Apache-2.0
"""Who holds what, told from the query heads that a rank computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.budget.strategies import shardings

from vllm_tangram.budget import Sharding
from vllm_tangram.errors import TangramError


@given(shardings(), st.integers(1, 3))
def test_a_rank_holds_the_heads_that_its_queries_need(sharding: Sharding, factor: int) -> None:
    """Query heads are cut into equal runs; a query head of a model with ``ratio`` per KV head reads head q // ratio."""
    size, copies = sharding.tensor_parallel_size, sharding.copies
    ratio = copies * factor
    per_rank = sharding.num_kv_heads * ratio // size
    first_layer = 0
    for stage, num_layers in enumerate(sharding.stage_layers):
        for shard in range(size):
            needed = sorted({q // ratio for q in range(shard * per_rank, (shard + 1) * per_rank)})
            layers, heads = sharding.part(stage * size + shard)
            assert list(range(sharding.num_layers))[layers] == list(range(first_layer, first_layer + num_layers))
            assert list(range(sharding.num_kv_heads))[heads] == needed
        first_layer += num_layers


@given(shardings())
def test_every_member_is_on_one_rank(sharding: Sharding) -> None:
    shape = sharding.num_layers, sharding.num_kv_heads
    assert sharding.ranks.shape == (sharding.num_layers, sharding.width)
    members = np.arange(np.prod(shape))
    spread = sharding.spread(np.stack([members, -members]))
    np.testing.assert_array_equal(spread[0], -spread[1])
    seen = np.zeros(len(members), int)
    for rank in range(sharding.num_ranks):
        own = spread[0].reshape(sharding.ranks.shape)[sharding.ranks == rank]
        np.testing.assert_array_equal(own, members.reshape(shape)[sharding.part(rank)].ravel())
        seen[own] += 1
    assert (seen == sharding.copies).all()


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (4, 6), (8, 5), (2, 3)])
def test_uneven_shares_are_refused(heads: int, size: int) -> None:
    with pytest.raises(TangramError, match=f"--tensor-parallel-size {size} does not fit the model's {heads} KV heads"):
        Sharding(heads, size, (2,))
