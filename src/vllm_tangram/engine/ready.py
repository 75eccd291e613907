# SPDX-License-Identifier: Apache-2.0
"""Everything that can be wrong with an engine's options, found before any process starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_tangram.budget import RetentionProfile, rank_stability
from vllm_tangram.config import TangramConfig
from vllm_tangram.engine.check import check_wanted
from vllm_tangram.engine.compat import check_supported, check_vllm
from vllm_tangram.engine.host import check_host_memory
from vllm_tangram.engine.known import resolve_documents
from vllm_tangram.engine.options import engine_options, vllm_refusals
from vllm_tangram.engine.resolve import resolve_gate, resolve_profile, resolve_scorer
from vllm_tangram.engine.setup import (
    OPTIONS_KEY,
    config_of,
    fingerprint_of,
    host_pages,
    layout_of,
    plan_of,
    staging_pages,
)
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.tangram")


def ready_options(
    config: TangramConfig, model: str, given: dict[str, Any], build: Callable[[dict[str, Any]], VllmConfig]
) -> dict[str, Any]:
    """vLLM's engine options, completed for head-group pages and checked as far as it goes without weights.

    A retention profile is made here if there is none yet.

    Args:
        config: our options.
        model: path or name of the model.
        given: vLLM's options as the user gave them.
        build: makes vLLM's configuration of completed options.

    Raises:
        TangramError: something is wrong with the options, the model or a file; no process was started.

    """
    check_vllm()
    check_wanted()
    with vllm_refusals(f"{model}: "), _muted():  # vLLM builds and tells this again when it starts: milliseconds
        vllm_config = build(engine_options(config, given))
    check_supported(vllm_config)
    # With equal budgets a plan needs no profile, so what is wrong with it is known before minutes go into making one.
    vllm_config.additional_config = {
        OPTIONS_KEY: config.model_copy(update={"budgets": "uniform", "profile": None}).model_dump()
    }
    plan_of(vllm_config)
    check_spill(vllm_config)
    with vllm_refusals(f"{model}: "):
        identity = fingerprint_of(vllm_config.model_config, vllm_config.load_config)
    # Files that are wrong are known before minutes go into making a profile.
    config = resolve_documents(config, identity, vllm_config.model_config.max_model_len)
    config = resolve_gate(resolve_scorer(config, identity), identity)
    config = resolve_profile(config, model, given, identity)
    options = engine_options(config, given)
    vllm_config.additional_config = options["additional_config"]
    check_pool(vllm_config)
    if config.gate is not None:
        logger.info("Tangram: gate %s", config.gate)
    for path in config.document_scores:
        logger.info("Tangram: document scores %s", path)
    if config.profile is not None:
        logger.info("Tangram: retention profile %s", config.profile)
        if config.budgets == "profile":
            stability = rank_stability(RetentionProfile.load(config.profile), config.retention)
            if (warning := stability.warning()) is not None:
                logger.warning("Tangram: %s.", warning)
    return options


def check_pool(vllm_config: VllmConfig) -> None:
    """Refuse a pool of known size that holds no prompt of the maximum length.

    Raises:
        TangramError: tells how much is needed; or the plan cannot be made from these options.

    """
    plan, layout = plan_of(vllm_config), layout_of(vllm_config)
    length = vllm_config.model_config.max_model_len
    if vllm_config.model_config.original_max_model_len == -1:  # vLLM is to find the length that fits
        return
    given = vllm_config.cache_config.kv_cache_memory_bytes
    stated = vllm_config.cache_config.num_gpu_blocks_override
    pages = plan.schedule(plan.config.retention).num_pages(length, length) + 1  # vLLM keeps one for itself
    if stated is not None and stated < pages:
        raise TangramError(
            f"--num-gpu-blocks-override {stated} is too small: a prompt of --max-model-len {length} at retention "
            f"{plan.config.retention:g} needs {pages} pages; give more, or lower --max-model-len or --retention"
        )
    needed = (pages + staging_pages(vllm_config)) * layout.page_bytes
    rank = " on every rank" if layout.num_ranks > 1 else ""
    if given is not None and given < needed:
        raise TangramError(
            f"--kv-cache-memory-bytes {given} is too small: a prompt of --max-model-len {length} at retention "
            f"{plan.config.retention:g} and the scratch pages of a step need {needed} bytes{rank}; give more, or lower "
            "--max-model-len, --retention, --chunk-size or --max-num-seqs"
        )


def check_spill(vllm_config: VllmConfig) -> None:
    """Refuse host memory for sessions that are switched off, that holds no chunk, or that the machine does not have.

    Raises:
        TangramError: tells which, with the sizes.

    """
    plan, asked = plan_of(vllm_config), config_of(vllm_config).session_spill_gib
    if not asked:
        return
    if not vllm_config.cache_config.enable_prefix_caching:
        raise TangramError("--session-spill-gib: there are no sessions with --no-enable-prefix-caching; give only one")
    chunk = plan.config.chunk_size
    pages = plan.schedule(plan.config.retention).num_pages(chunk, chunk)
    if host_pages(vllm_config) < pages:
        raise TangramError(
            f"--session-spill-gib: {asked:g} GiB hold no chunk of {chunk} tokens at retention "
            f"{plan.config.retention:g}, which takes {layout_of(vllm_config).bytes_of(pages)} bytes: give more, or 0"
        )
    parallel = vllm_config.parallel_config
    # Where Ray puts ranks shows only later; each checks its own part when it starts.
    ranks_here = 1 if parallel.distributed_executor_backend == "ray" else parallel.local_world_size
    check_host_memory(vllm_config, ranks_here)


@contextmanager
def _muted() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(level)
