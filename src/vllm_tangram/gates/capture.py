# SPDX-License-Identifier: Apache-2.0
"""What enters the attention blocks of a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from vllm_tangram.errors import TangramError


@contextmanager
def attention_inputs(model: Any) -> Iterator[dict[int, Tensor]]:
    """Collect the hidden states that enter each attention block, after its norm: what a gate reads.

    Args:
        model: a causal language model of transformers.

    Yields:
        layer -> ``[B, T, D]`` of the latest forward pass, filled while the context is open.

    Raises:
        TangramError: the model's attention blocks cannot be told from its other modules.

    """
    inputs: dict[int, Tensor] = {}

    def keep(layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[layer] = (args[0] if args else kwargs["hidden_states"]).detach()

    handles = [
        module.register_forward_pre_hook(partial(keep, layer), with_kwargs=True)
        for layer, module in enumerate(_attention_blocks(model))
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def _attention_blocks(model: Any) -> list[Any]:
    """One module per layer. Whatever transformers' attention functions are handed has both of these attributes."""
    blocks = {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")
    }
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(blocks) != list(range(layers)):
        raise TangramError(
            f"{type(model).__name__}: found attention blocks of layers {sorted(blocks)}, expected all of {layers}; "
            "gates are for models whose layers are all ordinary attention"
        )
    return [blocks[layer] for layer in range(layers)]
