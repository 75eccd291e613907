# SPDX-License-Identifier: Apache-2.0
"""``tangram profile``: measure what each head of a model keeps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vllm_tangram.cli import scorer_options as opt
from vllm_tangram.cli.rendering import console, percent, print_json, table
from vllm_tangram.config import DEFAULT_BLOCK_SIZE, DEFAULTS, TangramConfig
from vllm_tangram.errors import TangramError
from vllm_tangram.files import check_target
from vllm_tangram.pilot import BUILT_IN, load_samples, mixture, pilot_samples

if TYPE_CHECKING:
    from vllm_tangram.budget import RetentionProfile


def profile(
    model: Annotated[str, typer.Argument(help="Path or name of a model, or the word `embedded`.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.", show_default=False)],
    scorer: opt.Scorer = None,
    gate: opt.Gate = None,
    samples: Annotated[
        list[Path] | None,
        typer.Option(
            help='Pilot texts, one JSON object a line with "text", "prompt" or "messages", and maybe a "domain"; else '
            "a file is a domain. May be repeated. Without it built-in texts of five domains.",
            metavar="FILE.jsonl",
        ),
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Samples to run, at most; of all domains alike.", min=1)] = 50,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a sample that are used.", min=1, show_default="a chunk, and at least 2048"),
    ] = None,
    sinks: Annotated[int, typer.Option(help="First tokens of a prompt, always kept.")] = DEFAULTS["sinks"],
    window: Annotated[int, typer.Option(help="Last tokens of every chunk, always kept.")] = DEFAULTS["window"],
    chunk_size: Annotated[
        int | None, typer.Option(help="Prompt tokens that are compressed at once; as for `tangram serve`.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="As for vLLM.")] = "auto",
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", "-tp", help="Devices to run the model on; the profile is the same.", min=1
        ),
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run pilot texts through a model and write what each of its heads keeps: a retention profile."""
    given = {"scorer": scorer, "gate": gate, "sinks": sinks, "window": window, "chunk_size": chunk_size}
    config = TangramConfig.parse({name: value for name, value in given.items() if value is not None})
    if max_tokens is not None and max_tokens < 2 * (sinks + window):
        raise TangramError(
            f"--max-tokens {max_tokens} leaves nothing to choose from: give at least twice --sinks + --window = "
            f"{2 * (sinks + window)}"
        )
    check_target(output, "--output")  # now, not after minutes of work
    own = [sample for file in samples or [] for sample in load_samples(file)]

    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the report
    from vllm_tangram.engine.options import vllm_refusals
    from vllm_tangram.engine.resolve import make_profile, model_identity, model_path, pilot_tokens, resolve_scorer

    with vllm_refusals(f"{model}: "):
        path, options = model_path(model), {"dtype": dtype, "tensor_parallel_size": tensor_parallel_size}
        if scorer is None:
            config = resolve_scorer(config, model_identity(path, options))
        tokens = max_tokens or pilot_tokens(config)
        taken = mixture(own, num_samples) if own else pilot_samples(num_samples, tokens=tokens)
        source = ", ".join(file.name for file in samples or []) or BUILT_IN
        made = make_profile(config, path, options, taken, source, max_tokens=tokens)
    made.save(output)
    report = _report(output, made)
    if json:
        print_json(report)
    else:
        _print(report, model)


def _report(path: Path, profile: RetentionProfile) -> dict[str, Any]:
    from vllm_tangram.cli.stability import stability_report

    members = profile.num_layers * profile.num_kv_heads
    served = TangramConfig.parse(
        {
            "chunk_size": profile.chunk_size,
            "sinks": profile.sinks,
            "window": profile.window,
            "page_group_size": min(members, DEFAULTS["page_group_size"]),
        }
    )
    spread = profile.mean.reshape(len(profile.retentions), members)
    return {
        "file": str(path),
        "scorer": profile.scorer,
        "gate": profile.gate,
        "samples": profile.num_samples,
        "layers": profile.num_layers,
        "kv_heads": profile.num_kv_heads,
        "info": profile.info,
        "kept": [
            {"retention": float(level), "min": float(row.min()), "max": float(row.max())}
            for level, row in zip(profile.retentions, spread, strict=True)
        ],
        **stability_report(profile, served, DEFAULT_BLOCK_SIZE),
    }


def _print(report: dict[str, Any], model: str) -> None:
    from vllm_tangram.cli.stability import print_stability

    out = console()
    rows = [tuple(percent(row[name]) for name in ("retention", "min", "max")) for row in report["kept"]]
    title = (
        f"{report['layers']} layers of {report['kv_heads']} KV heads, {report['samples']} samples, {report['scorer']}"
    )
    out.print(table(title, ("retention", "least of a head", "most of a head"), rows))
    out.print()
    print_stability(out, report, **{name: DEFAULTS[name] for name in ("retention", "alpha", "margin")})
    path = escape(report["file"])
    out.print(f"\nWrote {path}. See it with `tangram inspect {path}`,")
    out.print(f"serve with `tangram serve {escape(model)} --profile {path}`.")
