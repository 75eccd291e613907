# SPDX-License-Identifier: Apache-2.0
"""Which model a profile was made for, told from its configuration and a cheap digest of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vllm_tangram.errors import TangramError

SAMPLE_BYTES = 64 * 1024
_HEADER_LENGTH_BYTES = 8  # a safetensors file starts with the little-endian length of its JSON header

_PLAIN_FIELDS = (
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)


def model_fingerprint(hf_config: dict[str, Any], weights_dir: Path | None) -> dict[str, Any]:
    """Describe a model by what its KV cache and its head importances depend on.

    Args:
        hf_config: the model's ``config.json`` as a dict; of a multimodal model its ``text_config`` is read.
        weights_dir: folder of the ``*.safetensors`` files, or None when there is none.

    Returns:
        Values that JSON can carry. ``"weights"`` is a SHA-256 over name, size, header and three samples of 64 KiB of
        every weight file, so a 100 GB model costs a few file reads; None without weight files.

    Raises:
        TangramError: a weight file is truncated.

    """
    config = {**hf_config, **(hf_config.get("text_config") or {})}
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    fingerprint: dict[str, Any] = {name: config.get(name) for name in _PLAIN_FIELDS}
    # The architecture names the whole model; a nested text_config often has none.
    architectures = hf_config.get("architectures") or config.get("architectures")
    fingerprint["architectures"] = list(architectures) if architectures else None
    fingerprint["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    fingerprint["head_dim"] = config.get("head_dim") or (hidden // heads if hidden and heads else None)
    fingerprint["rope"] = _rope(config)
    fingerprint["weights"] = _weights_digest(weights_dir) if weights_dir is not None else None
    return fingerprint


def check_same_model(recorded: dict[str, Any], served: dict[str, Any]) -> list[str]:
    """Differences between two fingerprints, one readable line each; empty when they agree.

    Weights count only when both sides know theirs.
    """
    differences = []
    for name in sorted(recorded.keys() | served.keys()):
        ours, theirs = recorded.get(name), served.get(name)
        if ours == theirs or (name == "weights" and (ours is None or theirs is None)):
            continue
        if name == "weights":
            ours, theirs = str(ours)[:12], str(theirs)[:12]
        differences.append(f"{name}: recorded {ours}, served {theirs}")
    return differences


def check_made_for(
    what: str, sizes: Mapping[str, int], recorded: Mapping[str, Any], served: Mapping[str, Any]
) -> list[str]:
    """Why tensors that were made for one model do not fit another: their sizes or, where these fit, the fingerprints.

    Args:
        what: begins a sentence that ends with "for" a size, such as "the scores are".
        sizes: of the tensors, by their name in a fingerprint.
        recorded: fingerprint of the model that they were made for.
        served: of the other one.

    """
    problems = [
        f"{name}: {what} for {own}, served {served.get(name)}" for name, own in sizes.items() if own != served.get(name)
    ]
    return problems or check_same_model(dict(recorded), dict(served))


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """One spelling for ``rope_theta`` + ``rope_scaling`` (older configurations) and ``rope_parameters`` (newer)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {name: value for name, value in given.items() if value is not None}
    legacy_type = rope.pop("type", "default")
    rope.setdefault("rope_type", legacy_type)
    rope.setdefault("rope_theta", config.get("rope_theta"))
    return rope


def _weights_digest(folder: Path) -> str | None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            length = file.read(_HEADER_LENGTH_BYTES)
            data_start = _HEADER_LENGTH_BYTES + int.from_bytes(length, "little")
            if data_start > size:
                raise TangramError(f"{path} is truncated: it is not a complete safetensors file; fetch it again")
            digest.update(length)
            digest.update(file.read(data_start - _HEADER_LENGTH_BYTES))
            for start in (data_start, (data_start + size - SAMPLE_BYTES) // 2, size - SAMPLE_BYTES):
                digest.update(_sample(file, max(start, data_start)))
    return digest.hexdigest()


def _sample(file: BinaryIO, start: int) -> bytes:
    file.seek(start)
    return file.read(SAMPLE_BYTES)
