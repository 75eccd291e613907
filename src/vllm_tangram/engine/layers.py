# SPDX-License-Identifier: Apache-2.0
"""Our attention in the layers of a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_tangram.engine.compat import check_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_tangram.budget import RetentionPlan


def adopt_layers(
    vllm_config: VllmConfig, plan: RetentionPlan, backend: type, implement: Callable[[int, Any], Any]
) -> None:
    """Replace backend and implementation of every attention layer, and let all layers share one page pool.

    It happens after the model is loaded and before it first runs, so no registry of vLLM is changed and other engines
    of the process stay as they are.

    Args:
        vllm_config: of the engine.
        plan: what each head may keep.
        backend: attention backend that the layers shall name.
        implement: (layer index, vLLM's implementation) -> ours.

    Raises:
        TangramError: a layer computes something that the ragged path does not.

    """
    layers = sorted(
        get_layers_from_vllm_config(vllm_config, Attention).items(), key=lambda item: extract_layer_index(item[0])
    )
    check_layers(layers, num_kv_heads=plan.groups.group.shape[1])
    first_name = layers[0][0]
    for index, (name, layer) in enumerate(layers):
        layer.attn_backend = backend
        layer.impl = implement(index, layer.impl)
        if name != first_name:  # vLLM then binds the first layer's tensor to all: one pool, one block = one page
            layer.kv_sharing_target_layer_name = first_name
