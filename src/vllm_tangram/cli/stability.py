# SPDX-License-Identifier: Apache-2.0
"""What `tangram profile` and `tangram inspect` say about how far pilot samples agree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from vllm_tangram.cli.rendering import percent, table

if TYPE_CHECKING:
    from vllm_tangram.budget import RetentionProfile
    from vllm_tangram.config import TangramConfig


def stability_report(profile: RetentionProfile, config: TangramConfig, block_size: int) -> dict[str, Any]:
    """Rank correlations at all levels, what a plan of these options clips of each domain, and the warning, if any."""
    from vllm_tangram.budget import clipping, rank_stability

    levels = {float(level): rank_stability(profile, float(level)) for level in profile.retentions}
    return {
        "stability": [
            {
                "retention": level,
                "rank_correlation": found.samples,
                "between_domains": found.domains,
                "least_alike": found.least_alike,
            }
            for level, found in levels.items()
        ],
        "domains": [
            {"domain": row.domain, "samples": row.samples, "clipped": row.seen, "clipped_unseen": row.unseen}
            for row in clipping(profile, config, block_size)
        ],
        "warning": rank_stability(profile, config.retention).warning(),
    }


def print_stability(out: Console, report: dict[str, Any], *, retention: float, alpha: float, margin: str) -> None:
    """Two tables, and the warning."""
    rows = [
        (
            percent(row["retention"]),
            _correlation(row["rank_correlation"]),
            _correlation(row["between_domains"]),
            " and ".join(row["least_alike"] or ()),
        )
        for row in report["stability"]
    ]
    columns = ("retention", "samples", "domains", "least alike")
    out.print(table("Do samples rank the heads alike? Rank correlation of pairs", columns, rows))
    out.print()
    domains = [
        (row["domain"], str(row["samples"]), percent(row["clipped"]), percent(row["clipped_unseen"]))
        for row in report["domains"]
    ]
    title = f"Of what heads would keep, clipped at retention {retention:g}, alpha {alpha:g}, margin {margin}"
    out.print(table(title, ("domain", "samples", "clipped", "if not profiled"), domains))
    if report["warning"] is not None:
        out.print(Text.assemble("\n", ("warning: ", "bold yellow"), (report["warning"], "yellow")))


def _correlation(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"
