# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_tangram import RetentionProfile, TangramConfig
from vllm_tangram.cli.app import app
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.run import REFERENCE, Answer, Evaluation, Setting, ask_in_prompt, cells, compare, settings
from vllm_tangram.eval.tasks import Case, kv_cases, kv_records


@pytest.fixture(scope="module")
def cases(dense: DenseModel) -> list[Case]:
    return list(kv_cases(dense.tokenizer, kv_records(None, 6), 8))


def run(
    dense: DenseModel, cases: list[Case], profile: RetentionProfile, wanted: list[Setting], **options: object
) -> list[Answer]:
    config = TangramConfig.parse({"chunk_size": 128})
    evaluation = Evaluation(dense, wanted, {"snapkv": profile, "knorm": profile}, config=config, **options)
    return [answer for own in evaluation.answers(cases, 99) for answer in own]


@pytest.mark.parametrize("chunked", [False, True])
def test_every_question_after_every_setting(
    dense: DenseModel, cases: list[Case], skewed: RetentionProfile, chunked: bool
) -> None:
    wanted = settings(["snapkv", "knorm"], ["profile", "uniform"], [0.9, 0.6, 0.3])
    assert len(wanted) == 13
    answers = run(dense, cases, skewed, wanted, chunked=chunked)
    assert len(answers) == 8 * 13
    results = cells(answers)
    assert {cell.count for cell in results.values()} == {8}
    assert results[99, REFERENCE].held == 1
    for setting in wanted[1:]:
        held = results[99, setting].held
        # With chunks of 128 tokens the windows of 64 are most of what is held.
        assert held < 1 if chunked else held <= setting.retention + (64 + 32) / len(cases[0].context)
    assert len({cell.logprob for cell in results.values()}) > 6
    assert set(compare(answers)) == {(99, s, r) for s in ("snapkv", "knorm") for r in (0.9, 0.6, 0.3)}


def test_a_setting_does_not_depend_on_the_others(
    dense: DenseModel, cases: list[Case], skewed: RetentionProfile
) -> None:
    wanted = settings(["snapkv", "knorm"], ["profile", "uniform"], [0.5])
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


def test_paired_comparison() -> None:
    def answers(budgets: str, hits: list[bool], logprobs: list[float]) -> list[Answer]:
        setting = Setting("snapkv", budgets, 0.5)  # type: ignore[arg-type]
        rows = enumerate(zip(hits, logprobs, strict=True))
        return [Answer(10, case, "q", setting, 0.5, hit, logprob) for case, (hit, logprob) in rows]

    profiled = answers("profile", [True, True, True, True, False], [-1, -1, -1, -1, -1])
    uniform = answers("uniform", [False, False, False, True, True], [-2, -3, -2, -3, -1])
    (result,) = compare(profiled + uniform[::-1]).values()
    assert (result.gained, result.lost) == (3, 1)
    assert result.p_value == pytest.approx(2 * (1 + 4) / 16)
    assert result.logprob == pytest.approx(6 / 5)
    assert result.logprob_error == pytest.approx(math.sqrt(0.7 / 5))
    assert compare(profiled) == {}


def test_command(checkpoint: Path, dense: DenseModel, skewed: RetentionProfile, tmp_path: Path) -> None:
    skewed.save(tmp_path / "tiny.snapkv.safetensors")
    report, tables = tmp_path / "report.json", tmp_path / "tables.md"
    command = ["eval", "needle", str(checkpoint), "--lengths", "300,400", "--samples", "2", "--scorers", "snapkv"]
    command += ["--profile-dir", str(tmp_path), "--retentions", "0.5", "--json", str(report), "--markdown", str(tables)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    answers = json.loads(report.read_text())["answers"]
    assert len(answers) == 2 * 2 * 3
    assert {answer["setting"]["budgets"] for answer in answers} == {"profile", "uniform"}
    lines = tables.read_text().splitlines()
    assert [line for line in lines if line.endswith("memory held")] == [
        f"{length} tokens: right answers of 2 (log-probability) and memory held" for length in (300, 400)
    ]
    assert len([line for line in lines if line.startswith("| snapkv, ")]) == 4
    assert len([line for line in lines if line.startswith("| snapkv |")]) == 2  # the comparison


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scorers", "nope"], "unknown scorer"),
        (["--budgets", "equal"], "--budgets"),
        (["--retentions", "2"], "--retention"),
        (["--retentions", "half"], "--retentions"),
        (["--lengths", "1k"], "--lengths"),
        (["--scorers", "knorm", "--profile-dir", "."], "has 0 profiles"),
        (["--data", "missing.txt", "--budgets", "uniform"], "--data"),
    ],
)
def test_command_names_the_wrong_option(checkpoint: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["eval", "needle", str(checkpoint), "--lengths", "300", *options])
    assert result.exit_code == 2
    assert message in result.stderr
