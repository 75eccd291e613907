# SPDX-License-Identifier: Apache-2.0
"""Classification that only the examples of the context explain: kinds of words, and labels without meaning."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from vllm_tangram.errors import TangramError
from vllm_tangram.eval.tasks.base import Case, Request

QUESTIONS = 4

# fmt: off
_KINDS = (
    ("salmon", "eagle", "rabbit", "wolf", "camel", "beetle", "otter", "goose", "lizard", "donkey", "shark", "moose"),
    ("hammer", "wrench", "chisel", "saw", "drill", "pliers", "shovel", "axe", "screwdriver", "rake", "file", "anvil"),
    ("bread", "cheese", "soup", "pancake", "honey", "rice", "noodles", "butter", "yogurt", "sausage", "waffle", "jam"),
    ("shirt", "jacket", "scarf", "glove", "sock", "hat", "coat", "skirt", "sweater", "belt", "boot", "trousers"),
    ("violin", "trumpet", "flute", "drum", "piano", "guitar", "harp", "cello", "banjo", "clarinet", "organ", "tuba"),
    ("truck", "bicycle", "train", "ferry", "tractor", "scooter", "bus", "canoe", "airplane", "tram", "van", "sled"),
)
_LABELS = ("dax", "wug", "blick", "fep", "zorp", "kiv", "mub", "tosk", "lerp", "gorn")
_SENTENCES = (
    "My neighbour showed me a picture of the {}.", "We talked about the {} for an hour.", "Where is the {}?",
    "The word on the card was {}.", "I had never seen such a {} before.", "She wrote a short poem about the {}.",
    "Nobody mentioned the {} again.", "The {} was on the front page.", "He asked me how to spell {}.",
    "Every story in the book has a {} in it.", "They could not agree about the {}.", "I dreamed of the {} last night.",
)
# fmt: on


def manyshot_cases(request: Request) -> Iterator[Case]:
    """Labelled sentences up to the length, and questions for the labels of other sentences with the same words.

    Each context gives the kinds of words labels of its own. There is no chat template: the questions continue the list
    of examples, which is what small models can do. The text ends with whole examples; what is missing to the
    exact length is filled with blank lines in front of them.

    Raises:
        TangramError: the length does not hold one example of each kind.

    """
    start = list(request.tokenizer.encode(""))  # what the model wants at the start of any text
    for index in request.contexts(QUESTIONS):
        random = Random(f"manyshot/{request.seed}/{request.length}/{index}")
        labels = random.sample(_LABELS, len(_KINDS))
        head = start + request.ids("Every sentence gets one of the labels.\n")
        blank = request.ids("\n\n")
        examples: list[int] = []
        shown: list[tuple[int, str, str]] = []  # kind, word, sentence
        kinds: list[int] = []
        while True:
            kinds = kinds or random.sample(range(len(_KINDS)), len(_KINDS))  # every kind once before any again
            kind = kinds.pop()
            word, sentence = random.choice(_KINDS[kind]), random.choice(_SENTENCES)
            own = request.ids(f"\nSentence: {sentence.format(word)}\nLabel: {labels[kind]}\n")
            if len(head) + len(examples) + len(own) > request.length:
                break
            examples += own
            shown.append((kind, word, sentence))
        if len(shown) < len(_KINDS):
            raise TangramError(f"--lengths: {request.length} tokens do not hold an example of each label; ask for more")
        missing = request.length - len(head) - len(examples)
        filler = (blank * missing)[:missing]
        questions = []
        for kind in random.sample(range(len(_KINDS)), request.asked(index, QUESTIONS)):
            word = random.choice([word for own, word, _ in shown if own == kind])
            new = [sentence for sentence in _SENTENCES if (kind, word, sentence) not in shown]
            prompt = f"\nSentence: {random.choice(new or _SENTENCES).format(word)}\nLabel:"
            questions.append(request.question(f"{word}: {labels[kind]}", prompt, f" {labels[kind]}"))
        yield Case((*head, *filler, *examples), tuple(questions))
