# SPDX-License-Identifier: Apache-2.0
"""Published Fast KVzip checkpoints (https://huggingface.co/Jang-Hyun/Fast-KVzip) as gates.

They are pickles ``{"module": [state_dict of each layer], ...}``. Nothing in them is run: torch's restricted reader
takes tensors, and the NumPy arrays of loss curves that training leaves beside them, and refuses everything else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_tangram.compression.gate import Gate, GateWeights
from vllm_tangram.errors import TangramError
from vllm_tangram.gates.make import versions

_NAMES = {
    "q_proj.weight": "q_weight",
    "q_proj.bias": "q_bias",
    "k_proj.weight": "k_weight",
    "q_norm.weight": "q_norm",
    "k_norm.weight": "k_norm",
    "k_base": "k_base",
    "b": "bias",
}


def convert(path: Path, model: dict[str, Any]) -> Gate:
    """Read a published checkpoint.

    Args:
        path: the pickle.
        model: fingerprint of the model that it belongs to; its shapes are checked.

    Raises:
        TangramError: the file is none, holds code, or its shapes are those of another model.

    """
    layers = [_layer(state, f"{path}, layer {index}") for index, state in enumerate(_modules(path))]
    try:
        weights = GateWeights(**{name: torch.stack([layer[name] for layer in layers]) for name in _NAMES.values()})
    except RuntimeError as error:
        raise TangramError(f"{path}: layers have different shapes ({error})") from None
    info = versions() | {"converted_from": path.name}
    gate = Gate(weights, model, {"target": "KVzip", "data": "as published"}, {}, info, source=str(path))
    gate.check(model=model)
    group = int(model["num_attention_heads"]) // int(model["num_key_value_heads"])
    if gate.group_size != group:
        raise TangramError(f"{path} is for {gate.group_size} query heads per KV head, the model has {group}")
    return gate


def _modules(path: Path) -> list[Any]:
    if not path.is_file():
        raise TangramError(f"there is no file {path}")
    arrays = [np.ndarray, np.dtype, np.dtypes.Float32DType, np.dtypes.Float64DType, *_reconstructors()]
    try:
        with torch.serialization.safe_globals(arrays):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make the reader fail in any way, such as an IndexError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TangramError(
            f"{path} is no checkpoint of a gate: torch's restricted reader, which runs no code, refuses it ({reason})"
        ) from None
    modules = content.get("module") if isinstance(content, dict) else None
    if not isinstance(modules, list) or not modules:
        raise TangramError(f'{path} is no published gate: it has no list "module" with a state of each layer')
    return modules


def _reconstructors() -> list[Any]:
    """What a pickled NumPy array is rebuilt with, under its new and its old name."""
    rebuild = np.zeros(0).__reduce__()[0]
    return [rebuild, (rebuild, "numpy.core.multiarray._reconstruct")]


def _layer(state: Any, where: str) -> dict[str, Tensor]:
    if not isinstance(state, dict):
        raise TangramError(f"{where}: expected a state of named tensors, got {type(state).__name__}")
    missing = [name for name in _NAMES if not isinstance(state.get(name), Tensor)]
    unknown = [str(name) for name in state if name not in _NAMES]
    if missing or unknown:
        raise TangramError(f"{where}: lacks {missing or 'nothing'}, has unknown {unknown or 'nothing'}")
    tensors = {ours: state[name].float() for name, ours in _NAMES.items()}
    for name in ("k_base", "bias"):
        if tensors[name].ndim < 2 or tensors[name].shape[1] != 1:
            raise TangramError(f"{where}: {name} is {list(tensors[name].shape)}, its second dimension is not 1")
        tensors[name] = tensors[name].squeeze(1)
    return tensors
