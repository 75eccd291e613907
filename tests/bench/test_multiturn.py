# SPDX-License-Identifier: Apache-2.0
"""Traffic that repeats itself: what is sent, what is counted, and a tiny pair of real engines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_tangram.bench import multiturn, ttft
from vllm_tangram.bench.multiturn import Replayed, replayed
from vllm_tangram.bench.serving import Engine, Setup, Started
from vllm_tangram.bench.sizing import kv_bytes_per_token
from vllm_tangram.bench.traffic import Conversations, Trace, read_trace
from vllm_tangram.cli.app import app
from vllm_tangram.errors import TangramError

TALK = Conversations(conversations=3, turns=4, first_tokens=20, user_tokens=5, answer_tokens=3)
STARTED = Started(1 << 30, 12.0, "some device", "vLLM 0, torch 0")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 10240,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


class FakeStepper:
    """One request at a time, in their order; a step is a token and takes a second. Remembers prefixes in blocks of 8.

    The token says who answers and how far it is, so that a history shows whose answers are in it.
    """

    def __init__(self) -> None:
        self.now, self.preemptions = 0.0, 2
        self.waiting: list[tuple[str, list[int], int]] = []
        self.sent: dict[str, tuple[float, list[int]]] = {}
        self.answers: dict[str, list[int]] = {}
        self.known: set[tuple[int, ...]] = set()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-6  # else rounding could make it stand still

    def add_counted(self, name: str, prompt: list[int], max_tokens: int) -> None:
        assert name not in self.sent
        self.sent[name] = (self.now, list(prompt))
        self.waiting.append((name, list(prompt), max_tokens))

    def advance(self) -> SimpleNamespace:
        name, prompt, max_tokens = self.waiting[0]
        self.now += 1.0
        answer = self.answers.setdefault(name, [])
        prefixes = [tuple(prompt[:end]) for end in range(8, len(prompt), 8)]
        cached = max((len(one) for one in prefixes if one in self.known), default=0)
        token = 100_000 + 10 * list(self.sent).index(name) + len(answer)
        answer.append(token)
        finished = len(answer) == max_tokens
        if finished:
            self.waiting.pop(0)
            self.known.update(prefixes)
        return SimpleNamespace(
            token_ids={name: [token]},
            cached={name: cached},
            finished=[name] if finished else [],
            running=1 + (len(self.waiting) > 1),
        )

    def abort_all(self) -> None:
        self.waiting.clear()

    def forget_prefixes(self) -> None:
        assert not self.waiting
        self.known.clear()
        self.sent.clear()
        self.answers.clear()
        self.warm_up = self.now

    def resident_sessions(self) -> int:
        return len(self.known)

    def restored_sessions(self) -> int:
        return 3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStepper:
    """The benchmark's clock is its."""
    stepper = FakeStepper()
    monkeypatch.setattr(ttft, "time", stepper)
    return stepper


def run_fake(fake: FakeStepper, traffic: Conversations | Trace, max_seconds: float | None = None) -> Replayed:
    return replayed(fake, traffic, max_seconds)  # type: ignore[arg-type]


def test_a_turn_repeats_all_that_was_said(fake: FakeStepper) -> None:
    run_fake(fake, TALK)
    assert len(fake.sent) == TALK.requests == 12
    for conversation in range(3):
        history: list[int] = []
        for turn in range(4):
            _, prompt = fake.sent[f"{conversation}/{turn}"]
            assert prompt[: len(history)] == history
            assert len(prompt) == len(history) + (5 if turn else 20)
            history = prompt + fake.answers[f"{conversation}/{turn}"]
        assert len(history) == TALK.max_model_len == 20 + 4 * 3 + 3 * 5
    assert TALK.working_set == 3 * 47
    firsts = {tuple(fake.sent[f"{conversation}/0"][1][:8]) for conversation in range(3)}
    assert len(firsts) == 3


def test_texts_are_the_same_for_every_engine() -> None:
    again = Conversations(**{**TALK.described(), "think_seconds": 0.0})
    assert TALK.first() == again.first()
    for one, other in zip(TALK.first(), again.first(), strict=True):
        assert one.prompt == other.prompt
        following, same = TALK.following(one, [1, 2, 3], 9.0), again.following(other, [1, 2, 3], 11.0)
        assert following is not None
        assert same is not None
        assert (following.prompt, following.seconds, same.seconds) == (same.prompt, 9.0, 11.0)


