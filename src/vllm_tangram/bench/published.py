# SPDX-License-Identifier: Apache-2.0
"""Published measurements of what scorers keep of each head, as retention profiles: realistic lengths for benchmarks.

A published file is a NumPy archive of one model, scorer and kept fraction. ``raw_ratio [1, S, L, H]`` holds, per
sample and head, the kept fraction of the tokens that could be evicted; ``ratio_per_head [1, L, H]`` their median;
``meta`` a JSON object, in which "dataset_mix" says how many samples in a row are of which data set.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_tangram.bench.shapes import HeadShape, shape_fingerprint, shape_names
from vllm_tangram.budget import PROFILE_RETENTIONS, RetentionProfile
from vllm_tangram.config import DEFAULTS, TangramConfig
from vllm_tangram.errors import TangramError

# A head of which nothing was kept at the published fraction must still be able to grow where more is kept.
_LEAST = 1e-4
_BISECTIONS = 60
_ABOUT = ("model_name", "scorer", "base_ratios")  # what a profile repeats of the published file
_DEFAULT_SHAPE = "qwen3-4b"


def import_published(path: Path, model: dict[str, Any], scorer: str) -> RetentionProfile:
    """Read a published file as a profile of ``model``.

    The files know one kept fraction. The others are made from it: the ratios of a sample times one factor, at most 1,
    such that their mean over all heads is the wanted fraction.

    Args:
        path: the ``.npz`` file.
        model: fingerprint of the model that the profile is for (`shapes.shape_fingerprint`).
        scorer: name of the scorer that the profile is for; the file need not come from the same.

    Raises:
        TangramError: the file cannot be read, lacks the ratios, or was made for another number of layers or KV heads.

    """
    ratios, about = _read(path)
    wanted = model.get("num_hidden_layers"), model.get("num_key_value_heads")
    if ratios.shape[1:] != wanted:
        raise TangramError(
            f"published profile {path} has {ratios.shape[1]} layers of {ratios.shape[2]} KV heads, the model has "
            f"{wanted[0]} of {wanted[1]}"
        )
    defaults = TangramConfig(budgets="uniform")
    return RetentionProfile(
        retentions=np.array(PROFILE_RETENTIONS),
        kept=np.stack([scaled_to(ratios, level) for level in PROFILE_RETENTIONS], axis=1).astype(np.float32),
        scorer=scorer,
        model=model,
        sinks=defaults.sinks,
        window=defaults.window,
        chunk_size=defaults.chunk_size,
        info={
            "samples": f"published ratios scaled to other retentions, for benchmarks: {path.name}",
            **{f"published_{name}": str(about[name]) for name in _ABOUT if name in about},
        },
        domains=_domains(about, len(ratios)),
        source=str(path),
    )


def scaled_to(ratios: NDArray[np.float64], level: float) -> NDArray[np.float64]:
    """``min(1, c * ratio)``, [S, L, H], with one ``c`` per sample such that its mean over all heads is ``level``."""
    ratios = np.maximum(ratios, _LEAST)
    low, high = np.zeros((len(ratios), 1, 1)), np.full((len(ratios), 1, 1), 1 / _LEAST)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = np.minimum(1, middle * ratios).mean(axis=(1, 2), keepdims=True) < level
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.minimum(1, high * ratios)


def profile_and_shape(path: Path | None, shape_name: str | None) -> tuple[RetentionProfile | None, HeadShape]:
    """What a benchmark measures with: a profile and the sizes of its model.

    Args:
        path: a published file (``.npz``) or a profile of ours; None: no profile.
        shape_name: a name of `shapes.shape_names`. None takes the sizes of our profile, the shape that a published
            file fits, or without a profile that of Qwen3-4B.

    Raises:
        TangramError: a file or a shape is not there, or they do not fit each other.

    """
    if path is None:
        return None, HeadShape.of(shape_fingerprint(shape_name or _DEFAULT_SHAPE))
    if path.suffix != ".npz":
        profile = RetentionProfile.load(path)
        shape = HeadShape.of(profile.model if shape_name is None else shape_fingerprint(shape_name))
        if (shape.layers, shape.kv_heads) != (profile.num_layers, profile.num_kv_heads):
            raise TangramError(
                f"profile {path} has {profile.num_layers} layers of {profile.num_kv_heads} KV heads, {shape_name} has "
                f"{shape.layers} of {shape.kv_heads}"
            )
        return profile, shape
    model = shape_fingerprint(shape_name or _fitting_shape(path))
    return import_published(path, model, DEFAULTS["scorer"]), HeadShape.of(model)


def _domains(about: dict[str, Any], num_samples: int) -> tuple[str, ...]:
    """Of ``"kv:16,qa:12"``, 16 times "kv" and 12 times "qa"; none if that is not what the file has."""
    parts = [part.rpartition(":") for part in str(about.get("dataset_mix", "")).split(",")]
    if not all(name and count.isdecimal() for name, _, count in parts):
        return ()
    names = tuple(name for name, _, count in parts for _ in range(int(count)))
    return names if len(names) == num_samples else ()


def _fitting_shape(path: Path) -> str:
    ratios, _ = _read(path)
    for name in shape_names():
        shape = HeadShape.of(shape_fingerprint(name))
        if (shape.layers, shape.kv_heads) == ratios.shape[1:]:
            return name
    raise TangramError(
        f"published profile {path} has {ratios.shape[1]} layers of {ratios.shape[2]} KV heads; no model shape has: "
        f"{', '.join(shape_names())}"
    )


def _read(path: Path) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Ratios [S, L, H] of a file, and what it says about itself."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if "raw_ratio" in file:
                ratios = np.asarray(file["raw_ratio"], np.float64)[0]
            else:
                ratios = np.asarray(file["ratio_per_head"], np.float64)
            about = json.loads(bytes(file["meta"])) if "meta" in file else {}
    except KeyError:
        raise TangramError(f"published profile {path} has neither raw_ratio nor ratio_per_head") from None
    except (OSError, EOFError, TypeError, ValueError, IndexError, zipfile.BadZipFile) as error:
        raise TangramError(f"published profile {path} cannot be read: {error}") from error
    # Stated positively: comparisons with NaN are false.
    if ratios.ndim != 3 or ratios.size == 0 or not np.all((ratios >= 0) & (ratios <= 1)):
        raise TangramError(
            f"published profile {path} is damaged: its ratios are not [samples, layers, heads] in [0, 1]"
        )
    return ratios, about
