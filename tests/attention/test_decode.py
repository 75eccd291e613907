# SPDX-License-Identifier: Apache-2.0
"""The decode kernel against the dense float64 reference, over pages born in the canonical order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")

from vllm_tangram.attention.decode import DecodeBatch, SplitScratch, Tuning, decode_attention  # noqa: E402
from vllm_tangram.attention.partition import SplitPlan  # noqa: E402
from vllm_tangram.attention.reference import ragged_attention  # noqa: E402
from vllm_tangram.budget.schedule import EvictionSchedule  # noqa: E402
from vllm_tangram.pages.device import DevicePages  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="Triton's interpreter multiplies bf16 matrices as integers")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Step:
    """One decode step of one layer, with random contents; what is not a token held is NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    pool: Tensor
    batch: DecodeBatch
    members: Tensor
    num_blocks: int
    scratch: SplitScratch
    held: list[list[Tensor]]  # [row][head] -> [len, 3] page, column and place of every token held, the new one last

    def run(self, tuning: Tuning, *, min_tiles: int = 1, even: bool = False) -> Tensor:
        """Output of the kernel; everything it should write is poisoned before."""
        rows = len(self.query) + 1
        plan = SplitPlan(self.members, rows, self.num_blocks, tuning.tile, min_tiles=min_tiles, even=even)
        plan.make(self.batch)
        output = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype, device=DEVICE)
        self.scratch.partial.fill_(torch.nan)
        self.scratch.log_sums.fill_(torch.nan)
        decode_attention(
            *(self.query, self.key, self.value, self.pool, output),
            batch=self.batch,
            plan=plan,
            layer=1,
            scratch=self.scratch,
            scale=self.query.shape[-1] ** -0.5,
            tuning=tuning,
        )
        assert not self.scratch.arrived.any()
        return output.cpu()

    def expected(self, row: int) -> Tensor:
        """[Hq, D] float64; zeros without a request."""
        if not self.held[row]:
            return torch.zeros(self.query.shape[1:], dtype=torch.float64)
        head_dim = self.query.shape[-1]
        keys, values = [], []
        for head, places in enumerate(self.held[row]):
            old = self.pool.cpu()[tuple(places[:-1].T)]
            keys.append(torch.cat([old[:, :head_dim], self.key[row, head, None].cpu()]))
            values.append(torch.cat([old[:, head_dim:], self.value[row, head, None].cpu()]))
        return ragged_attention(self.query[row, None].cpu(), keys, values, head_dim**-0.5)[0]