def test_what_is_measured(fake: FakeStepper) -> None:
    """One request of 3 s at a time: first answers begin at 1, 4 and 7, and later turns wait for the other two."""
    result = run_fake(fake, TALK)
    assert (result.seconds, result.finished) == (36.0, 12)
    assert result.requests_per_second == pytest.approx(12 / 36)
    waits = [1.0, 4.0, 7.0] + 9 * [7.0]
    assert result.ttft_mean == pytest.approx(np.mean(waits))
    assert result.ttft_p50 == 7.0
    assert result.ttft_p99 == pytest.approx(np.percentile(waits, 99))
    # Prompts of 20, 28, 36, 44 tokens; of the one before it, whole blocks of 8 but the last token's are known.
    assert result.prompt_tokens == 3 * (20 + 28 + 36 + 44)
    assert result.prefilled_tokens == 3 * (20 + (28 - 16) + (36 - 24) + (44 - 32))
    assert result.hit_rate == pytest.approx(1 - result.prefilled_tokens / result.prompt_tokens)
    assert (result.most_running, result.preemptions) == (2, 2)
    assert (result.sessions, result.restored) == (len(fake.known), 3)
    assert not fake.waiting


def test_think_time(fake: FakeStepper) -> None:
    talk = Conversations(1, 400, 8, 1, 2, think_seconds=5.0)
    result = run_fake(fake, talk)
    begun = np.array([seconds for seconds, _ in fake.sent.values()])
    thought = np.diff(begun) - 2.0
    assert (thought >= 0).all()
    assert thought.mean() == pytest.approx(5.0, rel=0.15)
    assert thought.std() == pytest.approx(5.0, rel=0.25)
    assert result.ttft_p99 == pytest.approx(1.0, abs=0.02)  # nobody is before it


def test_conversations_begin_one_after_the_other() -> None:
    talk = Conversations(400, 1, 8, 1, 2, begin_within=100.0)
    begun = sorted(request.seconds for request in talk.first())
    even = (np.arange(400) + 0.5) / 4
    assert np.abs(begun - even).max() < 10  # the seeds are fixed; of 1500 sets of random times one is further off
    assert [request.prompt for request in talk.first()] == [
        request.prompt for request in Conversations(400, 1, 8, 1, 2).first()
    ]


def test_time_limit(fake: FakeStepper) -> None:
    """What was due and waits when the time is up counts with what it has waited."""
    result = run_fake(fake, TALK, max_seconds=5.0)
    assert (result.seconds, result.finished) == (5.0, 1)
    # Answered at 1 and 4. Since 0 the third waits, since 3 the first's next turn.
    assert result.ttft_mean == pytest.approx((1 + 4 + 5 + 2) / 4)
    assert result.prompt_tokens == 40
    assert not fake.waiting
    with pytest.raises(TangramError, match="no request got a token in 0 s"):
        run_fake(FakeStepper(), Conversations(0, 1, 9, 1, 2))


def line(milliseconds: float, prompt: int, output: int, *blocks: int) -> str:
    fields = {"timestamp": milliseconds, "input_length": prompt, "output_length": output, "hash_ids": blocks}
    return json.dumps(fields) + "\n"


# Two conversations that share their first block, of two and three requests.
LINES = [
    line(1000, 1100, 10, 0, 1, 2),
    line(2000, 700, 20, 0, 7),
    line(4000, 1700, 30, 0, 1, 3, 4),
    line(8000, 1024, 40, 0, 1),
    line(9000, 1030, 1, 0, 7, 8),
]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_trace(tmp_path: Path, name: str) -> None:
    path, text = tmp_path / name, "".join(LINES).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    trace = read_trace(path, scale=0.25, speed=2.0, limit=5, longest=4096)
    due = trace.first()
    assert [one.seconds for one in due] == [0.0, 0.5, 1.5, 3.5, 4.0]
    assert [len(one.prompt) for one in due] == [275, 175, 425, 256, 258]
    assert [one.output_tokens for one in due] == [2, 5, 8, 10, 1]
    first, second, third, fourth, fifth = (list(one.prompt) for one in due)
    assert first[:256] == third[:256] == fourth
    assert first[:128] == second[:128] == fifth[:128]
    assert second[128:] == fifth[128:175]
    assert first[128:175] != second[128:]
    assert first[256:] != third[256:275]
    assert (trace.requests, trace.max_model_len) == (5, 433)
    # Blocks 0, 1, 3 and 7 whole somewhere (128), 2 to 275 - 256, 4 to 425 - 384, 8 to 258 - 256.
    assert trace.working_set == 4 * 128 + 19 + 41 + 2
    assert due == read_trace(path, 0.25, 2.0, 5, 4096).first()


