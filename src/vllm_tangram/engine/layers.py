# SPDX-License-Identifier: Apache-2.0
"""Our attention in the layers of a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_tangram.compression.rope import Rope
from vllm_tangram.engine.compat import check_layers
from vllm_tangram.engine.inputs import HiddenStates, parent_of, rope_of
from vllm_tangram.engine.scoring import LayerScorer, mean_over_ranks, scorer_of
from vllm_tangram.engine.setup import groups_of, rank_of
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_tangram.budget import RetentionPlan


def adopt_layers(
    vllm_config: VllmConfig,
    model: torch.nn.Module,
    plan: RetentionPlan,
    backend: type,
    implement: Callable[[int, Any, LayerScorer], Any],
    device: torch.device,
) -> None:
    """Replace backend and implementation of every attention layer, and let all layers share one page pool.

    It happens after the model is loaded and before it first runs, so no registry of vLLM is changed and other engines
    of the process stay as they are.

    Args:
        vllm_config: of the engine.
        model: the loaded model.
        plan: what each head may keep; names the scorer and the heads of this rank.
        backend: attention backend that the layers shall name.
        implement: (index among the rank's layers, vLLM's implementation, scorer) -> ours.
        device: of the model.

    Raises:
        TangramError: a layer computes something that the ragged path does not, or lacks what the scorer needs.

    """
    layers = sorted(
        get_layers_from_vllm_config(vllm_config, Attention).items(), key=lambda item: extract_layer_index(item[0])
    )
    check_layers(layers, num_kv_heads=groups_of(vllm_config).group.shape[1])
    first_name = layers[0][0]
    scorer = scorer_of(plan, rank_of(vllm_config), device, vllm_config.model_config.dtype)
    ropes: dict[int, Rope] = {}
    hidden = HiddenStates(vllm_config, device) if "hidden" in scorer.needs else None
    mean = mean_over_ranks(vllm_config)
    for index, (name, layer) in enumerate(layers):
        block = parent_of(model, layer)
        try:
            rope = rope_of(model, block, ropes) if "rope" in scorer.needs else None
            if hidden is not None:
                hidden.tap(block)
        except TangramError as error:
            raise TangramError(
                f"--scorer {scorer.name} cannot serve this model: layer {name}: {error}; choose another scorer"
            ) from None
        layer.attn_backend = backend
        scoring = LayerScorer(scorer, plan.config, index, layer.impl.scale, rope, hidden, mean)
        layer.impl = implement(index, layer.impl, scoring)
        if name != first_name:  # vLLM then binds the first layer's tensor to all: one pool, one block = one page
            layer.kv_sharing_target_layer_name = first_name
