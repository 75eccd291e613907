# SPDX-License-Identifier: Apache-2.0
"""Options that the benchmarks of whole engines share, and what they mean where they are not given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vllm_tangram.config import DEFAULTS
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.bench.results import Results
    from vllm_tangram.bench.serving import Setup

Mix = Annotated[str, typer.Option(help="Sizes of requests: long, mid or short.")]
InputTokens = Annotated[int | None, typer.Option(help="Instead of the mix's.", min=1, show_default=False)]
OutputTokens = Annotated[int | None, typer.Option(help="Instead of the mix's.", min=2, show_default=False)]
Requests = Annotated[int | None, typer.Option(help="Instead of the mix's.", min=1, show_default=False)]
MaxSeconds = Annotated[float | None, typer.Option(help="Stop an engine after so long.", min=1, show_default=False)]
Model = Annotated[str, typer.Argument(help="Path or name, `embedded`, or a shape such as `qwen3-4b` (no weights).")]
Profile = Annotated[
    Path | None, typer.Option(help="Retention profile.  [default: as `tangram serve`]", show_default=False)
]
KvGib = Annotated[
    float | None,
    typer.Option(
        help="KV memory of a rank.  [default: what an 80 GB card leaves; without CUDA, of 2.2 requests]",
        min=0.001,
        show_default=False,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(help="Requests at once, at most.  [default: 256; without CUDA 16]", min=1, show_default=False),
]
ChunkSize = Annotated[
    int | None,
    typer.Option(
        help="Prompt tokens that ours compresses at once; a step of any engine takes 8192 or more, without CUDA 2048.  "
        f"[default: {DEFAULTS['chunk_size']}]",
        min=32,
        show_default=False,
    ),
]
Eager = Annotated[
    bool | None,
    typer.Option(
        "--enforce-eager/--no-enforce-eager",
        help="No compilation, no CUDA graphs.  [default: only without CUDA]",
        show_default=False,
    ),
]
TensorParallelSize = Annotated[
    int, typer.Option("--tensor-parallel-size", "-tp", help="Devices of every engine.", min=1)
]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="NAME=VALUE", help="Another option of ours, such as block_size=64; repeatable."),
]
Only = Annotated[
    list[str],
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="Only these: `stock`, a retention, or a retention with a step of the ablation: "
        "0.25/unified, 0.25/groups, 0.25/splits; repeatable.",
    ),
]
Retention = Annotated[list[float], typer.Option(help="Of ours; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Output = Annotated[
    Path | None,
    typer.Option(help="JSON file; one of an earlier run with the same setup is added to.", show_default=False),
]
Plot = Annotated[Path | None, typer.Option(help="Where a picture goes (PNG).", show_default=False)]

# Prompt tokens, new tokens, requests.
_MIXES = {
    True: {"long": (32768, 2048, 96), "mid": (8192, 1024, 384), "short": (1024, 256, 1024)},  # CUDA
    False: {"long": (2048, 64, 16), "mid": (1024, 32, 16), "short": (256, 32, 16)},
}
_FITS = 2.2  # requests that fit stock vLLM's KV memory, without CUDA


def sizes(mix: str, *given: int | None) -> tuple[int, int, int]:
    mixes = _MIXES[on_cuda()]
    if mix not in mixes:
        raise TangramError(f"--mix: must be {', '.join(mixes)}, got {mix!r}")
    prompt, output, requests = (ours or theirs for ours, theirs in zip(given, mixes[mix], strict=True))
    return prompt, output, requests


def setup_of(
    model: str,
    profile: Path | None,
    kv_gib: float | None,
    request_tokens: int,
    max_num_seqs: int | None,
    chunk_size: int | None,
    enforce_eager: bool | None,
    options: dict[str, Any],
    tensor_parallel_size: int = 1,
) -> Setup:
    """What was given, and what suits the device for what was not."""
    from vllm_tangram.bench.serving import Setup
    from vllm_tangram.bench.sizing import card_kv_bytes

    cuda = on_cuda()
    chunk = chunk_size or DEFAULTS["chunk_size"]
    kv_bytes = None if kv_gib is None else int(kv_gib * 2**30)
    if kv_bytes is None and cuda:
        kv_bytes = card_kv_bytes(model, tensor_parallel_size)
    return Setup(
        model=model,
        profile=None if profile is None else str(profile.resolve()),
        kv_bytes=kv_bytes,
        kv_tokens=int(_FITS * request_tokens),
        max_num_seqs=max_num_seqs or (256 if cuda else 16),
        chunk_size=chunk,
        step_tokens=max(chunk, 8192 if cuda else 2048),
        enforce_eager=(not cuda) if enforce_eager is None else enforce_eager,
        options=options,
        tensor_parallel_size=tensor_parallel_size,
    )


def results_of(
    benchmark: str, setup: Setup, workload: dict[str, Any], output: Path | None, plot: Path | None
) -> Results:
    from vllm_tangram.bench.results import Results

    if plot is not None and not plot.resolve().parent.is_dir():
        raise TangramError(f"--plot: there is no folder {plot.resolve().parent}")
    return Results(benchmark, {**asdict(setup), **workload}, output)


def options_of(given: Sequence[str]) -> dict[str, Any]:
    """``["block_size=64", "scorer=knorm"]`` -> the options; a value is JSON, or else text."""
    options: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise TangramError(f"--set: {item!r} is not NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    with Console(stderr=True).status("starting") as status:
        yield status.update


def on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
