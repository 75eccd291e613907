# SPDX-License-Identifier: Apache-2.0
"""Questions about a context that is compressed before they are known, as in a conversation.

Contexts, questions and answers are token ids: the same ones for every scorer and budget, and a context has exactly the
length asked for. The same seed makes the same cases.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tarfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

from vllm_tangram.errors import TangramError

KV_QUESTIONS = 4  # per context: reading the context costs most

# fmt: off
_PLACES = (
    "Athens", "Bergen", "Bogota", "Boston", "Bremen", "Cairo", "Dakar", "Delhi", "Dublin", "Geneva", "Hanoi", "Havana",
    "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Malta", "Munich", "Nairobi", "Naples", "Osaka", "Oslo",
    "Ottawa", "Perth", "Porto", "Prague", "Quito", "Riga", "Seoul", "Sydney", "Toronto", "Tunis", "Turin", "Venice",
    "Vienna", "Warsaw", "Zagreb", "Zurich",
)
# fmt: on
_MARK = "<|here|>"


@dataclass(frozen=True)
class Question:
    """What is asked after the context.

    Attributes:
        label: what it asks for, for the records.
        prompt: tokens between the context and the answer.
        answer: tokens of the right answer.

    """

    label: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A context with its questions."""

    context: tuple[int, ...]
    questions: tuple[Question, ...]


def needle_cases(tokenizer: Any, length: int, count: int, texts: Sequence[str], seed: int = 0) -> Iterator[Case]:
    """A code, told once in a long text, at depths that cover the text evenly.

    Args:
        tokenizer: that of the model; its chat template is used if it has one.
        length: tokens of a context.
        count: cases, one question each.
        texts: what the code is hidden in, see ``haystack``.
        seed: of places, codes, depths and excerpts.

    Raises:
        TangramError: ``length`` is too short for the code, or ``texts`` are shorter than ``length``.

    """
    before, after = _frame(tokenizer)
    head, hay = _ids(tokenizer, before), _ids(tokenizer, "\n\n".join(texts))
    for index in range(count):
        random = Random(f"needle/{seed}/{length}/{index}")
        place, code = random.choice(_PLACES), str(random.randrange(10_000, 100_000))
        needle = _ids(tokenizer, f"\n\nThe access code of {place} is {code}.\n\n")
        room = length - len(head) - len(needle)
        if not 0 < room <= len(hay):
            raise TangramError(
                f"--lengths: {length} tokens must hold the code and at most the {len(hay)} tokens of the text around "
                "it; choose another length, or give a longer text with --data"
            )
        start = random.randrange(len(hay) - room + 1)
        depth = (index + random.random()) / count
        cut = start + int(depth * room)
        context = head + hay[start:cut] + needle + hay[cut : start + room]
        prompt = f"\n\nWhat is the access code of {place}?{after}The access code of {place} is"
        question = Question(
            f"{place} at {depth:.3f}", tuple(_ids(tokenizer, prompt)), tuple(_ids(tokenizer, f" {code}"))
        )
        yield Case(tuple(context), (question,))


def haystack(path: Path | None) -> list[str]:
    """Texts to hide a code in.

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


def kv_cases(tokenizer: Any, records: Iterator[list[tuple[str, str]]], count: int, seed: int = 0) -> Iterator[Case]:
    """Pairs of random keys and values, one a line, and questions for some of the values.

    The task is that of "Lost in the Middle" (https://arxiv.org/abs/2307.03172), section 3. An answer starts with its
    opening quote, because tokens may span it.

    Args:
        tokenizer: that of the model; its chat template is used if it has one.
        records: the pairs of a context each, see ``kv_records``.
        count: questions in all, `KV_QUESTIONS` per context.
        seed: of the keys asked for.

    """
    before, after = _frame(tokenizer)
    for index, pairs in enumerate(itertools.islice(records, -(-count // KV_QUESTIONS))):
        body = "\n".join(f'"{key}": "{value}"' for key, value in pairs)
        context = f"{before}Extract the value of a key from the JSON data below.\n\n{body}\n"
        asked = Random(f"kv/{seed}/{index}").sample(range(len(pairs)), min(KV_QUESTIONS, count - KV_QUESTIONS * index))
        questions = []
        for number in sorted(asked):
            key, value = pairs[number]
            prompt = f'\nWhat is the value of the key "{key}"?{after}"{key}":'
            questions.append(Question(key, tuple(_ids(tokenizer, prompt)), tuple(_ids(tokenizer, f' "{value}'))))
        yield Case(tuple(_ids(tokenizer, context)), tuple(questions))


def kv_records(path: Path | None, keys: int, seed: int = 0) -> Iterator[list[tuple[str, str]]]:
    """Endless pairs of UUIDs, ``keys`` at a time.

    Args:
        path: a .jsonl.gz file of "Lost in the Middle" (records with ``ordered_kv_records``), whose first pairs are
            taken; None to draw them.
        keys: pairs of a record.
        seed: of the draw.

    Raises:
        TangramError: the file cannot be read, or a record has fewer pairs.

    """
    if path is None:
        random = Random(f"kv/{seed}")
        while True:
            yield [(_uuid(random), _uuid(random)) for _ in range(keys)]
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                pairs = json.loads(line)["ordered_kv_records"][:keys]
                if len(pairs) < keys:
                    raise TangramError(f"--data: a record of {path} has {len(pairs)} pairs, --keys asks for {keys}")
                yield [(str(key), str(value)) for key, value in pairs]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, TangramError):
            raise
        raise TangramError(f"--data: {path} is no gzipped file of key-value records: {error!r}") from None


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _frame(tokenizer: Any) -> tuple[str, str]:
    """What the model expects before a user's message, and between it and its answer."""
    if not tokenizer.chat_template:
        return tokenizer.bos_token or "", "\n"
    message = [{"role": "user", "content": _MARK}]
    before, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split(_MARK)
    return before, after
