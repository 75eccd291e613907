# SPDX-License-Identifier: Apache-2.0
"""Which gate and retention profile an engine uses: those named, shipped, cached, or (a profile) made now."""

from __future__ import annotations

import hashlib
import json
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_tangram import __version__, paths, pilot
from vllm_tangram.budget import RetentionProfile
from vllm_tangram.compression import needs_gate
from vllm_tangram.compression.scorers.fastkvzip import FastKVzip
from vllm_tangram.compression.shipped import find_gate, known_gate
from vllm_tangram.config import DEFAULT_BLOCK_SIZE, TangramConfig
from vllm_tangram.embedded import embedded_model
from vllm_tangram.engine.setup import fingerprint_of, gate_digest
from vllm_tangram.errors import TangramError
from vllm_tangram.progress import progress_bars

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = init_logger("vllm.tangram")  # vLLM shows only what is logged below its own name

EMBEDDED = "embedded"
PILOT_SAMPLES = 50
_PILOT_TOKENS = 2048
_LAST_BREATH = 60.0  # seconds
_SHIPPED = Path(__file__).parent.parent / "profiles"
# vLLM options that decide which model is served, and how it computes: a profile is made with the same.
_MODEL_OPTIONS = (
    "revision",
    "code_revision",
    "hf_config_path",
    "config_format",
    "hf_token",
    "download_dir",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "trust_remote_code",
    "dtype",
    "hf_overrides",
    "quantization",
    "load_format",
    "seed",
)
# Of these a profile's engine only wants to be allowed to start where the served one is: its pool is stated in bytes.
_START_OPTIONS = ("gpu_memory_utilization",)


def model_path(name: str) -> str:
    """What vLLM is to load: the word ``embedded`` means the embedded model (``vllm_tangram.embedded``).

    Raises:
        TangramError: there is no such folder, or the embedded model cannot be made.

    """
    if name.startswith(("/", "./", "../")) and not Path(name).exists():
        raise TangramError(f"there is no model folder {name}")
    return str(embedded_model()) if name == EMBEDDED else name


def model_identity(model: str, vllm_options: dict[str, Any]) -> dict[str, Any]:
    """Fingerprint of a model that is not loaded yet; weights of the hub are fetched."""
    arguments = _engine_args(model, vllm_options)
    return fingerprint_of(arguments.create_model_config(), arguments.create_load_config())


def _engine_args(model: str, vllm_options: dict[str, Any]) -> EngineArgs:
    return EngineArgs(model=model, **_model_options(vllm_options))


def _model_options(vllm_options: dict[str, Any]) -> dict[str, Any]:
    return {name: vllm_options[name] for name in _MODEL_OPTIONS if vllm_options.get(name) is not None}


def resolve_scorer(config: TangramConfig, identity: dict[str, Any]) -> TangramConfig:
    """Options with the scorer chosen, if the user left it: that of the profile that was named, else Fast KVzip where
    the model has a gate, which keeps far more answers than any other (docs/quality.md), else the default.

    Args:
        config: our options.
        identity: fingerprint of the model.

    Raises:
        TangramError: the profile that was named cannot be read.

    """
    if "scorer" in config.model_fields_set:
        return config
    chosen: dict[str, str]
    if config.profile is not None:
        chosen = {"scorer": RetentionProfile.load(Path(config.profile)).scorer}
    elif (gate := known_gate(identity)) is not None:
        chosen = {"scorer": FastKVzip.name, "gate": str(gate)}
    else:
        logger.info(
            "Tangram: the model has no gate, so scorer %s; `tangram gate train MODEL` makes one, once, with which far "
            "more answers survive.",
            config.scorer,
        )
        return config
    return TangramConfig.parse({**config.model_dump(exclude_unset=True), **chosen})


def resolve_gate(config: TangramConfig, identity: dict[str, Any]) -> TangramConfig:
    """Options with the gate's path filled in, if the scorer needs a gate.

    Args:
        config: our options.
        identity: fingerprint of the model.

    Raises:
        TangramError: the gate does not belong to this model, or there is none.

    """
    if not needs_gate(config.scorer):
        return config
    return config.model_copy(update={"gate": str(find_gate(config.gate, identity).resolve())})


def resolve_profile(
    config: TangramConfig, model: str, vllm_options: dict[str, Any], identity: dict[str, Any] | None = None
) -> TangramConfig:
    """Options with the profile's path filled in, the profile checked against the model.

    Args:
        config: our options, the gate resolved.
        model: path or name of the model.
        vllm_options: vLLM's options.
        identity: ``model_identity``, where it is known already.

    Raises:
        TangramError: the profile does not belong to this model and scorer, or cannot be made or cached.

    """
    if config.profile is None and (config.budgets == "uniform" or config.retention == 1):
        return config
    identity = identity or model_identity(model, vllm_options)
    gate = gate_digest(config)
    if config.profile is not None:
        path = Path(config.profile)
        RetentionProfile.load(path).check(model=identity, scorer=config.scorer, gate=gate)
    else:
        path = _shipped(config, identity, gate) or _cached(config, identity, gate, model, vllm_options)
    return config.model_copy(update={"profile": str(path.resolve())})


