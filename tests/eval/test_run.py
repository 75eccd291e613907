# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from vllm_tangram import RetentionProfile, TangramConfig, TangramError
from vllm_tangram.cli.app import app
from vllm_tangram.compression import get_scorer
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.engine import generated
from vllm_tangram.eval.run import Answer, Evaluation, ask_in_prompt
from vllm_tangram.eval.settings import ALLOCATIONS, REFERENCE, Setting, settings
from vllm_tangram.eval.statistics import cells, compare
from vllm_tangram.eval.tasks import Case, Request
from vllm_tangram.eval.tasks.kv import kv_cases
from vllm_tangram.eval.tasks.needles import multi_key_cases


@pytest.fixture(scope="module")
def cases(dense: DenseModel) -> list[Case]:
    return list(kv_cases(Request(dense.tokenizer, 6, 8)))


def run(
    dense: DenseModel, cases: list[Case], profile: RetentionProfile, wanted: list[Setting], **options: object
) -> list[Answer]:
    config = TangramConfig.parse({"chunk_size": 128})
    evaluation = Evaluation(dense, wanted, {"snapkv": profile, "knorm": profile}, config=config, **options)
    return [answer for number, case in enumerate(cases) for answer in evaluation.ask(case, 99, number)]


@pytest.mark.parametrize("chunked", [False, True])
def test_every_question_after_every_setting(
    dense: DenseModel, cases: list[Case], skewed: RetentionProfile, chunked: bool
) -> None:
    wanted = settings(["snapkv", "knorm"], ALLOCATIONS, [0.9, 0.6, 0.3])
    assert len(wanted) == 25
    answers = run(dense, cases, skewed, wanted, chunked=chunked)
    assert len(answers) == 8 * 25
    results = cells(answers)
    assert {cell.count for cell in results.values()} == {8}
    assert results[99, REFERENCE].held == 1
    for setting in wanted[1:]:
        held = results[99, setting].held
        # With chunks of 128 tokens the windows and their blocks are much of what is held.
        assert held < 1 if chunked else held <= setting.retention + (64 + 32) / len(cases[0].context)
    assert len({cell.logprob for cell in results.values()}) > 6
    assert set(compare(answers, "uniform")) == {(99, s) for s in wanted[1:] if s.budgets != "uniform"}


def test_a_setting_does_not_depend_on_the_others(
    dense: DenseModel, cases: list[Case], skewed: RetentionProfile
) -> None:
    wanted = settings(["snapkv", "knorm"], ALLOCATIONS, [0.5])
    together = run(dense, cases, skewed, wanted)
    for setting in wanted:
        alone = run(dense, cases, skewed, [setting])
        own = [answer for answer in together if answer.setting == setting]
        assert [a.logprob for a in own] == pytest.approx([a.logprob for a in alone], abs=1e-4)


def test_question_in_prompt(dense: DenseModel, cases: list[Case], skewed: RetentionProfile) -> None:
    known = list(ask_in_prompt(cases))
    assert len(known) == 8
    assert known[5].context == cases[1].context + cases[1].questions[1].prompt
    before, after = (run(dense, some, skewed, [REFERENCE]) for some in (cases, known))
    # Knowing the question changes nothing where nothing is evicted.
    assert [a.logprob for a in before] == pytest.approx([a.logprob for a in after], abs=1e-4)


def test_an_oracle_is_a_scorer_of_the_whole_context(
    dense: DenseModel, cases: list[Case], skewed: RetentionProfile
) -> None:
    """One that gives a scorer's own scores answers as the scorer does; one that sees the future need not."""
    seen = []

    def keydiff(model: DenseModel, ids: Sequence[int]) -> Tensor:
        seen.append(len(ids))
        chunk = model.read(ids, [get_scorer("keydiff")], sinks=4, window=64, after=model.empty())
        return chunk.scores["keydiff"]

    config = TangramConfig.parse({"chunk_size": 128, "window": 8})
    profiles = {"keydiff": skewed, "oracle": skewed}
    for chunked in (False, True):
        wanted = settings(["keydiff", "oracle"], ["profile", "dynamic"], [0.4])
        evaluation = Evaluation(
            dense, wanted, profiles, config=config, chunked=chunked, oracles={"oracle": keydiff, "unused": keydiff}
        )
        seen.clear()
        answers = evaluation.ask(cases[0], 99, 0)
        assert seen == [len(cases[0].context)]
        by_name: dict[str, list[Answer]] = {}
        for answer in answers:
            by_name.setdefault(answer.setting.scorer, []).append(answer)
        same = [
            a.logprob == pytest.approx(b.logprob, abs=1e-4)
            for a, b in zip(by_name["keydiff"], by_name["oracle"], strict=True)
        ]
        assert len(same) == 2 * len(cases[0].questions)
        # Chunk by chunk the scorer knows a chunk alone, the oracle the whole context.
        assert not any(same) if chunked else all(same)
        assert [a.kept for a in by_name["keydiff"]] == [a.kept for a in by_name["oracle"]]


