# SPDX-License-Identifier: Apache-2.0
"""From vLLM's configuration to ours: every process of an engine derives the same plan from it."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from vllm_tangram.budget import RetentionPlan, RetentionProfile, model_fingerprint
from vllm_tangram.compression.gate import Gate
from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError
from vllm_tangram.pages.layout import PageLayout

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

OPTIONS_KEY = "tangram"  # in VllmConfig.additional_config

#: Different retentions among the requests that run at one time; a request with one more waits. Workers keep a table
#: for each.
MAX_RETENTIONS = 32


def config_of(vllm_config: VllmConfig) -> TangramConfig:
    """The plugin's options of this engine.

    Raises:
        TangramError: the engine was not started by us, or the options are wrong.

    """
    options = (vllm_config.additional_config or {}).get(OPTIONS_KEY)
    if options is None:
        raise TangramError(
            f"no options in --additional-config '{{\"{OPTIONS_KEY}\": ...}}': start the engine with `tangram serve` or "
            "vllm_tangram.LLM, which set them"
        )
    return TangramConfig.parse(options)


def gate_digest(config: TangramConfig) -> str | None:
    """What a profile remembers of the gate; None without one."""
    return None if config.gate is None else Gate.load(config.gate).digest()


def plan_of(vllm_config: VllmConfig) -> RetentionPlan:
    """What each head may keep, from the options and the profile; cached per process."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return _build_plan(
        json.dumps(config_of(vllm_config).model_dump(), sort_keys=True),
        model.get_num_layers(parallel),
        model.get_num_kv_heads(parallel),
        vllm_config.cache_config.block_size,
        model.max_model_len,
    )


@functools.lru_cache(maxsize=32)
def _build_plan(options: str, num_layers: int, num_kv_heads: int, block_size: int, max_tokens: int) -> RetentionPlan:
    config = TangramConfig.parse(json.loads(options))
    profile = RetentionProfile.load(Path(config.profile)) if config.profile else None
    return RetentionPlan(
        config,
        profile,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        max_tokens=max_tokens,
    )


def layout_of(vllm_config: VllmConfig) -> PageLayout:
    """Sizes of this engine's pages."""
    plan = plan_of(vllm_config)
    model = vllm_config.model_config
    return PageLayout(
        group_size=plan.groups.size,
        block_size=plan.block_size,
        head_dim=model.get_head_size(),
        dtype_size=model.dtype.itemsize,
        num_groups=plan.num_groups,
        num_members=int(plan.groups.group.size),
    )


def staging_pages(vllm_config: VllmConfig) -> int:
    """Scratch pages of the CPU worker: one layer's share of the largest step, each chunk rounded up to blocks.

    On CUDA a chunk is attended to where it is, so there are none.
    """
    if not current_platform.is_cpu():
        return 0
    scheduler = vllm_config.scheduler_config
    layout = layout_of(vllm_config)
    num_kv_heads = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
    rounding = scheduler.max_num_seqs * layout.block_size
    return layout.staging_pages(scheduler.max_num_batched_tokens + rounding, num_kv_heads)


def host_pages(vllm_config: VllmConfig) -> int:
    """Pages of the host memory that sessions may take, 0 without sessions."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return 0
    return int(config_of(vllm_config).session_spill_gib * 2**30) // layout_of(vllm_config).page_bytes


def fingerprint_of(model_config: ModelConfig, load_config: LoadConfig) -> dict[str, Any]:
    """Identity of the served model, to compare with a profile's and a gate's.

    Weights are part of it. Those of a model of the hub that are not here yet are fetched, by the loader that is about
    to load them: else the first start would find no gate, and make a profile that the second does not know.

    Raises:
        OSError: they cannot be fetched.

    """
    described = model_config.hf_text_config.to_dict()
    identity = model_fingerprint(described, _weights_dir(model_config, load_config))
    if identity["weights"] is None and not Path(model_config.model).is_dir():
        from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

        loader = get_model_loader(load_config)
        if isinstance(loader, DefaultModelLoader):  # others load no safetensors of the hub, or nothing at all
            loader.download_model(model_config)
            identity = model_fingerprint(described, _weights_dir(model_config, load_config))
    return identity


def _weights_dir(model_config: ModelConfig, load_config: LoadConfig) -> Path | None:
    path = Path(model_config.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return Path(found)
