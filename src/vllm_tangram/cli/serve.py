# SPDX-License-Identifier: Apache-2.0
"""``tangram serve``: vLLM's OpenAI server, with our options beside vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vllm_tangram.cli import scorer_options as opt
from vllm_tangram.config import DEFAULTS, Budgets, Grouping, Margin, TangramConfig

# For typer: what we do not know goes to vLLM, in its order.
COMMAND: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
    "options_metavar": "MODEL [OPTIONS] [VLLM OPTIONS]",
    "epilog": "MODEL is a path, a name, or the word `embedded`. Any option of `vllm serve` may be given too, "
    "in any order: see `vllm serve --help=all`.",
}


def serve(
    ctx: typer.Context,
    retention: Annotated[float, typer.Option(help="Share of full KV that a long prompt may hold.")] = DEFAULTS[
        "retention"
    ],
    retention_floor: Annotated[
        float, typer.Option(help="Smallest retention that a request may ask for itself.")
    ] = DEFAULTS["retention_floor"],
    scorer: opt.Scorer = None,
    gate: opt.Gate = None,
    document_scores: opt.DocumentScores = DEFAULTS["document_scores"],
    profile: Annotated[
        str | None,
        typer.Option(help="Retention profile of the model; without it one is made once and cached.", metavar="FILE"),
    ] = DEFAULTS["profile"],
    budgets: Annotated[
        Budgets, typer.Option(help="What each head may keep: by the profile, or all the same.")
    ] = DEFAULTS["budgets"],
    page_group_size: Annotated[int, typer.Option(help="KV heads per page.")] = DEFAULTS["page_group_size"],
    grouping: Annotated[Grouping, typer.Option(help="Which heads may share pages.")] = DEFAULTS["grouping"],
    alpha: Annotated[float, typer.Option(help="Standard deviations on top of a head's mean budget.")] = DEFAULTS[
        "alpha"
    ],
    margin: Annotated[Margin, typer.Option(help="Whether that counts towards the retention.")] = DEFAULTS["margin"],
    chunk_size: Annotated[int, typer.Option(help="Prompt tokens that are compressed at once.")] = DEFAULTS[
        "chunk_size"
    ],
    sinks: Annotated[int, typer.Option(help="First tokens of a prompt, always kept.")] = DEFAULTS["sinks"],
    window: Annotated[int, typer.Option(help="Last tokens of every chunk, always kept.")] = DEFAULTS["window"],
    session_ttl: Annotated[
        float,
        typer.Option(help="Seconds after which a conversation that nobody continued is not found again; 0: never."),
    ] = DEFAULTS["session_ttl"],
    session_spill_gib: Annotated[
        float,
        typer.Option(
            help="Host memory, in GiB, for conversations that the pool has no room for, of all ranks; 0: none."
        ),
    ] = DEFAULTS["session_spill_gib"],
) -> None:
    """Serve a model over vLLM's OpenAI API with compressed KV cache.

    A request may ask for its own retention: {"vllm_xargs": {"retention": 0.5}}.
    """
    config = TangramConfig.parse({name: value for name, value in ctx.params.items() if value is not None})

    from vllm_tangram.engine.serve import serve as serve_until_stopped

    serve_until_stopped(config, ctx.args)
