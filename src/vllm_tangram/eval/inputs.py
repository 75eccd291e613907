# SPDX-License-Identifier: Apache-2.0
"""What some scorers need of a model of transformers besides queries, keys and values, without a list of model names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_tangram.compression.rope import Rope
from vllm_tangram.errors import TangramError


def attention_blocks(model: Any) -> list[Any]:
    """The attention block of every layer, in order.

    Raises:
        TangramError: a layer has none, as in hybrid models.

    """
    # What transformers hands to its attention functions has both of these attributes.
    blocks = {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")
    }
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(blocks) != list(range(num_layers)):
        raise TangramError(
            f"{type(model).__name__}: attention blocks were found in layers {sorted(blocks)} of {num_layers}; only "
            "models whose layers are all ordinary attention can be scored by their hidden states or with RoPE undone"
        )
    return [blocks[layer] for layer in range(num_layers)]


@contextmanager
def attention_inputs(model: Any) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states that enter each attention block, after its norm.

    Yields:
        layer -> ``[B, T, D]`` of the latest forward pass, filled while the context is open.

    Raises:
        TangramError: see `attention_blocks`.

    """
    inputs: dict[int, Tensor] = {}

    def keep(layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[layer] = (args[0] if args else kwargs["hidden_states"]).detach()

    handles = [
        block.register_forward_pre_hook(partial(keep, layer), with_kwargs=True)
        for layer, block in enumerate(attention_blocks(model))
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def rope_of(model: Any) -> Rope:
    """The rotary embedding that all layers of a model share.

    Raises:
        TangramError: there is none, there are several, or it depends on more than the position.

    """
    modules = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    if len(modules) != 1 or not all(getattr(block, "use_rope", True) for block in attention_blocks(model)):
        raise TangramError(f"{type(model).__name__} does not have one rotary embedding for all layers")
    (module,) = modules
    kind = str(getattr(module, "rope_type", "default"))
    if kind == "longrope" or "dynamic" in kind:
        raise TangramError(f"{type(model).__name__}: rotary embeddings of type {kind} depend on the prompt's length")
    positions = torch.arange(model.config.get_text_config().max_position_embeddings, device=model.device)[None]
    with torch.inference_mode():
        tables = module(torch.empty(0, dtype=model.dtype, device=model.device), positions)
    table = torch.cat([_one_of_each_pair(entries[0]) for entries in tables], dim=-1)
    return Rope(table, interleaved=_interleaved(model))


def _one_of_each_pair(entries: Tensor) -> Tensor:
    """``[P, rotary_dim]`` cosines or sines -> ``[P, rotary_dim / 2]``; the two of a pair are neighbours or halves."""
    if torch.equal(entries[:, ::2], entries[:, 1::2]):
        return entries[:, ::2]
    return entries[:, : entries.shape[1] // 2]


def _interleaved(model: Any) -> bool:
    """Ask the function by which the model's own code pairs dimensions."""
    rotate = getattr(sys.modules[type(attention_blocks(model)[0]).__module__], "rotate_half", None)
    paired = None if rotate is None else rotate(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
    if paired not in ([-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0]):
        raise TangramError(f"{type(model).__name__} computes its rotary embedding in a way that is not known here")
    return paired == [-2.0, 1.0, -4.0, 3.0]