def test_command(checkpoint: Path, skewed: RetentionProfile, tmp_path: Path) -> None:
    skewed.save(tmp_path / "tiny.snapkv.safetensors")
    paths = {name: tmp_path / name for name in ("work", "json", "markdown", "plot")}
    command = ["eval", "needle", str(checkpoint), "--lengths", "300,400", "--samples", "2", "--scorers", "snapkv"]
    command += ["--profile-dir", str(tmp_path), "--retentions", "0.5,0.3", "--budgets", "profile,dynamic,uniform"]
    command += [part for name, path in paths.items() for part in (f"--{name}", str(path))]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    report = json.loads(paths["json"].read_text())
    assert len(report["answers"]) == 2 * 2 * 7
    assert {answer["setting"]["budgets"] for answer in report["answers"]} == {"profile", "dynamic", "uniform"}
    assert len(report["cells"]) == 2 * 7
    assert {(item["setting"]["budgets"], item["baseline"]["budgets"]) for item in report["comparisons"]} == {
        ("profile", "uniform"),
        ("dynamic", "uniform"),
        ("profile", "dynamic"),
        ("uniform", "dynamic"),
    }
    lines = paths["markdown"].read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("|")] == [
        "300 tokens, with 95 % intervals",
        "400 tokens, with 95 % intervals",
        "Against uniform budgets: paired differences, with 95 % intervals",
        "Against dynamic budgets: paired differences, with 95 % intervals",
    ]
    assert len([line for line in lines if line.startswith("| snapkv | profile |")]) == 2 * 2 + 2 * 2 * 2
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")

    # Stopped in the middle and started again: the same figures, and what was answered is not asked again.
    whole = paths["work"].read_text().splitlines(keepends=True)
    assert len(whole) == 1 + 4
    paths["work"].write_text("".join(whole[:3]) + whole[3][:50])
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert json.loads(paths["json"].read_text()) == report
    assert paths["work"].read_text().splitlines(keepends=True)[:3] == whole[:3]
    other = CliRunner().invoke(app, [*command, "--seed", "1"])
    assert other.exit_code == 2
    assert "seed: 0 there, 1 here" in other.stderr


