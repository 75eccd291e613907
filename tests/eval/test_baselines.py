# SPDX-License-Identifier: Apache-2.0
"""Dynamic budgets and AdaKV against plain loops, and the memory that they share out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_tangram import RetentionProfile, TangramConfig, TangramError
from vllm_tangram.eval.baselines import SAFEGUARD, adakv_counts, dynamic_counts
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.run import Answer, Evaluation
from vllm_tangram.eval.settings import REFERENCE, Setting, settings
from vllm_tangram.eval.statistics import compare
from vllm_tangram.eval.tasks import Case, Request
from vllm_tangram.eval.tasks.kv import kv_cases


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int]:
    """Scores with many ties, a total that fits, protected tokens at both ends."""
    layers, heads, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    scores = torch.from_numpy(rng.integers(-3, draw(st.sampled_from([0, 4, 1000])), (layers, heads, tokens)) / 7.0)
    head, tail = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    least = layers * heads * min(tokens, head + tail)
    return scores.float(), draw(st.integers(least, layers * heads * tokens)), head, tail


def ranked(scores: torch.Tensor, head: int, tail: int) -> list[tuple[bool, float, int, int]]:
    """(protected, score, position, -member) of every token of [members, T], the best first."""
    members, tokens = scores.shape
    return sorted(
        ((t < head or t >= tokens - tail, float(scores[m, t]), t, -m) for m in range(members) for t in range(tokens)),
        reverse=True,
    )


@given(problems())
def test_dynamic_keeps_the_best_of_all_heads(problem: tuple[torch.Tensor, int, int, int]) -> None:
    scores, total, head, tail = problem
    counts = dynamic_counts(scores, total, protect_head=head, protect_tail=tail)
    expected = [0] * (scores.shape[0] * scores.shape[1])
    for *_, member in ranked(scores.flatten(0, 1), head, tail)[:total]:
        expected[-member] += 1
    assert counts.flatten().tolist() == expected


@given(problems())
def test_adakv_guards_a_fifth_and_lets_each_layer_compete(problem: tuple[torch.Tensor, int, int, int]) -> None:
    scores, total, head, tail = problem
    num_layers, num_heads, num_tokens = scores.shape
    total = max(total, num_layers * num_heads * min(num_tokens, head + tail))
    counts = adakv_counts(scores, total, protect_head=head, protect_tail=tail)
    for layer in range(num_layers):
        budget = total // num_layers + (layer < total % num_layers)
        guarded = max(min(num_tokens, head + tail), math.floor(SAFEGUARD * budget / num_heads))
        order = ranked(scores[layer], head, tail)
        taken: list[tuple[int, int]] = []
        for h in range(num_heads):
            taken += [(h, t) for *_, t, member in order if -member == h][:guarded]
        for *_, t, member in order:
            if len(taken) < budget and (-member, t) not in taken:
                taken.append((-member, t))
        assert counts[layer].tolist() == [sum(own == h for own, _ in taken) for h in range(num_heads)]


@pytest.fixture(scope="module")
def cases(dense: DenseModel) -> list[Case]:
    return list(kv_cases(Request(dense.tokenizer, 6, 4)))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("margin", ["inside", "on_top"])
def test_equal_memory(
    dense: DenseModel, cases: list[Case], skewed: RetentionProfile, chunked: bool, margin: str
) -> None:
    """All baselines keep as many tokens over all heads as the static plan, context by context."""
    wanted = settings(["knorm"], ["profile", "dynamic", "adakv"], [0.7, 0.4, 0.2], margins=[margin])  # type: ignore[list-item]
    assert len(wanted) == 10
    evaluation = Evaluation(
        dense, wanted, {"knorm": skewed}, config=TangramConfig.parse({"chunk_size": 128, "window": 8}), chunked=chunked
    )
    kept: dict[tuple[int, float], set[float]] = {}
    states = {}
    for number, case in enumerate(cases):
        for setting, _, state in evaluation._compressed(case.context):
            if setting != REFERENCE:
                kept.setdefault((number, setting.retention), set()).add(int(state.retained.sum()))
                assert state.retained[..., :4].all()
                assert state.retained[..., -8:].all()
                states[setting.budgets] = state.retained.sum(-1)
    assert all(len(totals) == 1 for totals in kept.values())
    assert len(set.union(*kept.values())) >= 3
    # The same memory, differently shared: static by profile, dynamic anew, adakv the same in all layers.
    assert len({tuple(counts.flatten().tolist()) for counts in states.values()}) == 3
    layers = states["adakv"].sum(-1).tolist()
    assert max(layers) - min(layers) <= (1 if not chunked else -(-len(case.context) // 128))
    assert len(set(states["dynamic"].sum(-1).tolist())) > 1


def test_one_run_compares_options_at_equal_memory(
    dense: DenseModel, cases: list[Case], skewed: RetentionProfile
) -> None:
    wanted = settings(
        ["knorm"],
        ["profile", "dynamic", "uniform"],
        [0.5],
        alphas=[2, 0],
        margins=["inside", "on_top"],
        group_sizes=[1, 4],
    )
    names = [setting.name for setting in wanted]
    assert len(names) == len(set(names))
    by_budgets = {kind: [s for s in wanted[1:] if s.budgets == kind] for kind in ("profile", "dynamic", "uniform")}
    assert {kind: len(own) for kind, own in by_budgets.items()} == {"profile": 8, "dynamic": 5, "uniform": 1}
    evaluation = Evaluation(dense, wanted, {"knorm": skewed}, config=TangramConfig.parse({"window": 8}))
    answers: list[Answer] = evaluation.ask(cases[0], 99, 0)
    held = {answer.setting: answer.held for answer in answers}
    block = 32 / len(cases[0].context)
    for setting in by_budgets["profile"]:
        if setting.margin == "inside":
            assert 0.5 - 4 * block < held[setting] <= 0.5 + block
        elif setting.page_group_size == 4:
            assert held[setting] > 0.5 + block
    for (_, setting), (other, _) in compare(answers, "dynamic").items():
        if setting.budgets == "profile":
            assert other.margin == setting.margin
            assert setting.margin == "inside" or (other.alpha, other.page_group_size) == (
                setting.alpha,
                setting.page_group_size,
            )
    assert Setting("knorm", "uniform", 0.5, 2, "inside", 1) in wanted


def test_without_a_profile_the_memory_is_that_of_uniform_budgets(dense: DenseModel, cases: list[Case]) -> None:
    """As for a scorer that no engine has, and no profile can be made of."""
    config = TangramConfig.parse({"window": 8})
    wanted = settings(["knorm"], ["uniform", "dynamic", "adakv"], [0.5])
    kept = {
        answer.setting.budgets: answer.kept
        for answer in Evaluation(dense, wanted[1:], {}, config=config).ask(cases[0], 9, 0)
    }
    assert kept["dynamic"] == kept["adakv"] == kept["uniform"] < 0.55
    evaluation = Evaluation(dense, settings(["knorm"], ["profile"], [0.5]), {}, config=config)
    with pytest.raises(TangramError, match="need a retention profile"):
        evaluation.ask(cases[0], 9, 0)
