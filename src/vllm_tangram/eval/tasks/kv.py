# SPDX-License-Identifier: Apache-2.0
"""Values of random keys."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random

from vllm_tangram.errors import TangramError
from vllm_tangram.eval.tasks.base import Case, Request
from vllm_tangram.json_lines import read_json_lines

QUESTIONS = 4  # per context: reading the context costs most


def kv_cases(request: Request) -> Iterator[Case]:
    """Pairs of random keys and values, one a line, and questions for some of the values.

    The task is that of "Lost in the Middle" (https://arxiv.org/abs/2307.03172), section 3. The length counts pairs. An
    answer starts with its opening quote, because tokens may span it.

    Raises:
        TangramError: a line of the file is wrong or has fewer pairs, or the file has too few lines.

    """
    before, after = request.frame()
    records = kv_records(request.data, request.length, request.seed)
    wanted = request.contexts(QUESTIONS)
    made = 0
    for index, pairs in zip(wanted, records, strict=False):
        body = "\n".join(f'"{key}": "{value}"' for key, value in pairs)
        context = f"{before}Extract the value of a key from the JSON data below.\n\n{body}\n"
        random = Random(f"kv/{request.seed}/{index}")
        asked = random.sample(range(len(pairs)), min(len(pairs), request.asked(index, QUESTIONS)))
        questions = []
        for number in sorted(asked):
            key, value = pairs[number]
            prompt = f'\nWhat is the value of the key "{key}"?{after}"{key}":'
            questions.append(request.question(key, prompt, f' "{value}'))
        yield Case(tuple(request.ids(context)), tuple(questions))
        made += 1
    if made < len(wanted):
        raise TangramError(f"--data: {request.data} has {made} records, --samples {request.count} needs {len(wanted)}")


def kv_records(path: Path | None, keys: int, seed: int = 0) -> Iterator[list[tuple[str, str]]]:
    """Pairs of UUIDs, ``keys`` at a time: endless, or those of a file.

    Args:
        path: a .jsonl or .jsonl.gz file of "Lost in the Middle" (records with ``ordered_kv_records``), whose first
            pairs are taken; None to draw them.
        keys: pairs of a record.
        seed: of the draw.

    Raises:
        TangramError: the file cannot be read, or a record is wrong or has fewer pairs.

    """
    if path is None:
        random = Random(f"kv/{seed}")
        while True:
            yield [(_uuid(random), _uuid(random)) for _ in range(keys)]
    for where, record in read_json_lines(path, "--data"):
        found = record.get("ordered_kv_records")
        if not isinstance(found, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in found):
            raise TangramError(f'--data: {where}: "ordered_kv_records" must be a list of pairs')
        if len(found) < keys:
            raise TangramError(f"--data: {where} has {len(found)} pairs, --keys asks for {keys}")
        yield [(str(key), str(value)) for key, value in itertools.islice(found, keys)]


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))
