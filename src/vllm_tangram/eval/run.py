# SPDX-License-Identifier: Apache-2.0
"""Asking every question after every kind of compression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from vllm_tangram.budget import EvictionSchedule, RetentionPlan, RetentionProfile
from vllm_tangram.compression import Scorer, get_scorer
from vllm_tangram.compression.gate import Gate
from vllm_tangram.config import DEFAULT_BLOCK_SIZE, TangramConfig
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.baselines import adakv_counts, dynamic_counts
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.eval.settings import FULL, REFERENCE, Setting
from vllm_tangram.eval.state import DenseChunk, DenseState
from vllm_tangram.eval.tasks import Case

_SERVED = ("profile", "uniform")  # budgets that engines have

Oracle = Callable[[DenseModel, Sequence[int]], Tensor]
"""Scores of a whole context that no engine could have while it reads it: tokens -> ``[L, H, T]`` float32."""


@dataclass(frozen=True)
class Answer:
    """One question asked after one kind of compression.

    Attributes:
        length: what the context was made to measure (`eval.tasks`).
        case: number of the context.
        question: what was asked for.
        setting: how the context was compressed.
        held: memory held by the context over that of full KV; whole pages, padding included, for what the engine has.
        kept: tokens that all heads keep of the context over all tokens.
        tokens: of the right answer.
        hits: how many of them are the most likely next token, given the right ones before.
        logprob: mean log-probability of the right answer's tokens.

    """

    length: int
    case: int
    question: str
    setting: Setting
    held: float
    kept: float
    tokens: int
    hits: int
    logprob: float

    @property
    def correct(self) -> bool:
        """Would greedy decoding give the right answer?"""
        return self.hits == self.tokens


def ask_in_prompt(cases: Iterable[Case]) -> Iterator[Case]:
    """Make the question the end of the context: one case per question."""
    for case in cases:
        for question in case.questions:
            yield Case(case.context + question.prompt, (replace(question, prompt=()),))


class Evaluation:
    """Asks all questions after all kinds of compression.

    Args:
        model: the reference.
        wanted: how to compress.
        profiles: by scorer; "profile" needs one, and the baselines share out the memory of its plan.
        config: options that all settings share; its chunk size counts only where ``chunked``.
        chunked: compress prompts chunk by chunk; else at once, whatever their length, which is much quicker.
        gate: of the model, for scorers that need one.
        oracles: by name, scorers that look at the whole context, also at what comes after a chunk.

    """

    def __init__(
        self,
        model: DenseModel,
        wanted: Sequence[Setting],
        profiles: Mapping[str, RetentionProfile],
        *,
        config: TangramConfig,
        chunked: bool = False,
        gate: Gate | None = None,
        oracles: Mapping[str, Oracle] | None = None,
    ) -> None:
        self.model = model
        self.wanted = wanted
        self.profiles = profiles
        self.config = config
        self.chunked = chunked
        names = dict.fromkeys(setting.scorer for setting in wanted if setting != REFERENCE)
        self._oracles = {name: oracle for name, oracle in (oracles or {}).items() if name in names}
        placed = None if gate is None else gate.placed(model.device, model.dtype)
        self._scorers: dict[str, Scorer] = {
            name: get_scorer(name, placed) for name in names if name not in self._oracles
        }
        self._plan = lru_cache(maxsize=1024)(self._build_plan)

    def ask(self, case: Case, length: int, number: int) -> list[Answer]:
        """The answers to all questions about a context, after every setting.

        Args:
            case: the context with its questions.
            length: what the answers are filed under.
            number: of the context, for the same.

        """
        states = self._compressed(case.context)
        questions = [(question.prompt, question.answer) for question in case.questions]
        count = self.model.states_per_pass(len(case.context), questions)
        answers = []
        while batch := list(islice(states, count)):
            kept = torch.stack([state.retained.float().mean() for *_, state in batch]).tolist()
            results = self.model.score_answers([state for *_, state in batch], questions)
            for question, (logprobs, hits) in zip(case.questions, results, strict=True):
                figures = zip(batch, kept, hits.sum(-1).tolist(), logprobs.mean(-1).tolist(), strict=True)
                answers += [
                    Answer(
                        length=length,
                        case=number,
                        question=question.label,
                        setting=setting,
                        held=share if held is None else held,
                        kept=share,
                        tokens=len(question.answer),
                        hits=hit,
                        logprob=logprob,
                    )
                    for (setting, held, _), share, hit, logprob in figures
                ]
        return answers

    def _compressed(self, ids: Sequence[int]) -> Iterator[tuple[Setting, float | None, DenseState]]:
        """Every setting, the memory it holds (None: as much as it keeps) and what it leaves of a prompt."""
        config, in_chunks = self.config, self.chunked and len(ids) > self.config.chunk_size
        known = {name: oracle(self.model, ids) for name, oracle in self._oracles.items()}
        scorers = [] if in_chunks else list(self._scorers.values())
        read = self.model.read(ids, scorers, sinks=config.sinks, window=config.window, after=self.model.empty())
        whole = DenseChunk(read.state, 0, {**read.scores, **known})
        for setting in self.wanted:
            if setting == REFERENCE:
                yield setting, 1.0, whole.state
                continue
            plan = self._plan(self._planned(setting), -(-len(ids) // DEFAULT_BLOCK_SIZE))
            schedule = plan.schedule(setting.retention)
            if in_chunks:
                state = self._prefill(ids, setting, plan, schedule, known)
            else:
                state = self._compress(whole, setting, plan, schedule, len(ids))
            yield setting, plan.held_fraction(len(ids)) if setting.budgets in _SERVED else None, state

    def _prefill(
        self,
        ids: Sequence[int],
        setting: Setting,
        plan: RetentionPlan,
        schedule: EvictionSchedule,
        known: Mapping[str, Tensor],
    ) -> DenseState:
        """Read and compress chunk by chunk."""
        config, state = plan.config, self.model.empty()
        scorers = [self._scorers[setting.scorer]] if setting.scorer in self._scorers else []
        for start in range(0, len(ids), config.chunk_size):
            own = ids[start : start + config.chunk_size]
            read = self.model.read(own, scorers, sinks=config.sinks, window=config.window, after=state)
            oracle = {name: scores[..., start : start + len(own)] for name, scores in known.items()}
            chunk = DenseChunk(read.state, start, {**read.scores, **oracle})
            state = self._compress(chunk, setting, plan, schedule, len(ids))
        return state

    def _compress(
        self, chunk: DenseChunk, setting: Setting, plan: RetentionPlan, schedule: EvictionSchedule, prompt_len: int
    ) -> DenseState:
        """Keep what the setting leaves to each head; the baselines share out what the plan holds in all."""
        if setting.budgets in _SERVED:
            return chunk.compress(setting.scorer, plan, schedule, prompt_len)
        end, sinks, window = chunk.state.num_tokens, self.config.sinks, self.config.window
        static = schedule.lengths(end, prompt_len) - schedule.lengths(chunk.start, prompt_len)
        total = int(static[plan.groups.group].sum())
        share_out = dynamic_counts if setting.budgets == "dynamic" else adakv_counts
        scores = chunk.scores[setting.scorer]
        protect_head, protect_tail = max(0, sinks - chunk.start), min(window, scores.shape[-1])
        counts = share_out(scores, total, protect_head=protect_head, protect_tail=protect_tail)
        return chunk.keep(setting.scorer, counts, sinks=sinks, window=window)

    def _planned(self, setting: Setting) -> Setting:
        """The setting with the same plan, one for all that share it."""
        profiled = setting.budgets != "uniform" and (setting.budgets == "profile" or setting.scorer in self.profiles)
        return replace(setting, budgets="profile") if profiled else replace(setting, scorer=FULL, budgets="uniform")

    def _build_plan(self, setting: Setting, blocks: int) -> RetentionPlan:
        config, tokens = self.config, blocks * DEFAULT_BLOCK_SIZE
        if not self.chunked:
            config = config.model_copy(update={"chunk_size": tokens})
        profile = self.profiles.get(setting.scorer)
        return plan_of(setting, config, profile, (self.model.num_layers, self.model.num_kv_heads), tokens)


def plan_of(
    setting: Setting, config: TangramConfig, profile: RetentionProfile | None, shape: tuple[int, int], tokens: int
) -> RetentionPlan:
    """The plan of an engine; of the baselines, that whose memory they share out: without a profile a uniform one.

    Args:
        setting: how to compress.
        config: options that all settings share.
        profile: of the setting's scorer; None without.
        shape: layers and KV heads.
        tokens: longest prompt.

    Raises:
        TangramError: the profile is missing, or options do not fit each other.

    """
    if profile is None and setting.budgets == "profile":
        raise TangramError(f"budgets 'profile' of scorer {setting.scorer!r} need a retention profile")
    profile = None if setting.budgets == "uniform" else profile
    return RetentionPlan(
        setting.config(config).model_copy(update={"budgets": "uniform" if profile is None else "profile"}),
        profile,
        num_layers=shape[0],
        num_kv_heads=shape[1],
        block_size=DEFAULT_BLOCK_SIZE,
        max_tokens=tokens,
    )