def test_part_of_a_trace(tmp_path: Path) -> None:
    """Whole conversations, no longer than asked for, the first of them at once."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINES))
    assert [one.seconds for one in read_trace(path, 1.0, 1.0, 2, 4096).recorded] == [0.0, 7.0]
    assert [one.output_tokens for one in read_trace(path, 1.0, 1.0, 5, 1729).recorded] == [20, 1]
    assert read_trace(path, 1.0, 1.0, 4, 1730).requests in (2, 3)
    with pytest.raises(TangramError, match="no conversation of at most 1 requests"):
        read_trace(path, 1.0, 1.0, 1, 4096)


@pytest.mark.parametrize("scale", [0.001, 0.013, 0.3, 1.7])
def test_lengths_at_any_scale(tmp_path: Path, scale: float) -> None:
    random = Random(scale)
    lengths = [random.randint(1, 9000) for _ in range(50)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line(0, length, 5, *range(-(-length // 512))) for length in lengths))
    trace = read_trace(path, scale, 1.0, 50, 1 << 20)
    block = max(round(512 * scale), 1)
    prompts = [one.prompt for one in trace.first()]
    longest = max(prompts, key=len)
    for prompt, length in zip(prompts, [one.prompt_tokens for one in trace.recorded], strict=True):
        assert len(prompt) == length >= 1
        assert prompt == longest[: len(prompt)]
    assert sum(map(len, prompts)) == pytest.approx(scale * sum(lengths), rel=0.05, abs=len(lengths) * block)
    assert trace.working_set == len(longest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("7", "expected a JSON object, got int"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": [1]}', "no 'output_length'"),
        (line(-1, 5, 5, 1), "must be numbers, 0 or more"),
        (line(float("nan"), 5, 5, 1), "must be numbers, 0 or more"),
        (line(1, True, 5, 1), "must be numbers, 0 or more"),
        (line(1, 0, 5), "input_length 0 must be above 0"),
        (line(1, 513, 5, 1), "input_length 513 must be above 0 and hash_ids one per 512 tokens of it"),
        (line(1, 5, 5).replace("[]", '["1"]'), "hash_ids must be a list of whole numbers"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES[0] + text.strip() + "\n" + LINES[1])
    with pytest.raises(TangramError, match=r"--trace: .*trace.jsonl, line 2: ") as raised:
        read_trace(path, 1.0, 1.0, 5, 4096)
    assert message in str(raised.value)


@pytest.mark.parametrize("data", [None, b"no gzip", gzip.compress(b"\xff\xfe"), gzip.compress(b"{}" * 999)[:30]])
def test_unreadable_trace(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "trace.jsonl.gz"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TangramError, match=r"--trace: .*trace.jsonl.gz cannot be read: ."):
        read_trace(path, 1.0, 1.0, 5, 4096)


def test_real_trace(shared_data: Path) -> None:
    """The part that is chosen repeats about as much as the whole, 0.37; its first requests repeat 0.04."""
    trace = read_trace(shared_data / "mooncake" / "conversation_trace.jsonl.gz", 1.0, 1.0, 200, 65536)
    prompt = sum(one.prompt_tokens for one in trace.recorded)
    assert trace.requests == 200
    assert 0.25 < 1 - trace.working_set / prompt < 0.5


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "multiturn", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale", "2"], "--scale: only with --trace"),
        (["--trace", "file", "--turns", "2"], "--turns: only without --trace or --dialogues"),
        (["--dialogues", "file", "--think", "2"], "--think: only without --trace or --dialogues"),
        (["--dialogues", "file", "--scale", "2"], "--scale: only with --trace"),
        (["--dialogues", "file", "--trace", "file"], "--trace, --dialogues: give one"),
        (["--limit", "2"], "--limit: only with --trace or --dialogues"),
        (["--trace", "/nowhere/file"], "--trace: /nowhere/file cannot be read: No such file"),
        (["--trace", "file", "--speed", "0"], "--speed: must be a number above 0, got 0"),
        (["--working-set", "nan"], "--working-set: must be a number above 0, got nan"),
        (["--working-set", "2", "--conversations", "2"], "--working-set, --conversations: one decides the other"),
        (["--think", "-1"], "--think: must be a number of seconds, 0 or more, got -1"),
        (["--begin-within", "inf"], "--begin-within: must be a number of seconds, 0 or more, got inf"),
        (["--chunk-size", "1024", "--step-tokens", "512"], "--step-tokens: must be at least --chunk-size (1024)"),
        (["--retention", "1.5"], "--engine, --retention: '1.5' is neither"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"error: {message}" in " ".join(result.stderr.split())


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A folder with a configuration and nothing else."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: str) -> None:
    """The pool decides how many conversations there are; a second run adds its engine."""
    stock = Replayed(10.0, 20, 2.0, 1.0, 0.9, 4.0, 1000, 900, 0.1, 2, 1, None, None)
    ours = Replayed(5.0, 20, 4.0, 0.5, 0.4, 1.5, 1000, 250, 0.75, 8, 0, 7, 5)
    given: list[tuple[Setup, Conversations | Trace]] = []
    engines_given: list[list[Engine]] = []

    def measure(setup: Setup, engines: list[Engine], traffic: Conversations | Trace, *others: Any) -> None:
        given.append((setup, traffic))
        engines_given.append(engines)
        for engine in engines:
            others[1](engine, STARTED, stock if engine.retention is None else ours)

    monkeypatch.setattr(multiturn, "measure_multiturn", measure)
    output, plot = tmp_path / "out.json", tmp_path / "plot.png"
    assert kv_bytes_per_token(tiny) == 2 * 2 * 2 * 32 * 2
    sizes = ["--first-tokens", "200", "--turns", "3", "--user-tokens", "10", "--answer-tokens", "10"]
    common = [tiny, "--kv-gib", "0.001", "--working-set", "2", *sizes, "--output", str(output)]
    result = run(*common, "--engine", "stock")
    assert result.exit_code == 0, result.output
    result = run(*common, "--retention", "0.25", "--plot", str(plot), "--json", "--spill-gib", "2")
    assert result.exit_code == 0, result.output
    setup, talk = given[-1]
    pool = int(0.001 * 2**30) // 512
    assert talk == Conversations(round(2 * pool / 250), 3, 200, 10, 10)
    assert setup.prefix_caching
    report = json.loads(result.stdout)
    assert report == json.loads(output.read_text())
    assert report["setup"]["working_set"] == pytest.approx(2, abs=0.1)
    assert list(report["engines"]) == ["stock", "0.25", "0.25+spill"]
    assert [engine.options for engine in engines_given[-1]] == [{}, {}, {"session_spill_gib": 2.0}]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = " ".join(run(*common, "--engine", "stock").stdout.split())
    for part in (
        "0.25 4.000 2.00 0.40 1.50 250 75.0 0 7 5",
        "stock 2.000 1.00 0.90 4.00 900 10.0 1 - -",
        "2.0 times what",
    ):
        assert part in shown

    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINES))
    result = run("--trace", str(path), "--scale", "0.5", "--engine", "stock", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "5 requests of trace.jsonl, lengths x 0.5" in " ".join(result.stdout.split())
    assert given[-1][1].requests == 5


def test_setup_of_sessions(monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    """Sessions and prefix caches are on here and off elsewhere, for both."""
    started: list[dict[str, Any]] = []
    monkeypatch.setattr("vllm_tangram.bench.serving.EngineProcess", lambda *given, **named: started.append(named))
    common: dict[str, Any] = {"kv_bytes": 1 << 20, "kv_tokens": 0, "max_num_seqs": 4, "enforce_eager": True}
    for sessions in ({}, {"step_tokens": 256, "prefix_caching": True}):
        for key in ("stock", "0.25"):
            setup = Setup(tiny, "some.npz", chunk_size=64, **common, **sessions)
            setup.start(Engine.parse(key), 100)
    caching = [one["options"]["enable_prefix_caching"] for one in started]
    assert caching == [False, False, True, True]
    assert [one["options"]["max_num_batched_tokens"] for one in started] == [68, 68, 260, 260]


@pytest.mark.engine
def test_tiny_engines(tiny: str) -> None:
    """Two conversations of three turns in a pool that holds all: what is computed is known beforehand."""
    talk = Conversations(conversations=2, turns=3, first_tokens=300, user_tokens=50, answer_tokens=6)
    setup = Setup(
        tiny,
        None,
        kv_bytes=4 << 20,
        kv_tokens=0,
        max_num_seqs=4,
        chunk_size=128,
        enforce_eager=True,
        options={"budgets": "uniform", "window": 32},
        prefix_caching=True,
    )
    measured = {}
    for key in ("stock", "0.25"):
        with setup.start(Engine.parse(key), talk.max_model_len) as process:
            measured[key] = process.call(replayed, talk)
    for result in measured.values():
        assert (result.finished, result.prompt_tokens) == (6, 2 * (300 + 356 + 412))
        assert result.requests_per_second == pytest.approx(6 / result.seconds)
        assert 0 < result.ttft_p50 <= result.ttft_p99 < result.seconds
    # Whole chunks of the prompt before: of 300 and of 356 tokens two. Stock: whole blocks of 128, too, answers as well.
    assert measured["0.25"].prefilled_tokens == 2 * (300 + (356 - 256) + (412 - 256))
    assert measured["stock"].prefilled_tokens == measured["0.25"].prefilled_tokens
    assert (measured["stock"].sessions, measured["0.25"].sessions) == (None, 2)
    assert (measured["stock"].restored, measured["0.25"].restored) == (None, 0)
