# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point: called in every process of every vLLM engine around, so it must not disturb others."""

from __future__ import annotations


def register() -> None:
    """Make head-group pages known to vLLM, check requests at arrival, let sessions be listed and dropped.

    Safe to call again.

    Raises:
        TangramError: the installed vLLM is not the one that is supported.

    """
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vllm_tangram.engine.admission import install_request_check
    from vllm_tangram.engine.compat import check_vllm
    from vllm_tangram.engine.control import install_endpoints, install_session_calls
    from vllm_tangram.engine.manager import HeadGroupManager
    from vllm_tangram.engine.spec import HeadGroupSpec

    check_vllm()
    # The registry fills itself only while it is empty, so the built-in specs must come first.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(HeadGroupSpec, HeadGroupManager, FullAttentionSpec)
    install_request_check()
    install_session_calls()
    install_endpoints()
