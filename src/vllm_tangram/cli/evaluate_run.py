# SPDX-License-Identifier: Apache-2.0
"""What ``tangram eval`` asks, and of whom: cases, profiles, the dense reference, engines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError
from vllm_tangram.progress import progress_bars

if TYPE_CHECKING:
    from vllm_tangram.budget import RetentionProfile
    from vllm_tangram.compression.gate import Gate
    from vllm_tangram.eval.dense import DenseModel
    from vllm_tangram.eval.engine import ServedModel
    from vllm_tangram.eval.records import WorkFile
    from vllm_tangram.eval.settings import Setting
    from vllm_tangram.eval.tasks import Case


KVZIP = "kvzip"
"""Scorer of the dense reference alone: it reads the context twice (`gates.targets`)."""


@dataclass(frozen=True)
class Experiment:
    """What is asked, after which kinds of compression.

    Attributes:
        settings: how to compress.
        cases: contexts with questions, by length.
        config: options that all settings share.
        profiles: by scorer.
        gate: of the model, for scorers that need one.

    """

    settings: Sequence[Setting]
    cases: Mapping[int, Sequence[Case]]
    config: TangramConfig
    profiles: Mapping[str, RetentionProfile]
    gate: Gate | None


def default_scorers(model: Path, gate: Path | None) -> list[str]:
    """All scorers of the engine, but those with a gate only if there is one."""
    from transformers import AutoConfig

    from vllm_tangram.budget import model_fingerprint
    from vllm_tangram.compression import needs_gate, scorer_names
    from vllm_tangram.compression.shipped import known_gate

    gated = gate is not None
    if not gated and (model / "config.json").is_file():
        gated = known_gate(model_fingerprint(AutoConfig.from_pretrained(model).to_dict(), model)) is not None
    return [name for name in scorer_names() if gated or not needs_gate(name)]


def find_profile(
    scorer: str, gate: Gate | None, model: Path, dense: DenseModel, folder: Path | None
) -> RetentionProfile:
    """The profile in ``folder``, or else the one that an engine would use; ``gate`` is for scorers that need one."""
    from vllm_tangram.budget import RetentionProfile
    from vllm_tangram.compression import needs_gate

    if not needs_gate(scorer):
        gate = None
    if folder is None:
        from vllm_tangram.engine.resolve import resolve_profile

        config = TangramConfig.parse({"scorer": scorer, "gate": None if gate is None else gate.source})
        resolved = resolve_profile(config, str(model), {}).profile
        assert resolved is not None
        return RetentionProfile.load(resolved)
    found = []
    for path in sorted(folder.glob(f"*.{scorer}.safetensors")):
        profile = RetentionProfile.load(path)
        try:
            profile.check(model=dense.fingerprint, scorer=scorer, gate=None if gate is None else gate.digest())
        except TangramError:
            continue
        found.append(profile)
    if len(found) != 1:
        raise TangramError(
            f"--profile-dir: {folder} has {len(found)} profiles *.{scorer}.safetensors of this model, not one; "
            "leave the option out to use the shipped or cached one, or make one with `tangram profile`"
        )
    return found[0]


def digest(profile: RetentionProfile) -> str:
    return hashlib.sha256(profile.retentions.tobytes() + profile.kept.tobytes()).hexdigest()[:16]


def make_cases(
    task: str, dense: DenseModel, sizes: Sequence[int], samples: int, data: Path | None, seed: int
) -> dict[int, list[Case]]:
    """Length -> cases."""
    from vllm_tangram.eval.tasks import TASKS, Request, check_lengths

    groups = {}
    for size in sizes:
        groups[size] = list(TASKS[task].cases(Request(dense.tokenizer, size, samples, data, seed)))
        check_lengths(groups[size], dense.max_tokens)
    return groups


def served_config(
    config: TangramConfig,
    wanted: Sequence[Setting],
    groups: Mapping[int, Sequence[Case]],
    chunk_size: int | None,
    likelihood: bool,
) -> TangramConfig:
    """The engine's options: without a chunk size, that of the only length, so that contexts are compressed at once."""
    from vllm_tangram.eval.engine import check_served

    if likelihood:
        raise TangramError("--engine: this task measures likelihoods, which an engine does not tell; leave it out")
    if chunk_size is None:
        if len(groups) != 1:
            raise TangramError("--engine: give one of --lengths, or a --chunk-size that divides them all")
        (length,) = groups
        config = config.model_copy(update={"chunk_size": length})
    check_served(wanted, groups, config)
    return config


def ask_reference(dense: DenseModel, asked: Experiment, results: WorkFile, *, chunked: bool) -> None:
    """Ask the dense reference what is not answered yet."""
    from vllm_tangram.eval.run import Evaluation
    from vllm_tangram.gates.targets import kvzip_scores

    evaluation = Evaluation(
        dense,
        asked.settings,
        asked.profiles,
        config=asked.config,
        gate=asked.gate,
        oracles={KVZIP: kvzip_scores},
        chunked=chunked,
    )
    with progress_bars() as start:
        advance = start("contexts", sum(map(len, asked.cases.values())), len(results.done))
        for length, cases in asked.cases.items():
            for number in mixed(len(cases)):
                if (length, number, "") not in results.done:
                    results.add(length, number, evaluation.ask(cases[number], length, number))
                    advance()


def mixed(count: int) -> list[int]:
    """Cases in an order in which those asked so far are like all: tasks make them by depth, or as a file has them."""
    return Random(0).sample(range(count), count)


def ask_engines(model: ServedModel, asked: Experiment, results: WorkFile) -> None:
    """Ask one engine after the other what is not answered yet."""
    from vllm_tangram.eval.engine import serve_cases

    everything = [(length, number) for length, cases in asked.cases.items() for number in mixed(len(cases))]
    with progress_bars() as start:
        advance = start("contexts", len(everything) * len(asked.settings), len(results.done))
        for setting in asked.settings:
            left = [key for key in everything if (*key, setting.name) not in results.done]
            if not left:
                continue
            profile = asked.profiles.get(setting.scorer) if setting.budgets == "profile" else None
            served = serve_cases(model, setting, asked.cases, left, asked.config, profile, asked.gate)
            for length, number, answers in served:
                results.add(length, number, answers, setting.name)
                advance()
