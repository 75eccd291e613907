# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from tests.compression.gates import untrained_gate
from transformers import AutoModelForCausalLM

from vllm_tangram import RetentionProfile, TangramConfig, TangramError
from vllm_tangram.budget import RetentionPlan
from vllm_tangram.compression import get_scorer, scorer_names
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.state import DenseState, Past

OPTIONS = {"sinks": 4, "window": 16}


def ids(count: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(256), k=count)


def plan_of(profile: RetentionProfile, **options: object) -> RetentionPlan:
    config = TangramConfig.parse({"page_group_size": 4, "chunk_size": 256, "retention": 0.5, **options})
    return RetentionPlan(config, profile, num_layers=3, num_kv_heads=2, block_size=32, max_tokens=1024)


def test_full_kv_is_the_plain_model(dense: DenseModel, checkpoint: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = ids(90)
    with torch.inference_mode():
        logits = plain(torch.tensor([tokens])).logits[0]
    state = dense.empty()
    for start, end in ((0, 33), (33, 34), (34, 90)):
        state = dense.read(tokens[start:end], **OPTIONS, after=state).state
        torch.testing.assert_close(state.logits, logits[end - 1], atol=1e-4, rtol=1e-4)
    (logprobs,), _ = dense.score_answer(
        [dense.read(tokens[:40], **OPTIONS, after=dense.empty()).state], [], tokens[40:]
    )
    expected = logits[39:-1].log_softmax(-1).gather(-1, torch.tensor(tokens[40:])[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scorer", scorer_names())
@pytest.mark.parametrize("prompt_len", [40, 256, 600, 1024])
def test_keeps_what_the_schedule_says(
    dense: DenseModel, skewed: RetentionProfile, scorer: str, prompt_len: int
) -> None:
    plan, gate = plan_of(skewed), untrained_gate(dense.fingerprint)
    schedule, tokens = plan.schedule(0.5), ids(prompt_len)
    state = dense.empty()
    for start in range(0, prompt_len, 256):
        chunk = tokens[start : start + 256]
        before = state
        state = dense.read(chunk, [get_scorer(scorer, gate)], **OPTIONS, after=before).compress(
            scorer, plan, schedule, prompt_len
        )
        lengths = schedule.lengths(state.num_tokens, prompt_len)
        assert (state.retained.sum(-1).numpy() == lengths[plan.groups.group]).all()
        assert (state.retained[..., :start] == before.retained).all()  # earlier chunks are not looked at again
        assert state.retained[..., :4].all()
        assert state.retained[..., -min(OPTIONS["window"], len(chunk)) :].all()
    whole = dense.prefill(tokens, get_scorer(scorer, gate), plan, schedule)
    assert (whole.retained == state.retained).all()
    torch.testing.assert_close(whole.logits, state.logits)
    if prompt_len > 256:
        assert not state.retained.all()
    assert whole.kept_positions(1, 0).tolist() == [t for t in range(prompt_len) if state.retained[1, 0, t]]


def test_evicted_tokens_are_not_seen(dense: DenseModel, skewed: RetentionProfile) -> None:
    """What a head forgot may be anything: neither answers nor later chunks change."""
    plan = plan_of(skewed)
    state = dense.prefill(ids(512), get_scorer("knorm"), plan, plan.schedule(0.5))
    forgotten = ~state.retained[..., None]
    for spoiled in (state.keys, state.values):
        for layer, tensor in enumerate(spoiled):
            tensor.masked_fill_(forgotten[layer], float("nan"))
    logprobs, _ = dense.score_answer([state], ids(5), ids(3))
    assert logprobs.isfinite().all()
    assert dense.read(ids(70), **OPTIONS, after=state).state.logits.isfinite().all()


def test_attention_equals_plain_loops() -> None:
    """Three rows behind the same past, of which every head retained something else, two query heads each."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, values, retained = draw(2, 30, 8), draw(2, 30, 8), torch.rand(3, 2, 30, generator=generator) < 0.4
    retained[0, 1], retained[1, 0] = True, False
    states = [DenseState((keys,), (values,), own[None], torch.empty(0)) for own in retained]
    query, key, value = draw(3, 4, 7, 8), draw(3, 2, 7, 8), draw(3, 2, 7, 8)
    attended = Past(states).attend(0, query, key, value, 0.3)
    for row, head, token in product(range(3), range(4), range(7)):
        kept = retained[row, head // 2]
        k = torch.cat([keys[head // 2, kept], key[row, head // 2, : token + 1]])
        v = torch.cat([values[head // 2, kept], value[row, head // 2, : token + 1]])
        torch.testing.assert_close(
            attended[row, head, token], (0.3 * k @ query[row, head, token]).softmax(0) @ v, rtol=1e-9, atol=1e-9
        )


def test_questions_together_are_as_each_alone(dense: DenseModel, skewed: RetentionProfile) -> None:
    plan = plan_of(skewed)
    states = [dense.prefill(ids(300), get_scorer(name), plan, plan.schedule(0.5)) for name in ("keydiff", "knorm")]
    questions = [(ids(9, 1), ids(4, 2)), ([], ids(3, 3)), (ids(2, 4), ids(1, 5)), ([], ids(1, 6))]
    for (question, answer), (together, hits) in zip(questions, dense.score_answers(states, questions), strict=True):
        assert together.shape == hits.shape == (2, len(answer))
        for state, row, hit in zip(states, together, hits, strict=True):
            (alone,), (own,) = dense.score_answer([state], question, answer)
            torch.testing.assert_close(alone, row, atol=1e-4, rtol=1e-4)
            assert (own == hit).all()


def test_memory_of_a_pass_is_bounded(dense: DenseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    one, four = [(ids(20), ids(5))], [(ids(20), ids(5))] * 4
    assert dense.states_per_pass(500, one) >= 4 * dense.states_per_pass(500, four) > 4
    assert dense.states_per_pass(5000, one) < dense.states_per_pass(500, one)
    # Logits are computed from the first token that any question asks for to the last one.
    apart, throughout = [(ids(20), ids(5)), (ids(1), ids(5))], [(ids(1), ids(24))] * 2
    assert dense.states_per_pass(50, apart) == dense.states_per_pass(50, throughout)
    on_cpu = dense.states_per_pass(500, one)
    monkeypatch.setattr("vllm_tangram.eval.dense._PASS_BYTES", 1)
    assert dense.states_per_pass(500, one) == 1
    monkeypatch.setattr(DenseModel, "device", torch.device("cuda"))
    for memory in (1 << 32, 1 << 33):  # an eighth of the first is what may be taken of a CPU's
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        assert dense.states_per_pass(500, one) == pytest.approx(on_cpu * (memory >> 32), rel=0.01)


def test_rows_do_not_depend_on_each_other(dense: DenseModel, skewed: RetentionProfile) -> None:
    plan = plan_of(skewed, chunk_size=512)
    scorers = [get_scorer(name, untrained_gate(dense.fingerprint)) for name in scorer_names()]
    chunk = dense.read(ids(512), scorers, **OPTIONS, after=dense.empty())
    states = [chunk.compress(scorer.name, plan, plan.schedule(0.5), 512) for scorer in scorers]
    together, hits = dense.score_answer(states, ids(7), ids(3, 1))
    assert not torch.allclose(together[0], together[1], atol=1e-3)
    for state, row, hit in zip(states, together, hits, strict=True):
        (alone,), (own,) = dense.score_answer([state], ids(7), ids(3, 1))
        torch.testing.assert_close(alone, row, atol=1e-4, rtol=1e-4)
        assert (own == hit).all()


def test_greedy_answer_is_all_hits(dense: DenseModel, skewed: RetentionProfile) -> None:
    plan = plan_of(skewed)
    state = dense.prefill(ids(300), get_scorer("keydiff"), plan, plan.schedule(0.5))
    answer = dense.generate(state, 6)
    for question in ([], answer[:2]):
        _, hits = dense.score_answer([state], question, answer[len(question) :])
        assert hits.all()
    _, hits = dense.score_answer([state], [], [*answer[:-1], (answer[-1] + 1) % 256])
    assert hits[0].tolist() == [True] * 5 + [False]


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TangramError, match=r"no config\.json"):
        DenseModel.load(tmp_path)
