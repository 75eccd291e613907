# SPDX-License-Identifier: Apache-2.0
"""Honest memory promises: a request's need is known when it arrives, so it is refused there or it runs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.logger import init_logger
from vllm.v1.engine.input_processor import InputProcessor

from vllm_tangram.engine.setup import OPTIONS_KEY, layout_of, plan_of
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest

    from vllm_tangram.budget import RetentionPlan
    from vllm_tangram.config import TangramConfig

logger = init_logger("vllm.tangram")  # vLLM shows only what is logged below its own name

RETENTION_KEY = "retention"  # in vllm_xargs (OpenAI API) and SamplingParams.extra_args

_MARK = "_checks_tangram_requests"


class RequestRefused(TangramError, VLLMClientError):
    """A request that can never run; a ``VLLMClientError`` is what vLLM's server answers with HTTP 400."""


def retention_of(config: TangramConfig, params: SamplingParams | None) -> float:
    """Retention of one request: its own, or the server's.

    Raises:
        TangramError: not a number in [retention_floor, 1].

    """
    value = ((params and params.extra_args) or {}).get(RETENTION_KEY)
    return config.retention if value is None else config.request_retention(value)


def check_request(vllm_config: VllmConfig, request: EngineCoreRequest) -> None:
    """Refuse a request that can never run, in the front end, so that the client gets the reason.

    Raises:
        TangramError: bad retention, streaming input, or a prompt that needs more pages than the pool has.

    """
    if request.resumable:
        raise TangramError(
            "streaming input is not supported by vllm-tangram: the whole prompt must be known at arrival"
        )
    plan = plan_of(vllm_config)
    retention = retention_of(plan.config, request.sampling_params)
    num_pages = vllm_config.cache_config.num_gpu_blocks or 0  # unknown to a front end that has no engine yet
    pool = num_pages - 1
    prompt_len = len(request.prompt_token_ids or ())
    need = plan.schedule(retention).num_pages(prompt_len, prompt_len)
    if num_pages and need > pool:
        raise TangramError(
            f"the prompt of {prompt_len} tokens needs {need} pages at retention {retention:g}, but the KV pool "
            f"has {pool}: shorten it, ask for a smaller retention, or give the server more KV memory "
            "(--kv-cache-memory-bytes or --gpu-memory-utilization)"
        )


def request_memory(
    vllm_config: VllmConfig, prompt_tokens: int, generated_tokens: int = 0, retention: float | None = None
) -> dict[str, float | int]:
    """What a request holds at its end, by arithmetic: nothing has to run for it.

    Args:
        vllm_config: of the engine.
        prompt_tokens: P, at least 1.
        generated_tokens: at least 0; the last one is never stored.
        retention: what the request asks for; None: the server's.

    Returns:
        ``retention`` it is compressed to, ``pages``, their ``bytes`` on all ranks together, and ``full_kv_bytes`` of
        the same tokens at full KV, likewise.

    Raises:
        TangramError: a bad retention, or more tokens than the model's context has.

    """
    plan, layout = plan_of(vllm_config), layout_of(vllm_config)
    asked = plan.config.retention if retention is None else plan.config.request_retention(retention)
    longest = vllm_config.model_config.max_model_len
    if prompt_tokens < 1 or generated_tokens < 0 or prompt_tokens + generated_tokens > longest:
        raise TangramError(
            f"a request has at least 1 prompt token and at most {longest} tokens in all (--max-model-len), got "
            f"{prompt_tokens} prompt tokens and {generated_tokens} generated ones"
        )
    tokens = prompt_tokens + max(generated_tokens - 1, 0)
    pages = plan.schedule(asked).num_pages(tokens, prompt_tokens)
    return {
        "retention": plan.quantise(asked),
        "pages": pages,
        "bytes": layout.bytes_of(pages),
        "full_kv_bytes": layout.full_kv_bytes(tokens),
    }


def install_request_check() -> None:
    """Run ``check_request`` on every request of an engine of ours.

    vLLM has no per-request hook that sees the tokenised prompt, so one method is wrapped, in memory; stock engines in
    the same process pass through.
    """
    if request_check_installed():
        return
    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        request: EngineCoreRequest = original(self, *args, **kwargs)
        if OPTIONS_KEY in (self.vllm_config.additional_config or {}):
            try:
                check_request(self.vllm_config, request)
            except TangramError as error:
                raise RequestRefused(str(error)) from None
        return request

    setattr(process_inputs, _MARK, True)
    InputProcessor.process_inputs = process_inputs


def request_check_installed() -> bool:
    """Whether ``install_request_check`` has run in this process; vLLM runs it when it loads the plugin."""
    return hasattr(InputProcessor.process_inputs, _MARK)


def log_capacity(vllm_config: VllmConfig, plan: RetentionPlan, num_pages: int) -> None:
    """Say what really fits; vLLM's own line counts a page as a block of tokens."""
    length = vllm_config.model_config.max_model_len
    need = plan.schedule(plan.config.retention).num_pages(length, length)
    full = plan.full_pages(length)
    ranks = plan.groups.num_ranks
    logger.info(
        "Tangram: retention %g, scorer %s, %d head groups of %d%s; pool of %d pages (%.2f GiB%s) holds %.1f prompts of "
        "%d tokens (%d pages each, %.1f%% of full KV, which would hold %.1f).",
        plan.config.retention,
        plan.config.scorer,
        plan.num_groups,
        plan.groups.size,
        f" on each of {ranks} ranks" if ranks > 1 else "",
        num_pages - 1,
        num_pages * layout_of(vllm_config).page_bytes / 2**30,
        " a rank" if ranks > 1 else "",
        (num_pages - 1) / need,
        length,
        need,
        100 * need / full,
        (num_pages - 1) / full,
    )
