# SPDX-License-Identifier: Apache-2.0
"""``tangram inspect``: what a retention profile gives each head, and what prompts will hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tangram.cli.lists import token_counts
from vllm_tangram.cli.rendering import console, human_bytes, human_tokens, percent, print_json, table
from vllm_tangram.config import DEFAULT_BLOCK_SIZE, DEFAULTS, Grouping, Margin, TangramConfig

if TYPE_CHECKING:
    from vllm_tangram.budget import RetentionPlan, RetentionProfile

# The picture's prompts: shorter ones hold nearly everything.
_PLOT_FROM = 256
_PLOT_POINTS = 160


def inspect(
    file: Annotated[Path, typer.Argument(help="A retention profile.", show_default=False)],
    tokens: Annotated[
        list[str], typer.Option(help="Prompt lengths, such as 1k,4k,16k. May be repeated.", metavar="N[,N...]")
    ] = ["1k,4k,16k,64k"],  # noqa: B006 (typer copies it)
    retention: Annotated[float, typer.Option(help="Share of full KV that a long prompt may hold.")] = DEFAULTS[
        "retention"
    ],
    page_group_size: Annotated[int, typer.Option(help="KV heads per page.")] = DEFAULTS["page_group_size"],
    alpha: Annotated[float, typer.Option(help="Standard deviations on top of the mean.")] = DEFAULTS["alpha"],
    grouping: Annotated[Grouping, typer.Option(help="Which heads may share pages.")] = DEFAULTS["grouping"],
    margin: Annotated[Margin, typer.Option(help="Whether the margin counts towards the retention.")] = DEFAULTS[
        "margin"
    ],
    block_size: Annotated[int, typer.Option(help="Tokens per page.", min=1)] = DEFAULT_BLOCK_SIZE,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG).", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a retention profile gives each head, and what prompts of some lengths will hold."""
    from vllm_tangram.budget import RetentionPlan, RetentionProfile

    lengths = sorted(set(token_counts("--tokens", ",".join(tokens))))
    profile = RetentionProfile.load(file)
    config = TangramConfig.parse(
        {
            "retention": retention,
            "retention_floor": min(retention, DEFAULTS["retention_floor"]),
            "page_group_size": page_group_size,
            "alpha": alpha,
            "grouping": grouping,
            "margin": margin,
            "profile": str(file),
            "chunk_size": profile.chunk_size,
            "sinks": profile.sinks,
            "window": profile.window,
        }
    )
    plan = RetentionPlan.of_profile(config, profile, block_size=block_size, max_tokens=max(*lengths, 2 * _PLOT_FROM))
    report = _report(file, profile, plan, lengths)
    if plot is not None:
        _plot(plot, profile, plan, lengths[-1])
        report["plot"] = str(plot)
    if json:
        print_json(report)
    else:
        _print(report)


def _report(file: Path, profile: RetentionProfile, plan: RetentionPlan, lengths: list[int]) -> dict[str, Any]:
    import numpy as np

    from vllm_tangram.cli.stability import stability_report
    from vllm_tangram.cli.summary import head_budgets, over_allocations, over_allocations_by_ranks, prompt_cost

    budgets = head_budgets(profile, plan)
    smallest, largest = float(budgets.min()), float(budgets.max())
    config = plan.config
    return {
        "file": str(file),
        "scorer": profile.scorer,
        "gate": profile.gate,
        "model": profile.model,
        "samples": profile.num_samples,
        "layers": profile.num_layers,
        "kv_heads": profile.num_kv_heads,
        "sinks": profile.sinks,
        "window": profile.window,
        "chunk_size": profile.chunk_size,
        "info": profile.info,
        "retention": config.retention,
        "alpha": config.alpha,
        "grouping": config.grouping,
        "margin": config.margin,
        "page_group_size": plan.groups.size,
        "block_size": plan.block_size,
        "groups": plan.num_groups,
        "budgets": {
            "min": smallest,
            "median": float(np.median(budgets)),
            "max": largest,
            "spread": largest / smallest if smallest > 0 else float("inf"),
        },
        "over_allocation": over_allocations(budgets, plan.groups.size),
        **stability_report(profile, config, plan.block_size),
        "over_allocation_by_tensor_parallel_size": over_allocations_by_ranks(
            budgets, plan.groups.size, config.grouping
        ),
        "prompts": [vars(prompt_cost(profile, plan, count)) for count in lengths],
    }


def _print(report: dict[str, Any]) -> None:
    from vllm_tangram.cli.stability import print_stability

    out = console()
    model = report["model"]
    facts = [
        ("scorer", report["scorer"]),
        *([("gate", report["gate"][:12])] if report["gate"] else []),
        ("model", ", ".join(model.get("architectures") or ["unknown"])),
        ("heads", f"{report['layers']} layers of {report['kv_heads']} KV heads of size {model.get('head_dim') or '?'}"),
        ("pilot samples", str(report["samples"])),
        ("chunks", f"{report['chunk_size']} tokens, {report['sinks']} sinks, window of {report['window']}"),
        *sorted(report["info"].items()),
    ]
    out.print(table(str(report["file"]), ("", ""), facts, numeric=False))
    out.print()

    budgets = report["budgets"]
    out.print(
        table(
            f"Budgets of the heads at retention {report['retention']:g}, alpha {report['alpha']:g}",
            ("min", "median", "max", "max / min"),
            [[*(percent(budgets[name]) for name in ("min", "median", "max")), f"{budgets['spread']:.1f}"]],
        )
    )
    out.print()
    out.print(
        table(
            f"Memory over budgets, by grouping ({report['groups']} groups of {report['page_group_size']}, "
            f"{report['grouping']})",
            list(report["over_allocation"]),
            [[f"{factor:.3f}" for factor in report["over_allocation"].values()]],
        )
    )
    out.print()
    by_ranks = report["over_allocation_by_tensor_parallel_size"]
    out.print(
        table(
            f"The same ({report['grouping']}), by tensor parallel size",
            [str(size) for size in by_ranks],
            [[f"{factor:.3f}" for factor in by_ranks.values()]],
        )
    )
    out.print()
    print_stability(out, report, **{name: report[name] for name in ("retention", "alpha", "margin")})
    out.print()
    rows = [
        (
            human_tokens(row["tokens"]),
            str(row["pages"]),
            "-" if row["bytes"] is None else human_bytes(row["bytes"]),
            "-" if row["full_bytes"] is None else human_bytes(row["full_bytes"]),
            percent(row["fraction"]),
            "-" if row["promise"] is None else percent(row["promise"]),
        )
        for row in report["prompts"]
    ]
    columns = ("tokens", "pages", "held", "full KV", "fraction", "at most")
    out.print(table(f"What a prompt holds (blocks of {report['block_size']} tokens)", columns, rows))
    if "plot" in report:
        out.print(f"\nPicture: {report['plot']}", markup=False)


def _plot(path: Path, profile: RetentionProfile, plan: RetentionPlan, longest: int) -> None:
    import numpy as np

    from vllm_tangram.cli.plots import plot_profile
    from vllm_tangram.cli.summary import head_budgets

    model = profile.info.get("model_name") or (profile.model.get("architectures") or ["unknown model"])[0]
    plot_profile(
        path,
        title=f"{model}, {profile.scorer}: retention {plan.config.retention:g}",
        budgets=head_budgets(profile, plan),
        plan=plan,
        tokens=np.unique(np.geomspace(_PLOT_FROM, max(longest, 2 * _PLOT_FROM), _PLOT_POINTS).astype(np.int64)),
    )
