# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks of whole engines share: which engines, how they are started, and the same of everything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.bench.shapes import shape_names
from vllm_tangram.bench.sizing import graph_sizes, kv_heads, model_options
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm_tangram.engine.stepper import EngineStepper

T = TypeVar("T")

STOCK = "stock"
_VOCABULARY = range(100, 10_000)  # token ids that every model has; which ones does not matter to the time
# An environment variable because the engine reads it where only developers look: even pieces are an ablation.
_NO_SPLIT_MAP = {"TANGRAM_SPLIT_MAP": "0"}
_QUICK_START = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # building that sampler takes minutes; greedy decoding has no use


@dataclass(frozen=True)
class Engine:
    """One engine of a comparison.

    Attributes:
        key: names it in results.
        retention: None for stock vLLM.
        options: options of ours that differ from the others'.
        environment: variables of its process.

    """

    key: str
    retention: float | None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, key: str) -> Engine:
        """``stock``, a retention, or ``RETENTION/STEP`` where STEP is a step of the paper's ablation (Figure 10).

        The steps add one technique each: ``unified`` has budgets alone, in pages of all heads of a layer; ``groups``
        has pages of head groups; ``splits`` has equal shares for all thread blocks too. All give every head the same
        budget: with a margin "inside", unified pages would hold no more, but keep less of the heads that matter. So
        theirs is "on_top".

        Raises:
            TangramError: it is none of these.

        """
        if key == STOCK:
            return cls(key, None)
        number, _, step = key.partition("/")
        try:
            retention = float(number)
        except ValueError:
            retention = 0.0
        if not 0 < retention <= 1 or step not in ("", *_STEPS):
            raise TangramError(
                f"--engine, --retention: {key!r} is neither {STOCK!r} nor a retention in (0, 1], alone or followed by "
                f"{', '.join('/' + name for name in _STEPS)}"
            )
        if not step:
            return cls(f"{retention:g}", retention)
        options, environment = _STEPS[step]
        return cls(f"{retention:g}/{step}", retention, dict(options), dict(environment))


# Step of the ablation -> options, environment. A page group size of 0 stands for all heads of a layer.
_STEPS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "unified": ({"margin": "on_top", "page_group_size": 0, "grouping": "neighbours"}, _NO_SPLIT_MAP),
    "groups": ({"margin": "on_top"}, _NO_SPLIT_MAP),
    "splits": ({"margin": "on_top"}, {}),
}


@dataclass(frozen=True)
class Setup:
    """What all engines of a comparison have in common.

    Attributes:
        model: path, name, ``embedded``, or a name of ``bench.shapes``.
        profile: path of the retention profile; None for the engine's own choice.
        kv_bytes: KV memory of a rank; None: ``kv_tokens`` tokens of full KV.
        kv_tokens: see ``kv_bytes``.
        max_num_seqs: requests that run at once, at most.
        chunk_size: prompt tokens that a step of any engine takes, and that ours compresses at once.
        enforce_eager: no compilation, no CUDA graphs.
        options: further options of ours.
        step_tokens: prompt tokens that a step of any engine takes, instead of ``chunk_size``.
        prefix_caching: stock vLLM's prefix cache and our sessions. Off where prompts have nothing in common.
        tensor_parallel_size: ranks of every engine.

    """

    model: str
    profile: str | None
    kv_bytes: int | None
    kv_tokens: int
    max_num_seqs: int
    chunk_size: int
    enforce_eager: bool
    options: dict[str, Any] = field(default_factory=dict)
    step_tokens: int | None = None
    prefix_caching: bool = False
    tensor_parallel_size: int = 1

    def start(self, engine: Engine, max_model_len: int) -> EngineProcess:
        """The engine's process.

        Raises:
            TangramError: the model is a shape, and no profile of it is given.

        """
        path, options = model_options(self.model)
        options |= {
            "max_model_len": max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": (self.step_tokens or self.chunk_size) + self.max_num_seqs,
            "enforce_eager": self.enforce_eager,
            "enable_prefix_caching": self.prefix_caching,
            "disable_log_stats": True,
            "tensor_parallel_size": self.tensor_parallel_size,
        }
        if not self.enforce_eager:
            options["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(self.max_num_seqs)}
        if engine.retention is not None:
            options |= {"retention": engine.retention, "profile": self.profile, "chunk_size": self.chunk_size}
            options |= self.options | engine.options
            if options.get("page_group_size") == 0:
                options["page_group_size"] = kv_heads(self.model)
            if engine.retention < 1 and self.profile is None and self.model in shape_names():
                raise TangramError(
                    f"--profile: {self.model} has no weights to make a profile from; give one, such as that of "
                    f"`tangram bench profile FILE.npz {self.model} SCORER -o FILE`"
                )
        return EngineProcess(
            engine.key,
            path,
            ours=engine.retention is not None,
            options=options,
            kv_tokens=self.kv_tokens,
            kv_bytes=self.kv_bytes,
            environment=_QUICK_START | engine.environment,
        )


@dataclass(frozen=True)
class Started:
    """An engine that is ready.

    Attributes:
        kv_cache_bytes: bytes of a rank's pool.
        start_seconds: from the process to the first request: imports, weights, compilation, graphs.
        device: what it runs on.
        versions: of vLLM and torch.

    """

    kv_cache_bytes: int
    start_seconds: float
    device: str
    versions: str


def run_engines(
    setup: Setup,
    engines: Sequence[Engine],
    max_model_len: int,
    measure: Callable[[EngineProcess, Engine], T],
    done: Callable[[Engine, Started, T], None],
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Start the engines one after another, the memory of each gone before the next, and measure.

    Args:
        setup: what they have in common.
        engines: in their order.
        max_model_len: longest request, its new tokens included.
        measure: what is done with an engine.
        done: called with every engine's result as soon as it is there.
        progress: told what is going on.

    Raises:
        TangramError: an engine failed.

    """
    for engine in engines:
        progress(f"starting {engine.key}")
        start = time.perf_counter()
        with setup.start(engine, max_model_len) as process:
            bytes_, device, versions = process.call(describe)
            started = Started(bytes_, time.perf_counter() - start, device, versions)
            progress(f"measuring {engine.key}")
            result = measure(process, engine)
        done(engine, started, result)


def describe(stepper: EngineStepper) -> tuple[int, str, str]:
    """Run in the engine's process: KV bytes, device, versions."""
    import platform

    import torch

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {stepper.num_threads} thread(s)"
    return stepper.kv_cache_bytes, device, stepper.versions


def random_prompt(random: Random, num_tokens: int) -> list[int]:
    """A prompt that shares no prefix with others."""
    return random.choices(_VOCABULARY, k=num_tokens)


def run_alone(stepper: EngineStepper, prompt_tokens: int, output_tokens: int, count: int = 1) -> None:
    """Run in the engine's process: requests together until all are done, so that kernels are compiled."""
    random = Random(-1)
    for number in range(count):
        stepper.add_counted(f"warm-up {number}", random_prompt(random, prompt_tokens), output_tokens)
    while count:
        count -= len(stepper.advance().finished)
    stepper.abort_all()
