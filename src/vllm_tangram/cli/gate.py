# SPDX-License-Identifier: Apache-2.0
"""``tangram gate``: train, convert and show the gates of Fast KVzip, which predict KVzip's scores."""

from __future__ import annotations

import hashlib
import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vllm_tangram.cli.rendering import console, human_bytes, percent, print_error, print_json, table
from vllm_tangram.cli.scorer_options import checkpoint_folder, usable_device
from vllm_tangram.errors import TangramError
from vllm_tangram.files import check_target
from vllm_tangram.progress import progress_bars

if TYPE_CHECKING:
    from vllm_tangram.compression.gate import Gate

app = typer.Typer(
    help="Gates: small networks that tell a token's importance from its hidden state.", no_args_is_help=True
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="The gate to write.",
        show_default="in the cache folder, where `tangram serve` finds it",
    ),
]


@app.command()
def train(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, or the word `embedded`.", show_default=False)],
    output: _Output = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help='Texts, one JSON object a line with "text", "prompt" or "messages"; without it built-in ones.',
            metavar="FILE.jsonl",
        ),
    ] = None,
    texts: Annotated[int, typer.Option(help="Texts to use, at most; every tenth is held out.", min=10)] = 100,
    tokens: Annotated[int, typer.Option(help="Tokens of a text that are used; cut long documents.", min=64)] = 1024,
    steps: Annotated[int, typer.Option(help="Optimiser steps of each layer.", min=1)] = 800,
    batch: Annotated[int, typer.Option(help="Tokens of a step.", min=1)] = 1000,
    optimiser: Annotated[
        Literal["adam", "sgd"], typer.Option(help="sgd, with --learning-rate 0.2: the paper's.")
    ] = "adam",
    learning_rate: Annotated[float, typer.Option(help="At the start; it falls to 0.", min=0)] = 0.01,
    inner: Annotated[int, typer.Option(help="Width of a gate's queries and keys; 8 halves its size.", min=1)] = 16,
    sinks: Annotated[int, typer.Option(help="Learned sinks of a gate.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="The same seed trains the same gate.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    half: Annotated[bool, typer.Option("--half", help="Write weights in float16, half the size.")] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what an interrupted run continues with; OUTPUT.work if not given.", show_default=False
        ),
    ] = None,
    keep_work: Annotated[bool, typer.Option("--keep-work", help="Do not delete that folder at the end.")] = False,
    json: _Json = False,
) -> None:
    """Train a gate to predict KVzip's scores of a model's tokens.

    Each text is read, and repeated, by the model once: about three times the cost of a prefill. What is done is kept in
    the work folder, so the same command continues after an interrupt.
    """
    import torch

    from vllm_tangram.eval.dense import DenseModel
    from vllm_tangram.gates.dataset import Shape
    from vllm_tangram.gates.make import Source, remove_work, train_gate
    from vllm_tangram.gates.texts import training_texts
    from vllm_tangram.gates.train import Recipe
    from vllm_tangram.pilot import load_samples

    model_folder = checkpoint_folder(model)
    output = _target(output, model_folder)  # now, not after an hour of work
    source = (
        Source(training_texts(texts, seed), "built-in training texts")
        if data is None
        else Source([sample.text for sample in load_samples(data)[:texts]], data.name)
    )
    dense = DenseModel.load(model_folder, device=usable_device(device))
    recipe = Recipe(steps, batch, optimiser, learning_rate, inner, sinks, seed)
    folder = work or output.with_name(f"{output.name}.work")
    try:
        with progress_bars() as progress:
            gate = train_gate(dense, source, folder, recipe, Shape(length=tokens), progress)
    except KeyboardInterrupt:
        print_error(f"interrupted; the same command continues with what is in {folder}")
        raise typer.Exit(130) from None
    gate.save(output, torch.float16 if half else torch.float32)
    if not keep_work:
        remove_work(folder)
    _show(output, json)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A published Fast KVzip gate (.pt).", show_default=False)],
    model: Annotated[str, typer.Option(help="The checkpoint folder of its model.", show_default=False)],
    output: _Output = None,
    json: _Json = False,
) -> None:
    """Convert a published gate, a pickle, without running anything in it."""
    from vllm_tangram.gates.convert import convert as convert_checkpoint

    folder = checkpoint_folder(model)
    output = _target(output, folder)
    convert_checkpoint(checkpoint, _fingerprint(folder)).save(output)
    _show(output, json)


@app.command()
def show(
    gate: Annotated[Path, typer.Argument(help="A gate.", show_default=False)],
    json: _Json = False,
) -> None:
    """Print what a gate is: its model, how it was trained, how far it agrees with KVzip."""
    _show(gate, json)


def _show(path: Path, json: bool) -> None:
    from vllm_tangram.compression.gate import Gate

    gate = Gate.load(path)
    if json:
        print_json(_card(path, gate))
        return
    out = console()
    shape = (
        f"{gate.num_layers} layers of {gate.num_kv_heads} KV heads, hidden size {gate.hidden_size}, "
        f"{gate.num_parameters:,} weights, {human_bytes(path.stat().st_size)}"
    )
    name = ", ".join(gate.model.get("architectures") or ["unknown model"])
    rows = [["model", name], ["digest", gate.digest()[:16]]]
    rows += [[key.replace("_", " "), str(value)] for key, value in (gate.recipe | gate.info).items()]
    out.print(table(f"{path.name}: {shape}", ("", ""), rows, numeric=False))
    if gate.agreement:
        out.print()
        agreement = [
            [scorer, percent(value), percent(gate.agreement.get(f"{scorer}, all heads", float("nan")))]
            for scorer, value in gate.agreement.items()
            if not scorer.endswith(", all heads")
        ]
        title = "Tokens of KVzip's best quarter that are found, on held-out texts"
        out.print(table(title, ("scorer", "of each head", "of all heads"), agreement))


def _card(path: Path, gate: Gate) -> dict[str, Any]:
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "digest": gate.digest(),
        "layers": gate.num_layers,
        "kv_heads": gate.num_kv_heads,
        "group_size": gate.group_size,
        "hidden_size": gate.hidden_size,
        "weights": gate.num_parameters,
        "model": gate.model,
        "recipe": gate.recipe,
        "agreement": gate.agreement,
        "info": gate.info,
    }


def _fingerprint(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    from vllm_tangram.budget import model_fingerprint

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise TangramError(f"cannot read {folder / 'config.json'}: {error}") from None
    return model_fingerprint(config.to_dict(), folder)


def _target(output: Path | None, folder: Path) -> Path:
    """Where the gate of a model goes: the file that was named, or one that `tangram serve` finds by itself."""
    if output is None:
        from vllm_tangram.compression.shipped import trained_gates
        from vllm_tangram.paths import writable_cache_dir

        writable_cache_dir()
        gates = trained_gates()
        gates.mkdir(exist_ok=True)
        identity = jsonlib.dumps(_fingerprint(folder), sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        output = gates / f"{folder.resolve().name}-{digest}.safetensors"
    check_target(output, "--output")
    return output