def _shipped(config: TangramConfig, identity: dict[str, Any], gate: str | None) -> Path | None:
    for path in sorted(_SHIPPED.glob(f"*.{config.scorer}.safetensors")):
        profile = RetentionProfile.load(path)
        try:
            profile.check(model=identity, scorer=config.scorer, gate=gate)
        except TangramError:
            continue
        if _same_settings(profile, config):
            return path
    return None


def _same_settings(profile: RetentionProfile, config: TangramConfig) -> bool:
    return (profile.sinks, profile.window, profile.chunk_size) == (config.sinks, config.window, config.chunk_size)


def _cached(
    config: TangramConfig, identity: dict[str, Any], gate: str | None, model: str, vllm_options: dict[str, Any]
) -> Path:
    settings = [identity, config.sinks, config.window, config.chunk_size, *([] if gate is None else [gate])]
    key = json.dumps(settings, sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = paths.writable_cache_dir() / "profiles"
    path = folder / f"{Path(model).name}-{digest}.{config.scorer}.{__version__}.safetensors"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        logger.warning(
            "Tangram: no retention profile of %s for scorer %s yet; making one now from %d pilot samples. "
            "It is kept in %s.",
            model,
            config.scorer,
            PILOT_SAMPLES,
            path,
        )
        samples = pilot.pilot_samples(PILOT_SAMPLES, tokens=pilot_tokens(config))
        make_profile(config, model, vllm_options, samples, pilot.BUILT_IN).save(path)
    RetentionProfile.load(path).check(model=identity, scorer=config.scorer, gate=gate)
    return path


def pilot_tokens(config: TangramConfig) -> int:
    """Tokens of a pilot sample: a whole chunk, because what a head keeps depends on how many compete.

    (docs/quality.md, "Longer prompts": KeyDiff's ranking of heads in one chunk of 8192 tokens is another than in 2048.)
    """
    return max(config.chunk_size, _PILOT_TOKENS)


def make_profile(
    config: TangramConfig,
    model: str,
    vllm_options: dict[str, Any],
    samples: list[pilot.Sample],
    source: str,
    *,
    max_tokens: int | None = None,
) -> RetentionProfile:
    """Start an engine at retention 1, run the samples with a progress bar, and stop the engine.

    No other engine runs meanwhile, and it has ended when this returns: a model that fits once can be profiled. Beside
    the model it takes the KV of one sample and one chunk's scores of all layers.

    Args:
        config: names scorer, gate, sinks, window and chunk size.
        model: path or name.
        vllm_options: vLLM's options, of which those that decide what is computed are used.
        samples: pilot texts and their domains.
        source: where they come from, for the file.
        max_tokens: tokens of a sample that are used; None: ``pilot_tokens``.

    Raises:
        TangramError: a sample is too short; no engine was started.

    """
    from vllm_tangram.engine.llm import LLM
    from vllm_tangram.engine.profiling import pilot_prompts, profile_model

    served = _engine_args(model, vllm_options).create_model_config()
    max_tokens = max_tokens or pilot_tokens(config)
    prompts = pilot_prompts(samples, served, config, max_tokens)
    longest = min(max_tokens + 2, served.max_model_len)
    ours = config.model_dump(include={"scorer", "gate", "sinks", "window", "chunk_size"})
    others = set(active_children())
    llm = LLM(
        model,
        retention=1.0,
        page_group_size=1,
        max_num_seqs=1,
        max_num_batched_tokens=config.chunk_size + 1,
        max_model_len=longest,
        kv_cache_memory_bytes=_full_kv_bytes(served, longest, config.chunk_size),
        enforce_eager=True,
        **ours,
        **_model_options(vllm_options),
        **{name: vllm_options[name] for name in _START_OPTIONS if vllm_options.get(name) is not None},
    )
    try:
        with progress_bars() as start:
            advance = start("profiling", len(samples))
            domains = tuple(sample.domain for sample in samples)
            return profile_model(llm, prompts, domains=domains, source=source, advance=advance)
    finally:
        llm.llm_engine.engine_core.shutdown()
        for process in set(active_children()) - others:  # vLLM kills a slow one, and does not wait for that
            process.join(_LAST_BREATH)


def _full_kv_bytes(model: ModelConfig, num_tokens: int, chunk_size: int) -> int:
    """KV memory of one prompt at retention 1 and of a chunk's scratch pages, each rounded up to blocks."""
    num_layers, num_kv_heads = model.get_num_layers(ParallelConfig()), model.get_total_num_kv_heads()
    rounding = 4 * DEFAULT_BLOCK_SIZE
    heads_by_tokens = num_layers * num_kv_heads * (num_tokens + rounding) + num_kv_heads * (chunk_size + rounding)
    return heads_by_tokens * 2 * model.get_head_size() * model.dtype.itemsize
