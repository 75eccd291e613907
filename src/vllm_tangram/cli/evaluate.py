# SPDX-License-Identifier: Apache-2.0
"""``tangram eval``: what compression does to answers, several ways to share out the same memory side by side."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vllm_tangram import __version__
from vllm_tangram.cli.evaluate_run import (
    KVZIP,
    Experiment,
    ask_engines,
    ask_reference,
    default_scorers,
    digest,
    find_profile,
    make_cases,
    served_config,
)
from vllm_tangram.cli.lists import items, numbers, token_counts
from vllm_tangram.cli.rendering import console, finite, table
from vllm_tangram.cli.scorer_options import gate_of, usable_device
from vllm_tangram.config import DEFAULTS, TangramConfig
from vllm_tangram.errors import TangramError

TaskName = Literal[
    "needle", "multikey", "multivalue", "kv", "lines", "topics", "manyshot", "dialogues", "perplexity"
]  # those of eval.tasks.TASKS (a test checks); written out so that `tangram --help` imports nothing
_SERVED = "profile,uniform"  # budgets that engines have


def evaluate(
    task: Annotated[
        TaskName,
        typer.Argument(
            help="Codes in a long text, each told once: needle (one), multikey (four), multivalue (three of a place). "
            "kv: values of random keys. lines, topics: LongEval's. manyshot: labels that only examples explain. "
            "dialogues: likelihood of the last reply. perplexity: of what follows a long text."
        ),
    ],
    model: Annotated[
        Path | None, typer.Argument(help="A checkpoint folder; the embedded model if none is given.")
    ] = None,
    retentions: Annotated[str, typer.Option(help="Shares of full KV.", metavar="X[,X...]")] = "0.5,0.25,0.1",
    scorers: Annotated[
        str | None,
        typer.Option(
            help="What ranks the tokens: scorers of the engine, and kvzip, which reads the context twice and has no "
            "profile.",
            metavar="NAME[,NAME...]",
            show_default="all that the model can have",
        ),
    ] = None,
    budgets: Annotated[
        str,
        typer.Option(
            help="profile: every head its own, static; dynamic: one threshold for all heads, anew for each context; "
            "adakv: one for each layer; uniform: the same for all heads.",
            metavar="NAME[,NAME...]",
            show_default=f"all; with --engine {_SERVED}",
        ),
    ] = "",
    alphas: Annotated[str, typer.Option(help="Standard deviations of the budgets.", metavar="X[,X...]")] = str(
        DEFAULTS["alpha"]
    ),
    margins: Annotated[str, typer.Option(help="inside, on_top or both.", metavar="NAME[,NAME]")] = DEFAULTS["margin"],
    page_group_sizes: Annotated[str, typer.Option(help="Heads that share pages.", metavar="N[,N...]")] = str(
        DEFAULTS["page_group_size"]
    ),
    samples: Annotated[int, typer.Option(help="Questions, at each length.", min=1)] = 40,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a context (lines, topics: at most; dialogues: at least).",
            metavar="N[,N...]",
            show_default="what suits the task",
        ),
    ] = None,
    keys: Annotated[int, typer.Option(help="kv: pairs of a context.", min=4)] = 30,
    seed: Annotated[int, typer.Option(help="Another one makes other contexts and questions.")] = 0,
    chunk_size: Annotated[
        int | None, typer.Option(help="Compress chunk by chunk, not the context at once.", show_default=False)
    ] = None,
    question_in_prompt: Annotated[
        bool, typer.Option("--question-in-prompt", help="Compress knowing the question.")
    ] = False,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine",
            help="Ask the real engine, and stock vLLM, instead of the dense reference: right answers only, profile and "
            "uniform budgets, contexts of whole chunks.",
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Texts to hide codes in or to continue (file, folder, .tar.gz); kv, lines, topics, dialogues: "
            "records (.jsonl, .jsonl.gz).",
            show_default=False,
        ),
    ] = None,
    gate: Annotated[
        Path | None,
        typer.Option(help="Trained gate of the model, for fastkvzip; else a shipped one.", show_default=False),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where the dense reference computes, such as cpu or cuda; an engine decides itself.")
    ] = "cpu",
    profile_dir: Annotated[
        Path | None, typer.Option(help="Folder of NAME.SCORER.safetensors profiles.", show_default=False)
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Keep answers there as they come (JSONL); the same command goes on with them.", show_default=False
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write figures and answers there.", show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables there.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) there.", show_default=False)] = None,
) -> None:
    """Measure what compression does to answers: a context is compressed, then questions about it are asked."""
    from vllm_tangram.cli.evaluate_report import plot as write_plot
    from vllm_tangram.cli.evaluate_report import report, tables
    from vllm_tangram.compression import needs_gate
    from vllm_tangram.embedded import embedded_model
    from vllm_tangram.eval.dense import DenseModel
    from vllm_tangram.eval.records import WorkFile, digest_of_cases
    from vllm_tangram.eval.run import ask_in_prompt
    from vllm_tangram.eval.settings import ALLOCATIONS, parse_allocations, settings
    from vllm_tangram.eval.tasks import TASKS

    for option, path in (("--json", json), ("--markdown", markdown), ("--plot", plot), ("--work", work)):
        _check_folder(option, path)
    folder = embedded_model() if model is None else model
    names = default_scorers(folder, gate) if scorers is None else items("--scorers", scorers)
    if gate is not None and not any(map(needs_gate, names)):
        raise TangramError("--gate: none of --scorers is made with one; add fastkvzip")
    wanted = settings(
        [name if name == KVZIP else _parsed("scorer", [name])[0] for name in names],
        list(parse_allocations(items("--budgets", budgets or (_SERVED if engine else ",".join(ALLOCATIONS))))),
        _parsed("retention", numbers("--retentions", retentions, float)),
        _parsed("alpha", numbers("--alphas", alphas, float)),
        _parsed("margin", items("--margins", margins)),
        _parsed("page_group_size", numbers("--page-group-sizes", page_group_sizes, int)),
    )
    wanted = [setting for setting in wanted if (setting.scorer, setting.budgets) != (KVZIP, "profile")]
    if engine and any(setting.scorer == KVZIP for setting in wanted):
        raise TangramError(f"--scorers {KVZIP}: leave it out with --engine; no engine can read a context twice")
    if KVZIP in names and all(setting.scorer != KVZIP for setting in wanted):
        raise TangramError(f"--scorers {KVZIP}: no profile can be made of it; add dynamic to --budgets")
    if engine and question_in_prompt:
        raise TangramError("--question-in-prompt: leave it out with --engine, which asks after the compression")
    dense = DenseModel.load(folder, device="cpu" if engine else usable_device(device))
    kind = TASKS[task]
    sizes = [keys] if task == "kv" else list(kind.lengths)
    if lengths is not None and task != "kv":
        sizes = token_counts("--lengths", lengths)
    groups = make_cases(task, dense, sizes, samples, data, seed)
    if question_in_prompt:
        groups = {length: list(ask_in_prompt(cases)) for length, cases in groups.items()}
    config = TangramConfig.parse({} if chunk_size is None else {"chunk_size": chunk_size})
    if engine:
        config = served_config(config, wanted, groups, chunk_size, kind.likelihood)
    scored = gate_of((setting.scorer for setting in wanted), gate, dense)
    profiles = {
        scorer: find_profile(scorer, scored, folder, dense, profile_dir)
        for scorer in dict.fromkeys(setting.scorer for setting in wanted[1:] if setting.budgets != "uniform")
        if scorer != KVZIP
    }
    setup = {
        "version": __version__,
        "task": task,
        "model": dense.fingerprint,
        "settings": [setting.name for setting in wanted],
        "samples": samples,
        "seed": seed,
        "chunk_size": chunk_size,
        "question_in_prompt": question_in_prompt,
        "engine": engine,
        "device": dense.device.type,
        "data": None if data is None else data.name,
        "cases": digest_of_cases(groups),
        "gate": None if scored is None else scored.digest(),
        "profiles": {scorer: digest(profile) for scorer, profile in profiles.items()},
    }
    asked = Experiment(wanted, groups, config, profiles, scored)
    results = WorkFile(work, setup)
    if engine:
        from vllm_tangram.eval.engine import ServedModel

        served = ServedModel(folder, dense.num_layers, dense.num_kv_heads)
        del dense  # the engine has its own weights
        ask_engines(served, asked, results)
    else:
        ask_reference(dense, asked, results, chunked=chunk_size is not None)

    unit = "pairs" if task == "kv" else "tokens"
    made = tables(results.answers, likelihood=kind.likelihood, unit=unit)
    out = console()
    for own in made:
        out.print(table(own.title, own.columns, own.rows))
        out.print()
    if json is not None:
        _write("--json", json, jsonlib.dumps(finite(report(results.answers, setup)), indent=1, allow_nan=False))
    if markdown is not None:
        _write("--markdown", markdown, "\n".join(own.markdown() for own in made))
    if plot is not None:
        write_plot(plot, f"{task}, {folder.name}", results.answers, likelihood=kind.likelihood, unit=unit)


def _parsed(option: str, values: Iterable[Any]) -> list[Any]:
    """Values of an option of the engine, checked by it."""
    return [getattr(TangramConfig.parse({option: value}), option) for value in values]


def _check_folder(option: str, path: Path | None) -> None:
    """Before hours of work, not after."""
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise TangramError(f"{option}: {path} is a folder, or in one that does not exist; name a file")


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TangramError(f"{option}: cannot write {path}: {error.strerror or error}") from None
