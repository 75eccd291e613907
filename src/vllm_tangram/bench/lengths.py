# SPDX-License-Identifier: Apache-2.0
"""Does what a head keeps depend on the length of the prompt, or on where in it a chunk stands?

A profile knows one share per head and retention. It is measured on the first chunk of some length, and served to
prompts of any length. Here the same texts are looked at in many pieces: their first 512 tokens, their first 1024, and
so on, each as one chunk, and every chunk of the whole. Full KV makes a token's hidden state independent of what
follows, so one pass over a text serves all of its pieces; scorers see a piece as they see a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_tangram.budget import PROFILE_RETENTIONS, RetentionProfile
from vllm_tangram.budget.stability import clipped, held_fractions, rank_correlation, wanted_fractions
from vllm_tangram.compression import ChunkContext, Scorer
from vllm_tangram.compression.base import Need
from vllm_tangram.compression.competition import compete
from vllm_tangram.config import DEFAULT_BLOCK_SIZE, TangramConfig
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.pilot import Sample


@dataclass(frozen=True)
class Piece:
    """Tokens ``start`` to ``stop`` of a text, which compete as one chunk."""

    start: int
    stop: int


@dataclass(frozen=True)
class LengthEffect:
    """A piece beside the reference, which is the first ``chunk_size`` tokens of the same texts.

    Attributes:
        piece: which.
        rank_correlation: Spearman's, of what the members keep of both, means over the texts.
        moved: share of all kept tokens that another member keeps: half the sum of the differences of these means.
        clipped: share of what members want of the piece for which budgets of the reference have no room.
        clipped_own: the same with budgets of the piece's own, the most that budgets by length could gain.

    """

    piece: Piece
    rank_correlation: float
    moved: float
    clipped: float
    clipped_own: float


@dataclass(frozen=True, eq=False)
class _PieceScorer:
    """A scorer that sees a piece of what it is shown."""

    inner: Scorer
    piece: Piece

    @property
    def name(self) -> str:
        return f"{self.inner.name} {self.piece.start} {self.piece.stop}"

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs

    def score(self, query: Tensor, key: Tensor, value: Tensor, context: ChunkContext) -> Tensor:
        own = slice(self.piece.start, self.piece.stop)
        hidden = None if context.hidden is None else context.hidden[own]
        seen = replace(context, start=context.start + self.piece.start, hidden=hidden)
        return self.inner.score(query[own], key[own], value[own], seen)


def pieces_of(lengths: Sequence[int], chunk_size: int) -> list[Piece]:
    """The reference, the beginnings of each length, and the chunks of the longest one.

    Raises:
        TangramError: a length is shorter than 256 tokens, or the longest is no multiple of the chunk size.

    """
    if min(lengths) < 256 or max(lengths) % chunk_size:
        raise TangramError(
            f"--lengths {','.join(map(str, lengths))}: give lengths from 256 on, the longest a multiple of "
            f"--chunk-size ({chunk_size})"
        )
    beginnings = [Piece(0, length) for length in sorted(lengths)]
    chunks = [Piece(start, start + chunk_size) for start in range(0, max(lengths), chunk_size)]
    return list(dict.fromkeys([chunks[0], *beginnings, *chunks]))


def measure_lengths(
    model: DenseModel,
    scorers: Sequence[Scorer],
    samples: Sequence[Sample],
    pieces: Sequence[Piece],
    config: TangramConfig,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, tuple[list[LengthEffect], float]]:
    """Compare all pieces with the first.

    Args:
        model: computes with full KV.
        scorers: how to score.
        samples: texts of several domains, each at least as long as the last token of the pieces.
        pieces: what to compare; the first is the reference.
        config: retention, alpha, margin, groups, sinks and window of the budgets.
        advance: called after every text (progress).

    Returns:
        By scorer's name: one entry per piece, the reference included; and for scale the rank correlation, at the
        reference, between the means of one half of the texts and those of the other (every second text).

    Raises:
        TangramError: a text is too short, or the model is not made for that length.

    """
    longest = max(piece.stop for piece in pieces)
    if model.max_tokens is not None and longest > model.max_tokens:
        raise TangramError(f"--lengths: {longest} tokens are more than the {model.max_tokens} the model was made for")
    views = [_PieceScorer(scorer, piece) for scorer in scorers for piece in pieces]
    shown = cast("list[Scorer]", views)  # whose name is not the class's but their own
    kept: dict[str, list[NDArray[np.float64]]] = {view.name: [] for view in views}
    for number, sample in enumerate(samples, start=1):
        ids = model.tokenizer.encode(sample.text)[:longest]
        if len(ids) < longest:
            raise TangramError(f"text {number} has {len(ids)} tokens, {longest} are needed")
        read = model.read(ids, shown, sinks=config.sinks, window=config.window, after=model.empty())
        for view in views:
            tokens = compete(
                read.scores[view.name],
                PROFILE_RETENTIONS,
                protect_head=max(0, config.sinks - view.piece.start),
                protect_tail=config.window,
            )
            kept[view.name].append(tokens.cpu().numpy() / (view.piece.stop - view.piece.start))
        advance()

    def profile(scorer: Scorer, piece: Piece) -> RetentionProfile:
        return RetentionProfile(
            retentions=np.array(PROFILE_RETENTIONS),
            kept=np.stack(kept[_PieceScorer(scorer, piece).name]).astype(np.float32),
            scorer=scorer.name,
            model=model.fingerprint,
            sinks=config.sinks,
            window=config.window,
            chunk_size=pieces[0].stop,
            domains=tuple(sample.domain for sample in samples),
        )

    found = {}
    for scorer in scorers:
        profiles = [profile(scorer, piece) for piece in pieces]
        effects = [_effect(piece, own, profiles[0], config) for piece, own in zip(pieces, profiles, strict=True)]
        first = wanted_fractions(profiles[0], config.retention)
        found[scorer.name] = effects, rank_correlation(first[::2].mean(axis=0), first[1::2].mean(axis=0))
    return found


def _effect(piece: Piece, own: RetentionProfile, reference: RetentionProfile, config: TangramConfig) -> LengthEffect:
    # A beginning that is longer than a chunk of the reference competes as one chunk all the same.
    chunk_size = reference.chunk_size if piece.start else max(reference.chunk_size, piece.stop)
    served = config.model_copy(update={"chunk_size": chunk_size})
    held, held_own = (
        held_fractions(profile, served, DEFAULT_BLOCK_SIZE, (piece.start, piece.stop)) for profile in (reference, own)
    )
    wanted = wanted_fractions(own, config.retention)
    mean, mean_reference = wanted.mean(axis=0), wanted_fractions(reference, config.retention).mean(axis=0)
    return LengthEffect(
        piece=piece,
        rank_correlation=rank_correlation(mean, mean_reference),
        moved=float(np.abs(mean - mean_reference).sum() / (mean + mean_reference).sum()),
        clipped=clipped(wanted, held),
        clipped_own=clipped(wanted, held_own),
    )
