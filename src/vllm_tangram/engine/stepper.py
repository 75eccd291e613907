# SPDX-License-Identifier: Apache-2.0
"""An engine inside this process, driven one step at a time: how benchmarks look at stock vLLM and at ours alike."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core_client import InprocClient

from vllm_tangram.engine.clock import StepClock
from vllm_tangram.engine.llm import LLM
from vllm_tangram.engine.resolve import model_path
from vllm_tangram.engine.scheduler import TangramScheduler
from vllm_tangram.engine.setup import config_of


@dataclass(frozen=True)
class Step:
    """What one engine step did.

    Attributes:
        seconds: wall time.
        generated: tokens generated so far, by each request that got one in this step.
        finished: answers of the requests that ended with this step.
        held_bytes: KV bytes on a rank of each request that holds any after this step, in no particular order.
        kept_fraction: pages held over full KV, all those requests together; 1 for stock, None when none holds any.

    """

    seconds: float
    generated: dict[str, int]
    finished: dict[str, str]
    held_bytes: tuple[int, ...]
    kept_fraction: float | None


@dataclass(frozen=True)
class Advance:
    """What one engine step of counted requests did.

    Attributes:
        seconds: wall time.
        new_tokens: tokens that each request got, of those that got any.
        token_ids: these tokens.
        cached: tokens of the prompt that each of these requests did not have to compute when it was first admitted.
        finished: requests that ended.
        running: requests that are admitted and not done.
        decode_only: whether the batch that was scheduled in this step gives every request one token.
        host: part of ``engine.clock`` -> its seconds of this step.

    """

    seconds: float
    new_tokens: dict[str, int]
    token_ids: dict[str, Sequence[int]]
    cached: dict[str, int]
    finished: list[str]
    running: int
    decode_only: bool
    host: dict[str, float]


class EngineStepper:
    """Stock vLLM, or ours, in this process. Not for serving: vLLM's own front ends are.

    Attributes:
        tokenizer: of the model; None with ``skip_tokenizer_init``.
        scheduler: vLLM's, or ours.
        kv_cache_bytes: memory given to the KV cache of a rank, scratch pages included.
        num_threads: OpenMP threads of the model.
        versions: of vLLM and torch.
        profile: path of the retention profile, None without one.

    """

    def __init__(
        self, model: str, *, ours: bool, options: dict[str, Any], kv_tokens: int = 0, kv_bytes: int | None = None
    ) -> None:
        """Start the engine.

        Args:
            model: path or name, or ``embedded``.
            ours: whether pages are head groups (``vllm_tangram.LLM``) or stock (``vllm.LLM``).
            options: further options of that class.
            kv_tokens: KV memory, as the number of tokens whose full KV fills it: the same bytes for both engines.
            kv_bytes: the same in bytes of a rank, instead of ``kv_tokens``.

        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        model = model_path(model)
        whole = kv_tokens * _full_kv_bytes_per_token(model)
        self.kv_cache_bytes = whole // options.get("tensor_parallel_size", 1) if kv_bytes is None else kv_bytes
        engine = (LLM if ours else vllm.LLM)(model, kv_cache_memory_bytes=self.kv_cache_bytes, **options).llm_engine
        client = engine.engine_core
        assert isinstance(client, InprocClient)
        self._engine = engine
        self.scheduler: Any = client.engine_core.scheduler
        self._clock = StepClock(self.scheduler, client.engine_core.model_executor)
        self._counted: list[Any] = []  # requests of ``add_counted``, the finished ones too
        (self._pages,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        pool = self.scheduler.kv_cache_config
        self._block_bytes = sum(tensor.size for tensor in pool.kv_cache_tensors) // pool.num_blocks
        self.tokenizer: Any = None if options.get("skip_tokenizer_init") else engine.get_tokenizer()
        self.num_threads = torch.get_num_threads()
        self.versions = f"vLLM {vllm.__version__}, torch {torch.__version__}"
        self.profile = config_of(engine.vllm_config).profile if ours else None

    @property
    def pages_reclaimed(self) -> int:
        """Pages that became unnecessary while their request ran; stock vLLM does not compress, so it has none."""
        return self._pages.pages_reclaimed if isinstance(self.scheduler, TangramScheduler) else 0

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> None:
        """Queue a greedy request.

        Raises:
            TangramError: it can never fit.

        """
        sampling = vllm.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, sampling)

    def add_counted(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, retention: float | None = None
    ) -> None:
        """Queue a greedy request of exactly ``max_tokens`` tokens, of which only the number matters.

        Nothing is turned into text, and a step gives new tokens alone: a server does the former in another process.
        ``retention`` is what the request asks for instead of the engine's.

        Raises:
            TangramError: it can never fit.

        """
        sampling = vllm.SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if retention is None else {"retention": retention},
        )
        self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, sampling)
        self._counted.append(next(reversed(self.scheduler.requests.values())))

    def advance(self) -> Advance:
        """Run one step of requests of ``add_counted``."""
        self._clock.take()
        start = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        return Advance(
            seconds=seconds,
            new_tokens={output.request_id: len(output.outputs[0].token_ids) for output in outputs},
            token_ids={output.request_id: output.outputs[0].token_ids for output in outputs},
            cached={output.request_id: output.num_cached_tokens or 0 for output in outputs},
            finished=[output.request_id for output in outputs if output.finished],
            running=len(self.scheduler.running),
            decode_only=self._clock.tokens == self._clock.rows > 0,
            host=self._clock.take(),
        )

    def abort_all(self) -> None:
        """End and forget all requests of ``add_counted``."""
        running = [request.request_id for request in self._counted if request.request_id in self.scheduler.requests]
        self._engine.abort_request(running, internal=True)
        self._counted.clear()

    def forget_prefixes(self) -> None:
        """Empty stock vLLM's prefix cache, or our sessions; nothing may run."""
        assert self.scheduler.reset_prefix_cache(), "requests hold pages"

    def resident_sessions(self) -> int | None:
        """Sessions that a request could begin with (``SessionCache.listing``); None: stock."""
        if not isinstance(self.scheduler, TangramScheduler):
            return None
        return len(self.scheduler.pages.sessions.listing())

    def restored_sessions(self) -> int | None:
        """Requests that began with pages from host memory, since start; None: stock."""
        return self.scheduler.pages.sessions.restored if isinstance(self.scheduler, TangramScheduler) else None

    @property
    def preemptions(self) -> int:
        """How often requests of ``add_counted`` were preempted, since ``abort_all``."""
        return sum(request.num_preemptions for request in self._counted)

    def held(self) -> tuple[int, float | None]:
        """KV bytes that requests hold now on a rank, and what fraction of their full KV that is (as in ``Step``)."""
        count = sum(map(len, self._pages.req_to_blocks.values()))
        return count * self._block_bytes, self._kept_fraction(count > 0)

    def step(self) -> Step:
        """Run one step of all requests that fit."""
        start = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        held = tuple(len(blocks) * self._block_bytes for blocks in self._pages.req_to_blocks.values() if blocks)
        return Step(
            seconds=seconds,
            generated={output.request_id: len(output.outputs[0].token_ids) for output in outputs},
            finished={output.request_id: output.outputs[0].text for output in outputs if output.finished},
            held_bytes=held,
            kept_fraction=self._kept_fraction(bool(held)),
        )

    def _kept_fraction(self, any_held: bool) -> float | None:
        if isinstance(self.scheduler, TangramScheduler):
            return self.scheduler.page_stats().kept_fraction
        return 1.0 if any_held else None


def _full_kv_bytes_per_token(model: str) -> int:
    config = EngineArgs(model=model).create_model_config()
    return int(
        config.get_total_num_kv_heads() * config.get_total_num_hidden_layers() * 2 * config.get_head_size()
    ) * int(config.dtype.itemsize)
