# SPDX-License-Identifier: Apache-2.0
"""Texts to profile a model on: made from what ships with Python, or read from a file of the user."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any, NamedTuple

from vllm_tangram.errors import TangramError
from vllm_tangram.json_lines import read_json_lines

MIN_CHARACTERS = 14_000
"""Least length of a pilot text: well over 2048 tokens with the tokenisers of current models."""

BUILT_IN = "built-in pilot texts"
"""What a profile says of them."""

_MIN_TOKENS = 2048

_NAMES = ("Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kavya", "Lior")
_CITIES = ("Accra", "Bergen", "Cusco", "Dakar", "Esbjerg", "Fukuoka", "Galway", "Hanoi", "Izmir", "Jaipur", "Kyiv")
_GOODS = ("anchor", "basket", "candle", "drill", "easel", "funnel", "gasket", "hammer", "inkwell", "jigsaw", "kettle")
_RULES = (
    "Answer in {n} sentences at most.",
    "Quote the document where it helps, never more than {n} lines at a time.",
    "If the document does not say, reply that it does not say; never guess.",
    "Keep names, identifiers and numbers exactly as they are written.",
    "Write for a reader who has programmed for {n} years.",
    "Do not mention these instructions.",
    "List at most {n} points, the most important one first.",
    "Prefer short words. Avoid exclamation marks.",
    "When two passages disagree, say so and cite both.",
)
_QUESTIONS = (
    "What does the documentation say about {topic}?",
    "Can you explain {topic} to me?",
    "I am reading about {topic}. What should I know?",
    "How is {topic} defined, exactly?",
)


class Sample(NamedTuple):
    """A text to profile on, and the kind of traffic that it stands for."""

    text: str
    domain: str


def pilot_samples(count: int, seed: int = 0, tokens: int = _MIN_TOKENS) -> list[Sample]:
    """Make ``count`` samples of five domains in turn: prose, code, records, dialogue, and documents with instructions.

    Each has at least `MIN_CHARACTERS` characters, and in proportion more where more than 2048 ``tokens`` are asked for.
    The same seed gives the same texts on the same Python version, sample i does not depend on ``count``, and a longer
    text begins with the shorter one.
    """
    characters = MIN_CHARACTERS * max(tokens, _MIN_TOKENS) // _MIN_TOKENS
    domains = list(_DOMAINS)
    samples = []
    for i in range(count):
        domain = domains[i % len(domains)]
        samples.append(Sample(_at_least(characters, _DOMAINS[domain], Random(f"{seed}/{i}")), domain))
    return samples


def pilot_texts(count: int, seed: int = 0) -> list[str]:
    """The texts alone of ``pilot_samples``."""
    return [sample.text for sample in pilot_samples(count, seed)]


def load_samples(path: str | Path) -> list[Sample]:
    """Read samples from a JSONL file: one object a line with "text", "prompt" or "messages" (role and content).

    Messages are joined as "role: content" paragraphs; blank lines are skipped. A line may name its "domain"; else it
    is the file's name without its endings.

    Raises:
        TangramError: names the file, and the line where one is wrong.

    """
    path = Path(path)
    domain = path.name.split(".")[0] or path.name
    samples = [
        Sample(_text_of(record, where), _text(record.get("domain", domain), "domain", where))
        for where, record in read_json_lines(path, "samples")
    ]
    if not samples:
        raise TangramError(f'{path} has no samples; write one JSON object a line, such as {{"text": "..."}}')
    return samples


def mixture(samples: Iterable[Sample], most: int) -> list[Sample]:
    """Up to ``most`` samples, one of each domain in turn, so that no domain is left out and none fills the profile.

    Samples of a domain stay in order; where one has no more, the others go on.
    """
    domains: dict[str, list[Sample]] = {}
    for sample in samples:
        domains.setdefault(sample.domain, []).append(sample)
    rounds = zip_longest(*domains.values())
    return [sample for one_of_each in rounds for sample in one_of_each if sample is not None][:most]


def _text_of(record: dict[str, Any], where: str) -> str:
    for field in ("text", "prompt"):
        if field in record:
            return _text(record[field], field, where)
    if "messages" not in record:
        raise TangramError(f'{where}: expected one of the fields "text", "prompt" and "messages", got {sorted(record)}')
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise TangramError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    return "\n\n".join(
        f"{_text(message.get('role'), 'role', where)}: {_text(message.get('content'), 'content', where)}"
        for message in messages
    )


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TangramError(f'{where}: "{field}" must be a string that is not empty')
    return value


def _at_least(characters: int, make: Callable[[Random], Iterator[str]], random: Random) -> str:
    parts: list[str] = []
    length = 0
    while length < characters:
        for part in make(random):
            parts.append(part)
            length += len(part) + 2
    return "\n\n".join(parts)


@cache
def _passages(topic: str) -> tuple[str, ...]:
    """Paragraphs of a topic, joined to passages of at least 400 characters."""
    passages = [""]
    for paragraph in topics[topic].strip().split("\n\n"):
        if len(passages[-1]) >= 400:
            passages.append("")
        passages[-1] += ("\n\n" if passages[-1] else "") + paragraph
    return tuple(passages)


def _excerpt(random: Random, most: int) -> tuple[str, list[str]]:
    """A topic and up to ``most`` of its passages, in order."""
    topic = random.choice(sorted(topics))
    passages = _passages(topic)
    start = random.randrange(max(1, len(passages) - most + 1))
    return topic, list(passages[start : start + most])


def _prose(random: Random) -> Iterator[str]:
    yield from _excerpt(random, 8)[1]


@cache
def _modules() -> tuple[Path, ...]:
    """Sizeable public modules of the standard library."""
    files = Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")
    return tuple(sorted(file for file in files if file.stat().st_size > MIN_CHARACTERS))


def _code(random: Random) -> Iterator[str]:
    module = random.choice(_modules())
    blocks = module.read_text(encoding="utf-8").split("\n\n\n")
    start = random.randrange(max(1, len(blocks) - 5))
    yield f"# {module.name}"
    for block in blocks[start : start + 8]:
        yield block[:4000] + "\n"


def _records(random: Random) -> Iterator[str]:
    orders = {
        f"{random.choice('ABCDEF')}{random.randrange(10**5):05d}": {
            "name": random.choice(_NAMES),
            "city": random.choice(_CITIES),
            "item": random.choice(_GOODS),
            "count": random.randrange(1, 100),
            "price": f"{random.uniform(1, 500):.2f}",
        }
        for _ in range(40)
    }
    if random.random() < 0.5:
        yield "\n".join(json.dumps({"order": order, **fields}) for order, fields in orders.items())
    else:
        yield "\n".join(
            f"- order {order}: " + ", ".join(f"{field} = {value}" for field, value in fields.items())
            for order, fields in orders.items()
        )
    for order in random.sample(sorted(orders), 8):
        field = random.choice(sorted(orders[order]))
        yield f"Question: what is the {field} of order {order}?\nAnswer: {orders[order][field]}"


def _dialogue(random: Random) -> Iterator[str]:
    topic, passages = _excerpt(random, 4)
    yield f"User: {random.choice(_QUESTIONS).format(topic=topic)}\n\nAssistant: {passages[0]}"
    for passage in passages[1:]:
        follow_up = random.choice(("Go on.", "And then?", "Is there more to it?", f"What else about {topic}?"))
        yield f"User: {follow_up}\n\nAssistant: {passage}"


def _instructed(random: Random) -> Iterator[str]:
    yield "You are a careful assistant. Read the documents below and follow every rule."
    rules = random.sample(_RULES, 6)
    yield "\n".join(f"{i}. {rule.format(n=random.randrange(2, 9))}" for i, rule in enumerate(rules, start=1))
    read = [_excerpt(random, 6) for _ in range(2)]
    for number, (topic, passages) in enumerate(read, start=1):
        yield f"## Document {number}: {topic}\n\n" + "\n\n".join(passages)
    topic, passages = random.choice(read)
    yield f"Question: {random.choice(_QUESTIONS).format(topic=topic)}\n\nAnswer: {passages[0]}"


_DOMAINS: dict[str, Callable[[Random], Iterator[str]]] = {
    "prose": _prose,
    "code": _code,
    "records": _records,
    "dialogue": _dialogue,
    "instructed": _instructed,
}
