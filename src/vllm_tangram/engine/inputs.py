# SPDX-License-Identifier: Apache-2.0
"""What some scorers need of a loaded model besides queries, keys and values, found without a list of model names."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import Module
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_tangram.compression.rope import Rope
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PROJECTION = "qkv_proj"  # what vLLM's models call the one matrix that makes queries, keys and values
_INPUT = "hidden_states"


def parent_of(model: Module, child: Module) -> Module:
    """The module that has ``child`` as an attribute: of an attention layer, the attention block."""
    return next(module for module in model.modules() if any(own is child for own in module.children()))


def rope_of(model: Module, block: Module, ropes: dict[int, Rope]) -> Rope:
    """The rotary embedding of an attention block: its own, or else the only one of the model.

    Args:
        model: vLLM's model.
        block: parent of the attention layer.
        ropes: those that were found before, by ``id`` of vLLM's module; added to.

    Raises:
        TangramError: there is none, there are several, or it is of a kind that no table by position describes.

    """
    for place in (block.children(), model.modules()):
        found = {id(module): module for module in place if isinstance(module, RotaryEmbeddingBase)}
        if len(found) > 1:
            raise TangramError(f"the model has {len(found)} rotary embeddings and it is unclear which one a layer uses")
        for key, module in found.items():
            if key not in ropes:
                ropes[key] = _rope(module)
            return ropes[key]
    raise TangramError("the model has no rotary embedding (RoPE) that vLLM computes")


def _rope(module: RotaryEmbeddingBase) -> Rope:
    table = getattr(module, "cos_sin_cache", None)
    if not isinstance(table, Tensor) or table.ndim != 2 or table.shape[1] != module.rotary_dim:
        raise TangramError(f"{type(module).__name__} has no table of one rotation for each position")
    try:
        return Rope(table, interleaved=not module.is_neox_style)
    except TangramError as error:
        raise TangramError(f"{type(module).__name__}: {error}") from None


class HiddenStates:
    """What entered the attention block of the layer that runs.

    One buffer serves all layers: a layer's attention reads it before the next layer's projection runs. It has a fixed
    address, so CUDA graphs can write to it. An operator copies into it (`_keep`), which the compiler sees as one that
    changes its argument: it cannot be dropped, and what the argument leads to, attention too, comes after it.

    Attributes:
        buffer: ``[max_num_batched_tokens, D]`` in the model's type; the step's tokens come first.

    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device | str) -> None:
        model = vllm_config.model_config
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.buffer = torch.zeros(rows, model.get_hidden_size(), dtype=model.dtype, device=device)
        self._kept = False
        _holders[id(vllm_config.compilation_config.static_forward_context)] = self

    def tap(self, block: Module) -> None:
        """Copy from now on what enters ``block``: the input of its projection, or of the block itself.

        Raises:
            TangramError: it has neither the projection nor an argument for it.

        """
        projection = getattr(block, _PROJECTION, None)
        source = block if projection is None else projection
        names = list(inspect.signature(source.forward).parameters)
        name = _INPUT if projection is None else names[0]
        if name not in names:
            raise TangramError(f"{type(block).__name__} has neither {_PROJECTION} nor an input {_INPUT}")
        index = names.index(name)

        def keep(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            torch.ops.vllm.tangram_keep_hidden(args[index] if len(args) > index else kwargs[name])

        source.register_forward_pre_hook(keep, with_kwargs=True)

    def keep(self, hidden: Tensor, step: ForwardContext) -> None:
        """Copy a layer's ``[T, D]``, unless the step only decodes: then nothing is scored."""
        self._kept = True
        # What a piecewise graph captures is replayed for steps of all kinds; a full one is for steps that decode.
        known = step.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE and isinstance(step.attn_metadata, dict)
        if not known or any(layer.has_prefill for layer in step.attn_metadata.values()):
            hidden = hidden.flatten(0, -2)
            self.buffer[: len(hidden)].copy_(hidden)

    def expect(self) -> None:
        """A layer's attention begins, so its hidden states must have come. In a graph's replay Python cannot tell.

        Raises:
            TangramError: they did not: the model calls its projection in a way of its own.

        """
        if get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.NONE and not self._kept:
            raise TangramError(
                "this model's attention block does not call its projection as a module, so the scorer cannot see its "
                "hidden states: choose another --scorer"
            )
        self._kept = False


# By the dictionary of attention layers that a step's context names: engines of one process have one each. The layer's
# name would do as well, but a name in a compiled piece makes every layer's piece another one to compile.
_holders: WeakValueDictionary[int, HiddenStates] = WeakValueDictionary()


def _keep(hidden: Tensor) -> None:
    step = get_forward_context()
    _holders[id(step.no_compile_layers)].keep(hidden, step)


def _keep_fake(hidden: Tensor) -> None:
    return


direct_register_custom_op("tangram_keep_hidden", _keep, mutates_args=["hidden"], fake_impl=_keep_fake)
