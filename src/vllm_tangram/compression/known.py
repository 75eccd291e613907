# SPDX-License-Identifier: Apache-2.0
"""Which chunks of a prompt have scores that were computed beforehand, and how these choose tokens.

::

    document          |==================================|
    prompt            |==================================|- question -|        the document, then something else
    chunks            |           |           |           |           |
                       its scores  its scores  both        the scorer

A chunk within the document is selected by the document's scores alone. In the chunk that the document ends in, the
engine's scorer decides how many tokens of the document each head keeps, and the document's scores which: the two need
no common scale.

What a chunk keeps may depend on nothing after its end, or conversations that share it could not share its pages. So
for each chunk it is asked anew whether the prompt, up to the chunk's end, is as the document as far as that goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm_tangram.compression.document import DocumentScores


@dataclass(frozen=True)
class KnownPrefix:
    """What a prompt has in common with documents.

    Attributes:
        common: documents that begin with the prompt's first token, in the user's order, and how many first tokens are
            the same.

    """

    common: tuple[tuple[DocumentScores, int], ...]

    @classmethod
    def of(cls, prompt: Sequence[int], documents: Iterable[DocumentScores]) -> KnownPrefix | None:
        """Compare a prompt with documents; None if it begins with none of them."""
        common = [(document, _common(prompt, document)) for document in documents]
        common = [(document, count) for document, count in common if count]
        return cls(tuple(common)) if common else None

    def scores(self, start: int, end: int) -> Tensor | None:
        """Scores of the first tokens of a chunk ``[start, end)``.

        Of several documents the one that reaches farthest into the chunk is taken, of equals the first.

        Returns:
            ``[L, H, n]`` float16, ``1 <= n <= end - start``: all tokens, or those before the document's end; None if
            the prompt up to ``end`` is not that of a document.

        """
        best, reached = None, start
        for document, count in self.common:
            reach = min(document.num_tokens, end)
            if count >= reach > reached:
                best, reached = document, reach
        return None if best is None else best.scores[..., start:reached]


def _common(prompt: Sequence[int], document: DocumentScores) -> int:
    """How many first tokens are the same."""
    first = np.asarray(prompt[: document.num_tokens], np.int64)
    different = np.flatnonzero(first != document.ids[: len(first)])
    return int(different[0]) if len(different) else len(first)


def reordered(scores: Tensor, known: Tensor, *, protect_head: int, protect_tail: int) -> Tensor:
    """Exchange the ranks of a chunk's first tokens among them, so that their order is another.

    Whatever number of best tokens is then selected, as many of the first ones are among them as before. Protected
    tokens, which are selected anyway, keep their ranks. Of equal scores the later token is better.

    Args:
        scores: ``[H, T]`` of the whole chunk, finite.
        known: ``[H, n]``, ``n <= T``, whose order the first ``n`` tokens get.
        protect_head: first tokens of the chunk that are protected.
        protect_tail: last tokens of the chunk that are protected.

    Returns:
        ``[H, T]`` float32, the numbers from 0 to ``T - 1`` in each row: all different, so that equal scores do not
        undo the new order.

    """
    ranks = scores.argsort(dim=-1, stable=True).argsort(dim=-1).float()
    own = slice(protect_head, min(known.shape[-1], scores.shape[-1] - protect_tail))
    ascending = ranks[:, own].sort(dim=-1).values
    ranks[:, own] = ascending.scatter(-1, known[:, own].argsort(dim=-1, stable=True), ascending)
    return ranks
