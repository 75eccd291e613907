# SPDX-License-Identifier: Apache-2.0
"""Codes that are told once in a long text."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

from vllm_tangram.errors import TangramError
from vllm_tangram.eval.tasks.base import Case, Question, Request

KEYS = 4
PLACES, CODES = 2, 3

# fmt: off
_PLACES = (
    "Athens", "Bergen", "Bogota", "Boston", "Bremen", "Cairo", "Dakar", "Delhi", "Dublin", "Geneva", "Hanoi", "Havana",
    "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Malta", "Munich", "Nairobi", "Naples", "Osaka", "Oslo",
    "Ottawa", "Perth", "Porto", "Prague", "Quito", "Riga", "Seoul", "Sydney", "Toronto", "Tunis", "Turin", "Venice",
    "Vienna", "Warsaw", "Zagreb", "Zurich",
)
# fmt: on


def needle_cases(request: Request) -> Iterator[Case]:
    """One code in each text, at depths that cover the text evenly.

    Raises:
        TangramError: the length is too short for the code, or the text is shorter than the length.

    """
    before, after = request.frame()
    head = request.ids(before)
    for index in range(request.count):
        random = Random(f"needle/{request.seed}/{request.length}/{index}")
        place, code = random.choice(_PLACES), _code(random)
        needle = _needle(request, place, code)
        hay = _excerpt(request, random, len(head) + len(needle))
        depth = (index + random.random()) / request.count
        yield Case(_buried(head, hay, [(depth, needle)]), (_question(request, after, place, depth, code),))


def multi_key_cases(request: Request) -> Iterator[Case]:
    """`KEYS` codes of as many places in each text, evenly spread, and a question for each.

    Raises:
        TangramError: as `needle_cases`.

    """
    before, after = request.frame()
    head = request.ids(before)
    for index in request.contexts(KEYS):
        random = Random(f"multikey/{request.seed}/{request.length}/{index}")
        codes = [(place, _code(random)) for place in random.sample(_PLACES, KEYS)]
        needles = [_needle(request, place, code) for place, code in codes]
        hay = _excerpt(request, random, len(head) + sum(map(len, needles)))
        depths = _spread(random, KEYS)
        questions = [
            _question(request, after, place, depth, code) for depth, (place, code) in zip(depths, codes, strict=True)
        ]
        asked = request.asked(index, KEYS)
        yield Case(_buried(head, hay, list(zip(depths, needles, strict=True))), tuple(questions[:asked]))


def multi_value_cases(request: Request) -> Iterator[Case]:
    """`CODES` codes of each of `PLACES` places in each text, told apart; all codes of a place are asked for at once.

    Raises:
        TangramError: as `needle_cases`.

    """
    before, after = request.frame()
    head = request.ids(before)
    for index in request.contexts(PLACES):
        random = Random(f"multivalue/{request.seed}/{request.length}/{index}")
        places = random.sample(_PLACES, PLACES)
        told = [(place, _code(random)) for _ in range(CODES) for place in places]
        random.shuffle(told)
        needles = [request.ids(f"\n\nOne access code of {place} is {code}.\n\n") for place, code in told]
        hay = _excerpt(request, random, len(head) + sum(map(len, needles)))
        questions = []
        for place in places[: request.asked(index, PLACES)]:
            *first, last = [code for other, code in told if other == place]
            prompt = (
                f"\n\nWhat are the {CODES} access codes of {place}, in the order in which the text tells them?{after}"
                f"The {CODES} access codes of {place} are"
            )
            questions.append(request.question(place, prompt, f" {', '.join(first)} and {last}"))
        depths = _spread(random, len(told))
        yield Case(_buried(head, hay, list(zip(depths, needles, strict=True))), tuple(questions))


def _needle(request: Request, place: str, code: str) -> list[int]:
    return request.ids(f"\n\nThe access code of {place} is {code}.\n\n")


def _question(request: Request, after: str, place: str, depth: float, code: str) -> Question:
    """What is asked for a needle; ``after`` is what the chat template puts after a user's words."""
    prompt = f"\n\nWhat is the access code of {place}?{after}The access code of {place} is"
    return request.question(f"{place} at {depth:.3f}", prompt, f" {code}")


def _code(random: Random) -> str:
    return str(random.randrange(10_000, 100_000))


def _spread(random: Random, count: int) -> list[float]:
    """Ascending depths in [0, 1), one in each part of the text."""
    return [(number + random.random()) / count for number in range(count)]


def _excerpt(request: Request, random: Random, taken: int) -> list[int]:
    """Consecutive tokens of the haystack that leave ``taken`` of the context's length."""
    hay, room = hay_ids(request), request.length - taken
    if not 0 < room <= len(hay):
        raise TangramError(
            f"--lengths: {request.length} tokens must hold what is hidden and at most the {len(hay)} tokens of the "
            "text around it; choose another length, or give a longer text with --data"
        )
    start = random.randrange(len(hay) - room + 1)
    return hay[start : start + room]


def _buried(head: Sequence[int], hay: Sequence[int], needles: Sequence[tuple[float, Sequence[int]]]) -> tuple[int, ...]:
    """The head, then the hay with each needle at its depth; depths ascend."""
    context, done = list(head), 0
    for depth, needle in needles:
        cut = int(depth * len(hay))
        context += [*hay[done:cut], *needle]
        done = cut
    return (*context, *hay[done:])


def hay_ids(request: Request) -> list[int]:
    """Tokens of all texts, one after the other."""
    return _tokenized(request.tokenizer, request.data)


@lru_cache(maxsize=2)
def _tokenized(tokenizer: object, data: Path | None) -> list[int]:
    return Request(tokenizer, 0, 0).ids("\n\n".join(haystack(data)))


def haystack(path: Path | None) -> list[str]:
    """Texts to hide something in.

    Args:
        path: a text file, a folder or a .tar.gz of them; None for prose that ships with Python.

    Raises:
        TangramError: there is no text.

    """
    if path is None:
        return [topics[name] for name in sorted(topics)]
    try:
        if path.is_dir():
            texts = [file.read_text(encoding="utf-8") for file in sorted(path.glob("*.txt"))]
        elif path.name.endswith((".tar.gz", ".tgz")):
            with tarfile.open(path) as archive:
                members = sorted((item for item in archive if item.isfile()), key=lambda item: item.name)
                texts = [file.read().decode() for item in members if (file := archive.extractfile(item))]
        else:
            texts = [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError, tarfile.TarError) as error:
        raise TangramError(f"--data: cannot read texts from {path}: {error}") from None
    if not any(text.strip() for text in texts):
        raise TangramError(f"--data: {path} has no text")
    return texts
