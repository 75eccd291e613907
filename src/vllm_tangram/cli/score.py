# SPDX-License-Identifier: Apache-2.0
"""``tangram score``: KVzip's scores of a document that many prompts will begin with, computed once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from vllm_tangram.cli.rendering import console, human_bytes, print_json, table
from vllm_tangram.cli.scorer_options import checkpoint_folder, usable_device
from vllm_tangram.files import check_target


def score(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, or the word `embedded`.", show_default=False)],
    document: Annotated[Path, typer.Argument(help="A text file, or a JSON list of messages.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write, for `--document-scores`.", show_default=False)
    ],
    place: Annotated[
        Literal["system", "user", "messages", "prompt"],
        typer.Option(
            "--as",
            help="Where prompts have it: as a chat's system message, as (the beginning of) its first user message, as "
            "its first messages, or at the beginning of a prompt without a chat template.",
        ),
    ] = "system",
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a document, or a system prompt, that many prompts will begin with, by letting the model repeat it.

    It takes about three prefills, once. `tangram serve --document-scores FILE` then selects its tokens by these scores,
    which are better than any that can be had while a prompt is read.
    """
    from vllm_tangram.eval.dense import DenseModel
    from vllm_tangram.gates.documents import document_ids, read_document, score_document

    check_target(output, "--output")
    text = read_document(document, place)
    dense = DenseModel.load(checkpoint_folder(model), device=usable_device(device))
    start = time.perf_counter()
    scored = score_document(dense, document_ids(dense.tokenizer, text), {"document": document.name, "as": place})
    seconds = time.perf_counter() - start
    scored.save(output)
    if json:
        print_json(
            {
                "file": str(output),
                "tokens": scored.num_tokens,
                "bytes": output.stat().st_size,
                "memory_bytes": scored.num_bytes,
                "seconds": seconds,
            }
        )
        return
    rows = [
        ["tokens", str(scored.num_tokens)],
        ["memory while serving, all ranks together", human_bytes(scored.num_bytes)],
        ["took", f"{seconds:.1f} s"],
        ["they begin", repr(dense.tokenizer.decode(scored.ids[:12].tolist()))],
        ["they end", repr(dense.tokenizer.decode(scored.ids[-12:].tolist()))],
    ]
    console().print(table(f"{output}: scores of {document.name}", ("", ""), rows, numeric=False))
