# SPDX-License-Identifier: Apache-2.0
"""Making a retention profile: pilot samples run through the engine, all heads compete for one budget, offline."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_tangram.budget import PROFILE_RETENTIONS, RetentionProfile
from vllm_tangram.compression.competition import compete
from vllm_tangram.engine.setup import config_of, fingerprint_of, gate_digest
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_tangram.config import TangramConfig
    from vllm_tangram.engine.chunk import Chunk
    from vllm_tangram.engine.llm import LLM
    from vllm_tangram.pilot import Sample


class ScoreObserver:
    """Collects in the worker what each member would keep of every prompt that runs; a prompt is a sample.

    Chunks compete each for themselves, as they do when compression is on. Memory: one chunk's scores of all layers.
    """

    def __init__(self, vllm_config: VllmConfig, retentions: Sequence[float]) -> None:
        self.config = config_of(vllm_config)
        self.num_layers = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.retentions = list(retentions)
        # Chunk, by batch row and position -> scores of the layers so far.
        self._scores: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._kept: list[np.ndarray] = []  # per sample [R, L, H] tokens
        self._tokens: list[int] = []

    def observe(self, layer: int, chunk: Chunk, scores: torch.Tensor) -> None:
        """Take one layer's scores ``[H, T]`` of a chunk; the last layer closes the chunk."""
        key = (chunk.request, chunk.position)
        layers = self._scores.setdefault(key, [])
        assert len(layers) == layer, "layers run in order"
        layers.append(scores.clone())
        if len(layers) < self.num_layers:
            return
        kept = compete(
            torch.stack(self._scores.pop(key)),
            self.retentions,
            protect_head=chunk.protect_head(self.config),
            protect_tail=chunk.protect_tail(self.config),
        )
        if chunk.position == 0:
            self._kept.append(kept.cpu().numpy())
            self._tokens.append(chunk.num_tokens)
        else:  # the profiler runs one sample at a time, so this chunk continues the last one
            self._kept[-1] = self._kept[-1] + kept.cpu().numpy()
            self._tokens[-1] += chunk.num_tokens

    def kept_fractions(self) -> list[Any]:
        """``[S][R][L][H]`` nested lists of the fractions kept, one entry per sample."""
        return [(kept / tokens).tolist() for kept, tokens in zip(self._kept, self._tokens, strict=True)]


class ProfilingWorker:
    """The calls by which ``profile_model`` reaches the observer; a mix-in of our workers."""

    model_runner: Any
    vllm_config: VllmConfig

    def tangram_start_profile(self, retentions: list[float]) -> None:
        """Score every prompt from now on and let its tokens compete for each of ``retentions``."""
        self.model_runner.observer = ScoreObserver(self.vllm_config, retentions)

    def tangram_take_profile(self) -> list[Any]:
        """End the profile: kept fractions per sample, ``[S][R][L][H]`` nested lists."""
        observer, self.model_runner.observer = self.model_runner.observer, None
        assert observer is not None, "no profile was started"
        return observer.kept_fractions()


def pilot_prompts(
    samples: Sequence[Sample], model_config: ModelConfig, config: TangramConfig, max_tokens: int
) -> list[list[int]]:
    """Token ids of the samples, cut to ``max_tokens``; no engine is needed for that.

    Raises:
        TangramError: a sample is too short for anything to compete.

    """
    tokenizer = cached_tokenizer_from_config(model_config)
    limit = min(max_tokens, model_config.max_model_len - 2)
    prompts = []
    for number, sample in enumerate(samples, start=1):
        ids = tokenizer.encode(sample.text)[:limit]
        if len(ids) < 2 * (config.sinks + config.window):
            raise TangramError(
                f"sample {number} has {len(ids)} tokens; a pilot sample needs at least twice the protected ones "
                f"(--sinks + --window = {config.sinks + config.window})"
            )
        prompts.append(ids)
    return prompts


def profile_model(
    llm: LLM,
    prompts: Sequence[list[int]],
    *,
    domains: tuple[str, ...],
    source: str,
    advance: Callable[[], None] = lambda: None,
) -> RetentionProfile:
    """Run pilot samples through an engine of retention 1 and record what each member keeps.

    Args:
        llm: an engine whose options name the scorer, sinks, window and chunk size to profile.
        prompts: token ids of the samples (``pilot_prompts``).
        domains: of each sample.
        source: where the samples come from, for the file.
        advance: called after every sample (progress).

    """
    vllm_config = llm.llm_engine.vllm_config
    config = config_of(vllm_config)
    # A sample that began with the pages of another would be scored from there on only.
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, skip_reading_prefix_cache=True)
    llm.collective_rpc("tangram_start_profile", args=(list(PROFILE_RETENTIONS),))
    for prompt in prompts:
        llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        advance()
    (kept,) = llm.collective_rpc("tangram_take_profile")
    return RetentionProfile(
        retentions=np.array(PROFILE_RETENTIONS),
        kept=np.array(kept, np.float32),
        scorer=config.scorer,
        model=fingerprint_of(vllm_config.model_config, vllm_config.load_config),
        sinks=config.sinks,
        window=config.window,
        chunk_size=config.chunk_size,
        gate=gate_digest(config),
        domains=domains,
        info={
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "model_name": str(vllm_config.model_config.served_model_name or vllm_config.model_config.model),
            "samples": source,
            "tokens_per_sample": f"{min(map(len, prompts))} to {max(map(len, prompts))}",
            "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
            "vllm": vllm.__version__,
            "vllm-tangram": version("vllm-tangram"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