def make_step(
    rng: np.random.Generator,
    lengths: list[tuple[int, int] | None],  # (prompt, tokens) of each row
    num_heads: int,
    num_blocks: int,
    *,
    block: int,
    head_dim: int,
    ratio: int,
    dtype: torch.dtype,
    num_groups: int = 3,
    group_size: int = 2,
) -> Step:
    most = max((max(length) for length in lengths if length), default=1)
    blocks = -(-most // block)
    # Two retentions: what rises at each block is random, but for group 0, which keeps everything.
    rises = rng.random((2, blocks, num_groups)) < rng.uniform(0.2, 0.9, (2, 1, num_groups))
    rises[:, :, 0] = rises[:, 0] = True
    kept = np.concatenate([np.zeros((2, 1, num_groups), int), rises.cumsum(1)], 1).astype(np.int32)
    schedules = [EvictionSchedule(table, block) for table in kept]

    num_slots = len(lengths) + 2
    pages = DevicePages(num_slots, num_groups, blocks, block, 2, DEVICE)
    flat = np.zeros((num_slots, blocks * num_groups), np.int32)
    fresh = iter(1 + rng.permutation(len(lengths) * blocks * num_groups))
    slots = rng.permutation(num_slots)[: len(lengths)]
    chosen = rng.permutation(num_groups * group_size)[:num_heads]
    group, column = chosen // group_size, chosen % group_size

    pool = torch.full((1 + len(lengths) * blocks * num_groups, group_size, block, 2 * head_dim), torch.nan)
    held: list[list[Tensor]] = []
    for slot, length in zip(slots, lengths, strict=True):
        held.append([])
        if length is None:
            continue
        prompt, tokens = length
        table = int(rng.integers(2))
        pages.open(int(slot), prompt, schedules[table])
        of_group: list[list[int]] = [[] for _ in range(num_groups)]
        born = 0
        for n, g in itertools.product(range(-(-tokens // block)), range(num_groups)):
            if n >= prompt // block or rises[table, n, g]:
                flat[slot, born] = page = next(fresh)
                of_group[g].append(int(page))
                born += 1
        count = schedules[table].lengths(tokens, prompt)
        for g, c in zip(group, column, strict=True):
            index = torch.arange(int(count[g]))
            page_of = torch.tensor(of_group[g])[index // block]
            held[-1].append(torch.stack([page_of, torch.full_like(index, int(c)), index % block], 1))
            pool[tuple(held[-1][-1][:-1].T)] = torch.randn(len(index) - 1, 2 * head_dim)

    fused = torch.randn(len(lengths), num_heads * (ratio + 2), head_dim, device=DEVICE).to(dtype)  # as a qkv projection
    query, key, value = fused.split([num_heads * ratio, num_heads, num_heads], dim=1)
    own = np.stack([group, column], 1)
    members = torch.from_numpy(np.stack([own[::-1], own]).astype(np.int32)).to(DEVICE)  # the step is of layer 1
    batch = DecodeBatch(
        requests=torch.tensor(
            [slot if n else -1 for slot, n in zip(slots, lengths, strict=True)], dtype=torch.int32
        ).to(DEVICE),
        seq_lens=torch.tensor([n[1] if n else 0 for n in lengths], dtype=torch.int32, device=DEVICE),
        flat=torch.from_numpy(flat).to(DEVICE),
        pages=pages,
    )
    scratch = SplitScratch(max(num_blocks, (len(lengths) + 1) * num_heads), ratio, head_dim, DEVICE)
    return Step(query, key, value, pool.to(DEVICE, dtype), batch, members, num_blocks, scratch, held)


def check(step: Step, tuning: Tuning, *, min_tiles: int = 1, even: bool = False) -> None:
    before = step.pool.cpu().clone()
    output = step.run(tuning, min_tiles=min_tiles, even=even)
    for row in range(len(output)):
        expected = step.expected(row)
        error = (output[row].double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < TOLERANCE[step.pool.dtype], f"row {row}: error {error}"
        for head, places in enumerate(step.held[row]):
            new = torch.cat([step.key[row, head], step.value[row, head]]).cpu()
            before[tuple(places[-1].tolist())] = new
    assert torch.equal(step.pool.cpu().nan_to_num(9e3), before.nan_to_num(9e3))  # and nothing else was written


@pytest.mark.parametrize(
    ("block", "head_dim", "ratio", "dtype", "tile"),
    [
        (16, 64, 4, torch.float32, 32),
        (16, 128, 7, torch.float16, 64),
        pytest.param(16, 128, 4, torch.bfloat16, 64, marks=needs_gpu),
        (32, 96, 3, torch.float32, 32),
        (64, 96, 5, torch.float16, 32),
        pytest.param(64, 256, 5, torch.bfloat16, 32, marks=needs_gpu),
        (128, 256, 1, torch.float16, 16),
        (64, 64, 16, torch.float16, 64),
        (128, 64, 2, torch.float32, 32),
    ],
)
def test_matches_reference(block: int, head_dim: int, ratio: int, dtype: torch.dtype, tile: int) -> None:
    rng = np.random.default_rng()
    lengths = [
        (1, 1),
        (int(rng.integers(1, block)), block - 1),
        None,
        (block, block),
        (block, block + 1),
        (int(rng.integers(1, 6 * block)), 6 * block + int(rng.integers(block))),
        (7 * block - 1, 7 * block),
    ]
    step = make_step(
        rng, lengths, 3, int(rng.integers(1, 60)), block=block, head_dim=head_dim, ratio=ratio, dtype=dtype
    )
    check(step, Tuning(tile), min_tiles=int(rng.integers(1, 4)), even=bool(rng.integers(2)))


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("blocks", "fan"), [(1, 16), (2, 16), (47, 16), (32, 4), (123, 8), (123, 2)])
def test_long_request_whatever_the_split(blocks: int, fan: int, even: bool) -> None:
    """2 heads' 50 to 64 tiles of 16 in pieces that are combined in one level, in two, and in more than one chunk."""
    rng = np.random.default_rng()
    step = make_step(
        rng,
        [(800, 1023)],
        2,
        blocks,
        block=32,
        head_dim=128,
        ratio=8,
        dtype=torch.float32,
        num_groups=1,
    )
    check(step, Tuning(tile=16, fan=fan), even=even)


def test_consecutive_steps_extend_the_request() -> None:
    """Tokens written by the kernel are the ones that the next step reads, across a page boundary."""
    rng = np.random.default_rng()
    step = make_step(rng, [(40, 75)], 2, 5, block=16, head_dim=64, ratio=2, dtype=torch.float32)
    for tokens in range(61, 75):
        step.batch.seq_lens.fill_(tokens)
        reads = Step(**{**vars(step), "held": [[places[: len(places) - 75 + tokens] for places in step.held[0]]]})
        step.key.normal_()
        step.value.normal_()
        check(reads, Tuning(tile=16))


def test_rows_without_a_page_list_do_no_harm() -> None:
    """Warm-up and graph capture run on zeroed tables: everything then lies in page 0, and nothing else is written."""
    rng = np.random.default_rng()
    step = make_step(rng, [(50, 70), (64, 64)], 2, 7, block=16, head_dim=64, ratio=2, dtype=torch.float32)
    step.batch.flat.zero_()
    step.batch.pages.rows.zero_()
    step.pool[0] = 1.0
    before = step.pool.cpu().clone()
    assert torch.isfinite(step.run(Tuning(tile=32))).all()
    assert torch.equal(step.pool[1:].cpu().nan_to_num(9e3), before[1:].nan_to_num(9e3))


def test_refuses_what_the_kernel_cannot_take() -> None:
    rng = np.random.default_rng()
    step = make_step(rng, [(20, 30)], 2, 4, block=16, head_dim=64, ratio=2, dtype=torch.float32)
    scratch = step.scratch
    step.scratch = SplitScratch(3, 2, 64, DEVICE)
    with pytest.raises(ValueError, match="no scratch for 4 thread blocks"):
        step.run(Tuning(tile=16))
    step.scratch = scratch
    step.pool = step.pool.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="does not fit"):
        step.run(Tuning(tile=16))
    step.query = step.query[:, :3]
    with pytest.raises(ValueError, match="ratio"):
        step.run(Tuning(tile=16))
