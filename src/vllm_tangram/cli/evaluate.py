# SPDX-License-Identifier: Apache-2.0
"""``tangram eval``: what compression does to answers, non-uniform budgets beside uniform ones of the same memory."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from vllm_tangram.cli.rendering import console, percent, table
from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.budget import RetentionProfile
    from vllm_tangram.eval.dense import DenseModel
    from vllm_tangram.eval.run import Answer, Evaluation
    from vllm_tangram.eval.tasks import Case

Task = Literal["needle", "kv"]
_N = TypeVar("_N", int, float)
_Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows


def evaluate(
    task: Annotated[Task, typer.Argument(help="needle: a code told once in a long text; kv: values of random keys.")],
    model: Annotated[
        Path | None, typer.Argument(help="A checkpoint folder; the embedded model if none is given.")
    ] = None,
    retentions: Annotated[str, typer.Option(help="Shares of full KV.", metavar="X[,X...]")] = "0.5,0.25,0.1",
    scorers: Annotated[
        str, typer.Option(help="What ranks the tokens.", metavar="NAME[,NAME...]")
    ] = "streaming,knorm,keydiff,snapkv,tova,expected_attention",
    budgets: Annotated[
        str, typer.Option(help="profile: every head its own; uniform: the same for all.", metavar="NAME[,NAME]")
    ] = "profile,uniform",
    samples: Annotated[int, typer.Option(help="Questions, at each length.", min=1)] = 40,
    lengths: Annotated[str, typer.Option(help="needle: tokens of the context.", metavar="N[,N...]")] = "1024,2048,4096",
    keys: Annotated[int, typer.Option(help="kv: pairs of a context.", min=4)] = 30,
    chunk_size: Annotated[
        int | None, typer.Option(help="Compress chunk by chunk, not the context at once.", show_default=False)
    ] = None,
    question_in_prompt: Annotated[
        bool, typer.Option("--question-in-prompt", help="Compress knowing the question.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="needle: texts to hide the code in (file, folder, .tar.gz); kv: records (.jsonl.gz).",
            show_default=False,
        ),
    ] = None,
    gate: Annotated[
        Path | None,
        typer.Option(help="Trained gate of the model, for fastkvzip; else a shipped one.", show_default=False),
    ] = None,
    profile_dir: Annotated[
        Path | None, typer.Option(help="Folder of NAME.SCORER.safetensors profiles.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every answer there.", show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables there.", show_default=False)] = None,
) -> None:
    """Measure what compression does to answers: a context is compressed, then a question about it is asked."""
    from vllm_tangram.compression import needs_gate
    from vllm_tangram.compression.gate import Gate
    from vllm_tangram.compression.shipped import find_gate
    from vllm_tangram.embedded import embedded_model
    from vllm_tangram.eval.dense import DenseModel
    from vllm_tangram.eval.run import Evaluation, ask_in_prompt, settings

    wanted = settings(
        [TangramConfig.parse({"scorer": name}).scorer for name in _items(scorers)],
        [TangramConfig.parse({"budgets": name}).budgets for name in _items(budgets)],
        [TangramConfig.parse({"retention": value}).retention for value in _numbers("--retentions", retentions, float)],
    )
    config = TangramConfig.parse({} if chunk_size is None else {"chunk_size": chunk_size})
    folder = embedded_model() if model is None else model
    dense = DenseModel.load(folder)
    groups = _cases(task, dense, _numbers("--lengths", lengths, int), keys, samples, data)
    if question_in_prompt:
        groups = {length: list(ask_in_prompt(cases)) for length, cases in groups.items()}
    profiled = dict.fromkeys(setting.scorer for setting in wanted[1:] if setting.budgets == "profile")
    found = None
    if any(needs_gate(setting.scorer) for setting in wanted):
        gate = find_gate(gate, dense.fingerprint)
        found = Gate.load(gate).to(dense.device)
    profiles = {
        scorer: _profile(scorer, gate if needs_gate(scorer) else None, folder, dense, profile_dir)
        for scorer in profiled
    }
    evaluation = Evaluation(dense, wanted, profiles, config=config, chunked=chunk_size is not None, gate=found)
    answers = _run(evaluation, groups)

    tables = [*_accuracy(answers), *_comparison(answers)]
    out = console()
    for title, columns, rows in tables:
        out.print(table(title, columns, rows))
        out.print()
    if json is not None:
        options = {
            "task": task,
            "model": str(folder),
            "samples": samples,
            "chunk_size": chunk_size,
            "question_in_prompt": question_in_prompt,
            "gate": None if gate is None else str(gate),
            "data": None if data is None else str(data),
        }
        _write(json, jsonlib.dumps(options | {"answers": [asdict(answer) for answer in answers]}, indent=1))
    if markdown is not None:
        _write(markdown, "\n".join(_as_markdown(*parts) for parts in tables))


def _items(value: str) -> list[str]:
    return [item.strip() for item in value.split(",") if item.strip()]


def _numbers(option: str, value: str, kind: Callable[[str], _N]) -> list[_N]:
    try:
        return [kind(item) for item in _items(value)]
    except ValueError:
        raise TangramError(f"{option}: {value!r} is not a list of numbers such as 1,2") from None


def _profile(scorer: str, gate: Path | None, model: Path, dense: DenseModel, folder: Path | None) -> RetentionProfile:
    """The profile in ``folder``, or else the one that an engine would use."""
    from vllm_tangram.budget import RetentionProfile

    if folder is None:
        from vllm_tangram.engine.resolve import resolve_profile

        config = TangramConfig.parse({"scorer": scorer, "gate": None if gate is None else str(gate)})
        resolved = resolve_profile(config, str(model), {}).profile
        assert resolved is not None
        return RetentionProfile.load(resolved)
    from vllm_tangram.compression.gate import Gate

    digest = None if gate is None else Gate.load(gate).digest()
    found = []
    for path in sorted(folder.glob(f"*.{scorer}.safetensors")):
        profile = RetentionProfile.load(path)
        try:
            profile.check(model=dense.fingerprint, scorer=scorer, gate=digest)
        except TangramError:
            continue
        found.append(profile)
    if len(found) != 1:
        raise TangramError(
            f"--profile-dir: {folder} has {len(found)} profiles *.{scorer}.safetensors of this model, not one; "
            "leave the option out to use the shipped or cached one, or make one with `tangram profile`"
        )
    return found[0]


def _cases(
    task: Task, dense: DenseModel, lengths: Sequence[int], keys: int, samples: int, data: Path | None
) -> dict[int, list[Case]]:
    """Length -> cases."""
    from vllm_tangram.eval.tasks import haystack, kv_cases, kv_records, needle_cases

    if task == "needle":
        texts = haystack(data)
        return {length: list(needle_cases(dense.tokenizer, length, samples, texts)) for length in lengths}
    cases = list(kv_cases(dense.tokenizer, kv_records(data, keys), samples))
    return {max(len(case.context) for case in cases): cases}


def _run(evaluation: Evaluation, groups: dict[int, list[Case]]) -> list[Answer]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    answers: list[Answer] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("contexts", total=sum(map(len, groups.values())))
        for length, cases in groups.items():
            for own in evaluation.answers(cases, length):
                answers += own
                progress.advance(bar)
    return answers


def _accuracy(answers: Sequence[Answer]) -> list[_Table]:
    """A table for each length. Rows: scorer and budgets; columns: retention."""
    from vllm_tangram.eval.run import REFERENCE, cells

    results = cells(answers)
    tables = []
    for length in dict.fromkeys(length for length, _ in results):
        own = {setting: cell for (other, setting), cell in results.items() if other == length}
        full = own.pop(REFERENCE)
        retentions = list(dict.fromkeys(setting.retention for setting in own))
        rows: dict[str, list[str]] = {"full KV": [f"{full.correct} ({full.logprob:.2f})"] * len(retentions)}
        for setting, cell in own.items():
            row = rows.setdefault(f"{setting.scorer}, {setting.budgets}", [])
            row.append(f"{cell.correct} ({cell.logprob:.2f}) {percent(cell.held)}")
        title = f"{length} tokens: right answers of {full.count} (log-probability) and memory held"
        columns = ["retention", *(f"{retention:g}" for retention in retentions)]
        tables.append((title, columns, [[name, *row] for name, row in rows.items()]))
    return tables


def _comparison(answers: Sequence[Answer]) -> list[_Table]:
    """Profiled minus uniform budgets, where both were asked for."""
    from vllm_tangram.eval.run import compare

    rows = [
        [
            scorer,
            str(length),
            f"{retention:g}",
            f"+{result.gained} -{result.lost}",
            "< 0.001" if result.p_value < 0.001 else f"{result.p_value:.3f}",
            f"{result.logprob:+.3f} +- {result.logprob_error:.3f}",
        ]
        for (length, scorer, retention), result in compare(answers).items()
    ]
    columns = ["scorer", "tokens", "retention", "right answers", "p", "log-probability"]
    return [("Profiled against uniform budgets: paired differences", columns, rows)] if rows else []


def _as_markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TangramError(f"cannot write {path}: {error.strerror or error}") from None
