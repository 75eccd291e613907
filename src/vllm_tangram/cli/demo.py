# SPDX-License-Identifier: Apache-2.0
"""``tangram demo``: what compression buys, on the embedded model, beside stock vLLM."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from vllm_tangram.cli.rendering import console, human_bytes, percent, table
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.demo.scenario import Measured, Size


def demo(
    json: Annotated[Path | None, typer.Option(help="Write the figures to a file.", show_default=False)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Where the picture goes (PNG).  [default: demo.png in the cache folder]", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter and fewer requests.")] = False,
) -> None:
    """Stock vLLM and ours with the same KV memory: a conversation and a burst of long requests (a few minutes)."""
    from vllm_tangram.demo.scenario import FULL, QUICK, run_demo
    from vllm_tangram.paths import writable_cache_dir

    size = QUICK if quick else FULL
    picture = plot or writable_cache_dir() / "demo.png"
    for option, path in (("--json", json), ("--plot", picture)):
        if path is not None and not path.resolve().parent.is_dir():
            raise TangramError(f"{option}: there is no folder {path.resolve().parent}")
    with Console(stderr=True).status("embedded model") as status:
        stock, ours = run_demo(size, progress=status.update)
    if json is not None:
        _write(json, demo_json(size, stock, ours))
    _print(size, stock, ours)
    _plot(picture, size, ours)
    console().print(f"Picture of the retention profile: {picture}", markup=False)


def demo_json(size: Size, stock: Measured, ours: Measured) -> dict[str, Any]:
    """The figures for programs."""
    from vllm_tangram.demo.scenario import RETENTION
    from vllm_tangram.embedded import MODEL_NAME

    return {
        "model": MODEL_NAME,
        "retention": RETENTION,
        "prompt_tokens": size.prompt_tokens,
        "stock": _figures(stock),
        "tangram": {
            **_figures(ours),
            "kept_fraction": ours.kept_fraction,
            "pages_reclaimed": ours.pages_reclaimed,
        },
    }


def _figures(measured: Measured) -> dict[str, Any]:
    names = ("kv_bytes_per_request", "requests_at_once", "requests_per_second")
    return {name: getattr(measured, name) for name in names}


def _write(path: Path, figures: dict[str, Any]) -> None:
    try:
        path.write_text(json_format.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise TangramError(f"--json: {path} cannot be written: {error.strerror}") from error


def _print(size: Size, stock: Measured, ours: Measured) -> None:
    from vllm_tangram.demo.scenario import RETENTION
    from vllm_tangram.embedded import MODEL_NAME

    rows = [
        (
            f"KV held by a request of {size.prompt_tokens} tokens",
            human_bytes(stock.kv_bytes_per_request),
            f"{human_bytes(ours.kv_bytes_per_request)} "
            f"(1 / {stock.kv_bytes_per_request / ours.kv_bytes_per_request:.2f})",
        ),
        (
            "Requests admitted at once",
            str(stock.requests_at_once),
            f"{ours.requests_at_once} ({ours.requests_at_once / stock.requests_at_once:.2f} x)",
        ),
        (
            f"Completed requests per second, burst of {size.requests}",
            f"{stock.requests_per_second:.3f}",
            f"{ours.requests_per_second:.3f} ({ours.requests_per_second / stock.requests_per_second:.2f} x)",
        ),
        ("KV kept, of full KV", percent(stock.kept_fraction), percent(ours.kept_fraction)),
        ("Pages reclaimed from running requests", "-", str(ours.pages_reclaimed)),
        *(
            (theirs.question, _answer(theirs.answer, theirs.seconds), _answer(mine.answer, mine.seconds))
            for theirs, mine in zip(stock.turns, ours.turns, strict=True)
        ),
    ]
    title = f"{MODEL_NAME}, {human_bytes(stock.kv_cache_bytes)} of KV memory"
    columns = ("", "stock vLLM", f"vllm-tangram, retention {RETENTION:g}")
    out = console()
    out.print(table(title, columns, rows, numeric=False), soft_wrap=False)
    out.print(
        Text("A prompt repeats the whole conversation; both engines begin with what they still hold of it.", "dim")
    )


def _answer(text: str, seconds: float) -> str:
    return f"{' '.join(text.split())} ({seconds:.1f} s)"


def _plot(path: Path, size: Size, ours: Measured) -> None:
    import numpy as np

    from vllm_tangram.budget import RetentionPlan, RetentionProfile
    from vllm_tangram.cli.plots import plot_profile
    from vllm_tangram.cli.summary import head_budgets
    from vllm_tangram.config import DEFAULT_BLOCK_SIZE, TangramConfig
    from vllm_tangram.demo.scenario import RETENTION
    from vllm_tangram.embedded import MODEL_NAME

    assert ours.profile is not None, "retention below 1 needs a profile"
    profile = RetentionProfile.load(ours.profile)
    plan = RetentionPlan.of_profile(
        TangramConfig(retention=RETENTION, profile=ours.profile),
        profile,
        block_size=DEFAULT_BLOCK_SIZE,
        max_tokens=4 * size.prompt_tokens,
    )
    plot_profile(
        path,
        title=f"{MODEL_NAME}, {profile.scorer}: retention {RETENTION:g}",
        budgets=head_budgets(profile, plan),
        plan=plan,
        tokens=np.arange(256, 4 * size.prompt_tokens + 1, 64),
    )
