# SPDX-License-Identifier: Apache-2.0
"""Which scores a chunk gets, and that the scorer and a document's scores choose together."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.documents import random_scores
from torch import Tensor

from vllm_tangram.compression import select_tokens
from vllm_tangram.compression.known import KnownPrefix, reordered

CHUNK = 4
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def scores(prompt: list[int], documents: list[list[int]], start: int, end: int) -> tuple[int, Tensor] | None:
    """From the definition: (document, its scores of the chunk) of the first document that reaches farthest."""
    found = None
    for number, ids in enumerate(documents):
        reach = min(len(ids), end)
        if prompt[:reach] == ids[:reach] and reach > start and (found is None or reach > start + found[1].shape[-1]):
            found = number, random_scores(ids, seed=number).scores[..., start:reach]
    return found


@given(prompt=TOKENS, documents=st.lists(TOKENS, min_size=1, max_size=3), after=TOKENS)
def test_scores_of_a_chunk_depend_on_nothing_after_it(
    prompt: list[int], documents: list[list[int]], after: list[int]
) -> None:
    known = [random_scores(ids, seed=number) for number, ids in enumerate(documents)]
    prefix = KnownPrefix.of(prompt, known)
    for start in range(0, len(prompt), CHUNK):
        end = min(start + CHUNK, len(prompt))
        expected = scores(prompt, documents, start, end)
        for whole in (prefix, KnownPrefix.of(prompt[:end], known), KnownPrefix.of(prompt[:end] + after, known)):
            got = None if whole is None else whole.scores(start, end)
            assert (got is None) == (expected is None)
            if got is not None and expected is not None:
                assert torch.equal(got, expected[1])


def test_one_other_token_and_the_scores_are_not_those_of_the_prompt() -> None:
    document = list(range(10))
    known = [random_scores(document)]
    assert KnownPrefix.of([9, *document[1:]], known) is None
    prefix = KnownPrefix.of([*document[:6], 99, *document[7:]], known)
    assert prefix is not None
    found = [prefix.scores(start, start + CHUNK) for start in (0, 4, 8)]
    assert [None if part is None else part.shape[-1] for part in found] == [4, None, None]
    prefix = KnownPrefix.of([*document, 99, 98, 97], known)
    assert prefix is not None
    found = [prefix.scores(start, start + CHUNK) for start in (0, 4, 8, 12)]
    assert [None if part is None else part.shape[-1] for part in found] == [4, 4, 2, None]


def best(values: list[float], count: int, tokens: range) -> set[int]:
    """Of equals the later."""
    return set(sorted(tokens, key=lambda token: (values[token], token))[len(tokens) - count :])


@given(data=st.data())
def test_the_scorer_decides_how_many_and_the_document_which(data: st.DataObject) -> None:
    levels = st.integers(-2, 2).map(float)  # few, so that there are equals
    own = data.draw(st.lists(levels, min_size=1, max_size=12))
    known = data.draw(st.lists(levels, min_size=1, max_size=len(own)))
    head = data.draw(st.integers(0, len(own)))
    tail = data.draw(st.integers(0, len(own) - head))
    keep = data.draw(st.integers(head + tail, len(own)))

    def selected(scores: Tensor) -> set[int]:
        return set(select_tokens(scores, [keep], protect_head=head, protect_tail=tail).tolist())

    protected = set(range(head)) | set(range(len(own) - tail, len(own)))
    plain = selected(torch.tensor([own]))
    open_to_choice = range(head, max(head, min(len(known), len(own) - tail)))
    count = len(plain & set(open_to_choice))
    expected = plain - set(open_to_choice) | protected | best(known, count, open_to_choice)
    got = reordered(torch.tensor([own]), torch.tensor([known]), protect_head=head, protect_tail=tail)
    assert selected(got) == expected
