# SPDX-License-Identifier: Apache-2.0
"""Which retention profile an engine uses: the one named, the one shipped, the one cached, or one made now."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_tangram import __version__, paths, pilot
from vllm_tangram.budget import RetentionProfile
from vllm_tangram.config import TangramConfig
from vllm_tangram.engine.setup import fingerprint_of
from vllm_tangram.errors import TangramError

logger = init_logger(__name__)

PILOT_SAMPLES = 50
PILOT_TOKENS = 2048
_SHIPPED = Path(__file__).parent.parent / "profiles"
# vLLM options that decide which model is served, and how it computes: a profile is made with the same.
_MODEL_OPTIONS = (
    "revision",
    "tokenizer",
    "trust_remote_code",
    "dtype",
    "hf_overrides",
    "quantization",
    "load_format",
    "seed",
)


def model_identity(model: str, vllm_options: dict[str, Any]) -> dict[str, Any]:
    """Fingerprint of a model that is not loaded yet."""
    options = {name: vllm_options[name] for name in _MODEL_OPTIONS if vllm_options.get(name) is not None}
    return fingerprint_of(EngineArgs(model=model, **options).create_model_config())


def resolve_profile(config: TangramConfig, model: str, vllm_options: dict[str, Any]) -> TangramConfig:
    """Options with the profile's path filled in, the profile checked against the model.

    Args:
        config: our options.
        model: path or name of the model.
        vllm_options: vLLM's options.

    Raises:
        TangramError: the profile does not belong to this model and scorer, or cannot be made or cached.

    """
    if config.profile is None and (config.budgets == "uniform" or config.retention == 1):
        return config
    identity = model_identity(model, vllm_options)
    if config.profile is not None:
        path = Path(config.profile)
        RetentionProfile.load(path).check(model=identity, scorer=config.scorer)
    else:
        path = _shipped(config, identity) or _cached(config, identity, model, vllm_options)
    return config.model_copy(update={"profile": str(path.resolve())})


def _shipped(config: TangramConfig, identity: dict[str, Any]) -> Path | None:
    for path in sorted(_SHIPPED.glob(f"*.{config.scorer}.safetensors")):
        profile = RetentionProfile.load(path)
        try:
            profile.check(model=identity, scorer=config.scorer)
        except TangramError:
            continue
        if _same_settings(profile, config):
            return path
    return None


def _same_settings(profile: RetentionProfile, config: TangramConfig) -> bool:
    return (profile.sinks, profile.window, profile.chunk_size) == (config.sinks, config.window, config.chunk_size)


def _cached(config: TangramConfig, identity: dict[str, Any], model: str, vllm_options: dict[str, Any]) -> Path:
    key = json.dumps([identity, config.sinks, config.window, config.chunk_size], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = paths.writable_cache_dir() / "profiles"
    path = folder / f"{Path(model).name}-{digest}.{config.scorer}.{__version__}.safetensors"
    if not path.exists():
        logger.warning(
            "Tangram: no retention profile of %s for scorer %s yet; making one now from %d pilot samples. "
            "It is kept in %s.",
            model,
            config.scorer,
            PILOT_SAMPLES,
            path,
        )
        make_profile(config, model, vllm_options, pilot.pilot_texts(PILOT_SAMPLES), "built-in pilot texts").save(path)
    RetentionProfile.load(path).check(model=identity, scorer=config.scorer)
    return path


def make_profile(
    config: TangramConfig,
    model: str,
    vllm_options: dict[str, Any],
    texts: list[str],
    source: str,
    *,
    max_tokens: int = PILOT_TOKENS,
) -> RetentionProfile:
    """Start an engine at retention 1, run the samples with a progress bar, and stop the engine.

    Args:
        config: names scorer, sinks, window and chunk size.
        model: path or name.
        vllm_options: vLLM's options, of which those that decide what is computed are used.
        texts: pilot samples.
        source: where they come from, for the file.
        max_tokens: tokens of a sample that are used.

    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vllm_tangram.engine.llm import LLM
    from vllm_tangram.engine.profiling import profile_model

    options = {name: vllm_options[name] for name in _MODEL_OPTIONS if vllm_options.get(name) is not None}
    ours = config.model_dump(include={"scorer", "sinks", "window", "chunk_size"})
    llm = LLM(
        model,
        retention=1.0,
        page_group_size=1,
        max_num_seqs=1,
        max_model_len=max_tokens + 2,
        kv_cache_memory_bytes=vllm_options.get("kv_cache_memory_bytes") or 1 << 30,
        enforce_eager=True,
        **ours,
        **options,
    )
    try:
        columns = (TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("profiling", total=len(texts))
            return profile_model(
                llm,
                texts,
                max_tokens=max_tokens,
                source=source,
                advance=lambda: progress.advance(task),
            )
    finally:
        llm.llm_engine.engine_core.shutdown()
