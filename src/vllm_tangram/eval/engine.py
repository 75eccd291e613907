# SPDX-License-Identifier: Apache-2.0
"""The same questions through the real engine: greedy decoding, with pages, schedules and sessions as they are served.

In an engine a question is part of the prompt. It is asked after the compression all the same if the context ends where
a chunk ends: the chunks of the context know nothing of what follows, and of a last chunk that is short enough nothing
is evicted. So contexts must be whole chunks (those of tasks with exact lengths are, with the right ``--chunk-size``),
and questions shorter than the window and one block. What heads hold is then what the dense reference computes for the
same chunks, and answers differ by rounding alone. Questions about one context share its compressed pages (sessions).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tangram.bench.process import EngineProcess
from vllm_tangram.compression import needs_gate
from vllm_tangram.config import DEFAULT_BLOCK_SIZE, TangramConfig
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.run import Answer, plan_of
from vllm_tangram.eval.settings import REFERENCE, Setting
from vllm_tangram.eval.tasks import Case

if TYPE_CHECKING:
    from vllm_tangram.budget import RetentionProfile
    from vllm_tangram.compression.gate import Gate
    from vllm_tangram.engine.stepper import EngineStepper

_CONTEXTS = 2  # whose full KV the pool can hold: one that runs, one whose pages are still there


@dataclass(frozen=True)
class ServedModel:
    """What is asked.

    Attributes:
        path: the checkpoint folder.
        num_layers: L.
        num_kv_heads: H.

    """

    path: Path
    num_layers: int
    num_kv_heads: int


def check_served(settings: Sequence[Setting], groups: Mapping[int, Sequence[Case]], config: TangramConfig) -> None:
    """Refuse what an engine cannot do, or would do otherwise than asked.

    Args:
        settings: how to compress.
        groups: length -> cases.
        config: options that all settings share; its chunk size is the engine's.

    Raises:
        TangramError: budgets that no engine has, a context that does not end with a chunk, or a long question.

    """
    for setting in settings:
        if setting.budgets not in ("profile", "uniform"):
            raise TangramError(f"--budgets: {setting.budgets!r} is no budget of the engine; leave it out with --engine")
    chunk, most = config.chunk_size, _kept_in_full(config.window)
    for case in (case for cases in groups.values() for case in cases):
        if len(case.context) % chunk:
            raise TangramError(
                f"--engine: a context of {len(case.context)} tokens is not a whole number of chunks of {chunk}, so its "
                "end would be compressed together with the question; give a --chunk-size that divides --lengths, and "
                "a task whose contexts have exactly that length"
            )
        for question in case.questions:
            if len(question.prompt) > most:
                raise TangramError(
                    f"--engine: the question {question.label!r} has {len(question.prompt)} tokens; more than {most} "
                    "are compressed too"
                )


def _kept_in_full(window: int) -> int:
    """Longest last chunk of which nothing is evicted: whole blocks of the window, and a block that is not whole."""
    return (-(-window // DEFAULT_BLOCK_SIZE) + 1) * DEFAULT_BLOCK_SIZE - 1


def serve_cases(
    model: ServedModel,
    setting: Setting,
    groups: Mapping[int, Sequence[Case]],
    asked: Sequence[tuple[int, int]],
    config: TangramConfig,
    profile: RetentionProfile | None,
    gate: Gate | None = None,
) -> Iterator[tuple[int, int, list[Answer]]]:
    """Start an engine and ask it the questions of some contexts, one after the other.

    Args:
        model: what to serve.
        setting: how to compress; `REFERENCE` is stock vLLM.
        groups: length -> cases.
        asked: which of them: (length, number).
        config: options that all settings share.
        profile: retention profile of the setting's scorer, saved in a file; None without.
        gate: for scorers that need one, saved in a file.

    Yields:
        Length, number and answers of a context. An answer's hits are the tokens before the first wrong one, and
        engines tell no log-probability of what they did not generate: NaN.

    Raises:
        TangramError: the engine did not start, or failed.

    """
    cases = {(length, number): groups[length][number] for length, number in asked}
    longest = max(
        len(case.context) + len(question.prompt) + len(question.answer)
        for case in cases.values()
        for question in case.questions
    )
    ours = setting != REFERENCE
    options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": 1, "enforce_eager": True}
    if ours:
        names = {"retention", "alpha", "margin", "page_group_size", "chunk_size", "sinks", "window"}
        options |= setting.config(config).model_dump(include=names)
        options |= {"scorer": setting.scorer, "budgets": setting.budgets}
        options["gate"] = gate.source if gate is not None and needs_gate(setting.scorer) else None
        options["profile"] = None if profile is None else profile.source
    room = longest + config.chunk_size + 4 * DEFAULT_BLOCK_SIZE  # and a chunk's scratch pages
    name = setting.name if ours else "stock vLLM"
    with EngineProcess(name, str(model.path), ours=ours, options=options, kv_tokens=_CONTEXTS * room) as process:
        for (length, number), case in cases.items():
            held, kept = _memory(model, setting, len(case.context), config, profile)
            answers = []
            for index, question in enumerate(case.questions):
                prompt = [*case.context, *question.prompt]
                given = process.call(generated, f"{length}/{number}/{index}", prompt, len(question.answer))
                hits = next(
                    (i for i, pair in enumerate(zip(given, question.answer, strict=True)) if pair[0] != pair[1]), None
                )
                answers.append(
                    Answer(
                        length=length,
                        case=number,
                        question=question.label,
                        setting=setting,
                        held=held,
                        kept=kept,
                        tokens=len(question.answer),
                        hits=len(question.answer) if hits is None else hits,
                        logprob=math.nan,
                    )
                )
            yield length, number, answers


def generated(stepper: EngineStepper, name: str, prompt: Sequence[int], count: int) -> list[int]:
    """Run in the engine's process: the ``count`` next tokens by greedy decoding, end of text or not."""
    stepper.add_counted(name, prompt, count)
    tokens: list[int] = []
    while len(tokens) < count:
        for new in stepper.advance().token_ids.values():
            tokens += new
    stepper.abort_all()
    return tokens


def _memory(
    model: ServedModel, setting: Setting, tokens: int, config: TangramConfig, profile: RetentionProfile | None
) -> tuple[float, float]:
    """Pages and tokens that a context holds, over those of full KV."""
    if setting == REFERENCE:
        return 1.0, 1.0
    plan = plan_of(setting, config, profile, (model.num_layers, model.num_kv_heads), tokens)
    lengths = plan.schedule(setting.retention).lengths(tokens, tokens)
    return plan.held_fraction(tokens), float(lengths[plan.groups.group].mean() / tokens)