def test_command_measures_likelihood(checkpoint: Path, skewed: RetentionProfile, tmp_path: Path) -> None:
    skewed.save(tmp_path / "tiny.snapkv.safetensors")
    tables, plot = tmp_path / "tables.md", tmp_path / "plot.png"
    command = ["eval", "perplexity", str(checkpoint), "--lengths", "300", "--samples", "3", "--scorers", "snapkv"]
    command += ["--profile-dir", str(tmp_path), "--retentions", "0.5", "--alphas", "0,2", "--page-group-sizes", "1,2"]
    result = CliRunner().invoke(app, [*command, "--markdown", str(tables), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    lines = tables.read_text().splitlines()
    assert lines[2] == ("| scorer | budgets | alpha | G | retention | held | perplexity of 3 | first choice |")
    rows = [line.split(" | ") for line in lines if line.startswith("| snapkv | profile")]
    assert [row[2:4] for row in rows[:4]] == [["0", "1"], ["0", "2"], ["2", "1"], ["2", "2"]]
    assert all(float(row[6].split()[0]) > 100 for row in rows[:4])  # random weights: about as many as there are bytes
    assert not any("right" in line for line in lines)
    assert plot.exists()


def test_command_asks_engines_one_after_the_other(
    checkpoint: Path, dense: DenseModel, skewed: RetentionProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are played by the dense model with full KV; what they are given and credited with is real."""
    started: list[tuple[str, bool, dict[str, Any]]] = []
    asked: list[tuple[int, ...]] = []

    class Played:
        def __init__(self, name: str, model: str, *, ours: bool, options: dict[str, Any], kv_tokens: int) -> None:
            assert model == str(checkpoint)
            assert kv_tokens >= 2 * options["max_model_len"]
            started.append((name, ours, options))

        def __enter__(self) -> Played:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def call(self, function: object, name: str, prompt: list[int], count: int) -> list[int]:
            assert function is generated
            if limit and len(asked) == limit[0]:
                raise TangramError("stopped")
            asked.append(tuple(prompt))
            return dense.generate(dense.read(prompt, sinks=4, window=64, after=dense.empty()).state, count)

    limit: list[int] = [5]
    monkeypatch.setattr("vllm_tangram.eval.engine.EngineProcess", Played)
    # A token of this model is hardly more than a letter: its questions are longer than what a window of 16 keeps.
    monkeypatch.setattr("vllm_tangram.eval.engine._kept_in_full", lambda window: 100)
    skewed.save(tmp_path / "tiny.snapkv.safetensors")
    work, report = tmp_path / "work.jsonl", tmp_path / "report.json"
    command = ["eval", "multikey", str(checkpoint), "--engine", "--lengths", "512", "--samples", "8"]
    command += ["--scorers", "snapkv", "--profile-dir", str(tmp_path), "--retentions", "0.5"]
    command += ["--work", str(work), "--json", str(report)]
    stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 2
    assert "stopped" in stopped.stderr
    assert len(work.read_text().splitlines()) == 1 + 1  # the context of which all four questions were answered
    limit.clear()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert [(ours, options.get("budgets"), options.get("retention")) for _, ours, options in started[1:]] == [
        (False, None, None),
        (True, "profile", 0.5),
        (True, "uniform", 0.5),
    ]
    assert started[2][2]["profile"] == str(tmp_path / "tiny.snapkv.safetensors")
    assert started[2][2]["chunk_size"] == 512
    assert len(asked) == 5 + 4 + 8 + 8

    written = json.loads(report.read_text())
    assert [cell["setting"]["scorer"] for cell in written["cells"]] == ["full KV", "snapkv", "snapkv"]
    assert [cell["count"] for cell in written["cells"]] == [8] * 3
    assert written["cells"][0]["held"] == 1
    assert written["cells"][1]["held"] < 0.6
    assert written["cells"][0]["logprob"] is None
    cases = list(multi_key_cases(Request(dense.tokenizer, 512, 8)))
    expected = [answer for number, case in enumerate(cases) for answer in reference(dense, case, number)]
    assert [answer["correct"] for answer in written["answers"] if answer["held"] == 1] == expected


def reference(dense: DenseModel, case: Case, number: int) -> list[bool]:
    evaluation = Evaluation(dense, [REFERENCE], {}, config=TangramConfig())
    return [answer.correct for answer in evaluation.ask(case, 512, number)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scorers", "nope"], "unknown scorer"),
        (["--budgets", "equal"], "--budgets"),
        (["--retentions", "2"], "--retention"),
        (["--retentions", "half"], "--retentions"),
        (["--lengths", "long"], "--lengths"),
        (["--scorers", "snapkv", "--profile-dir", "."], "has 0 profiles"),
        (["--data", "missing.txt", "--budgets", "uniform"], "--data"),
        (["--lengths", "2100", "--budgets", "uniform"], "the model takes 2048"),
        (["--alphas", "-1"], "--alpha"),
        (["--margins", "outside"], "--margin"),
        (["--page-group-sizes", "0"], "--page-group-size"),
        (["--json", "missing/report.json"], "--json"),
        (["--engine", "--budgets", "dynamic", "--lengths", "320"], "'dynamic' is no budget of the engine"),
        (["--engine", "--lengths", "320,640"], "one of --lengths, or a --chunk-size"),
        (["--engine", "--lengths", "320,640", "--chunk-size", "256"], "320 tokens is not a whole number of chunks"),
        (["--engine", "--question-in-prompt"], "--question-in-prompt"),
    ],
)
def test_command_names_the_wrong_option(checkpoint: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["eval", "needle", str(checkpoint), "--lengths", "300", *options])
    assert result.exit_code == 2
    assert message in result.stderr
