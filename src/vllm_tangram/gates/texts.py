# SPDX-License-Identifier: Apache-2.0
"""Texts to train a gate on when the user gives none: the pilot texts, and synthetic ones full of things to look up.

A gate learns from them which tokens carry what cannot be guessed: identifiers, numbers, names. Prose alone has few.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from random import Random

from vllm_tangram.pilot import MIN_CHARACTERS, pilot_texts

_SYLLABLES = (
    "ba be bo da de do fa fi ga go ka ke ki la le lo ma mi mo na ne no pa pe ra re ri sa se so ta te to va vi zo"
)
_FIELDS = ("name", "status", "owner", "host", "port", "token", "region", "version", "total", "created", "color", "size")
_PEOPLE = ("Amara", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kavya", "Lior")
_THINGS = (
    "locker",
    "meeting room",
    "invoice",
    "ticket",
    "flight",
    "parcel",
    "account",
    "serial number",
    "gate",
    "badge",
)
_FACTS = (
    "Note: the {thing} of {name} is {value}.",
    "{name} said that the {thing} had been changed to {value}.",
    "Please remember that {name} uses {thing} {value}.",
    "(For {name}, the {thing} is now {value}, not {other}.)",
    "The password for the {thing} of {name}: {value}",
)


def training_texts(count: int, seed: int = 0) -> list[str]:
    """Make ``count`` texts; of nine kinds in turn, five are those of the pilot texts.

    The others are pairs of keys and values, nested JSON, tables, and prose into which facts are strewn. Each has at
    least `MIN_CHARACTERS` characters. The same seed gives the same texts on the same Python version, and text i does
    not depend on ``count``.
    """
    own = (_pairs, _nested, _tables, _facts)
    kinds = 5 + len(own)
    pilots = pilot_texts(5 * -(-count // kinds), seed=1000 + seed)  # others than those of profiles
    texts = []
    for index in range(count):
        cycle, kind = divmod(index, kinds)
        if kind < 5:
            texts.append(pilots[5 * cycle + kind])
        else:
            texts.append(_at_least(own[kind - 5], Random(f"gate/{seed}/{index}")))
    return texts


def _at_least(make: Callable[[Random], Iterator[str]], random: Random) -> str:
    parts: list[str] = []
    while sum(map(len, parts)) < MIN_CHARACTERS:
        parts += make(random)
    return "\n\n".join(parts)


def _word(random: Random) -> str:
    return "".join(random.choices(_SYLLABLES.split(), k=random.randrange(2, 5)))


def _value(random: Random) -> str:
    """Something that cannot be guessed."""
    return random.choice(
        (
            lambda: str(uuid.UUID(int=random.getrandbits(128), version=4)),
            lambda: str(random.randrange(10 ** random.randrange(2, 9))),
            lambda: f"{random.getrandbits(32):08x}",
            lambda: _word(random),
            lambda: f"{_word(random)}-{random.randrange(1000)}",
            lambda: f"{random.choice('ABCDEFGH')}{random.choice('KLMNP')}-{random.randrange(10**4):04d}",
            lambda: f"20{random.randrange(10, 30)}-{random.randrange(1, 13):02d}-{random.randrange(1, 29):02d}",
            lambda: f"10.{random.randrange(256)}.{random.randrange(256)}.{random.randrange(256)}",
        )
    )()


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def _pairs(random: Random) -> Iterator[str]:
    """Keys and values, one pair a line, in one of several notations."""
    make_key, make_value = random.choice(((_uuid, _uuid), (_uuid, _value), (_word, _value), (_value, _value)))
    line = random.choice(('"{}": "{}"', "{} = {}", "{}: {}", "{} -> {}", "export {}={}", "- {} is {}", "{}\t{}"))
    yield random.choice(("Here is the data.", "Look up values in this list:", "# settings", "JSON data:"))
    yield "\n".join(line.format(make_key(random), make_value(random)) for _ in range(random.randrange(20, 60)))


def _nested(random: Random) -> Iterator[str]:
    """Objects within objects."""
    records = {
        _value(random): {
            **{field: _value(random) for field in random.sample(_FIELDS, random.randrange(2, 6))},
            "tags": [_word(random) for _ in range(random.randrange(4))],
            "limits": {_word(random): random.randrange(10**4) for _ in range(random.randrange(3))},
        }
        for _ in range(random.randrange(4, 16))
    }
    yield json.dumps(records, indent=random.choice((None, 2)))


def _tables(random: Random) -> Iterator[str]:
    """A table with a heading, and numbered lists."""
    columns = random.sample(_FIELDS, random.randrange(3, 6))
    mark = random.choice((",", " | ", "\t", ";"))
    yield f"Table {random.randrange(100)}: {_word(random)}"
    yield "\n".join(
        [mark.join(columns), *(mark.join(_value(random) for _ in columns) for _ in range(random.randrange(8, 30)))]
    )
    yield "\n".join(
        f"{number}. {random.choice(_PEOPLE)}: {_value(random)}" for number in range(1, random.randrange(5, 15))
    )


def _facts(random: Random) -> Iterator[str]:
    """Prose in which every other paragraph states something that nothing else tells."""
    prose = pilot_texts(1, seed=random.randrange(10**9))[0]
    for paragraph in prose.split("\n\n"):
        yield paragraph
        if random.random() < 0.3:
            yield random.choice(_FACTS).format(
                thing=random.choice(_THINGS), name=random.choice(_PEOPLE), value=_value(random), other=_value(random)
            )
