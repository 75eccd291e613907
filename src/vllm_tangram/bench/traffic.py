# SPDX-License-Identifier: Apache-2.0
"""Traffic in which prompts begin alike: conversations that go on, and traces of real ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

from vllm_tangram.bench.serving import random_prompt
from vllm_tangram.bench.ttft import Due
from vllm_tangram.errors import TangramError
from vllm_tangram.json_lines import read_json_lines

_Record = TypeVar("_Record")
_TRACE_BLOCK = 512  # tokens that a hash id of a Mooncake trace stands for


class Traffic(Protocol):
    """Requests of a benchmark; picklable, and the same for every engine."""

    @property
    def requests(self) -> int:
        """How many there are."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest, its answer included."""

    @property
    def working_set(self) -> int:
        """Tokens whose KV would have to be kept for nothing to be computed twice."""

    def described(self) -> dict[str, Any]:
        """What decides it, as JSON."""

    def first(self) -> list[Due]:
        """The requests that wait for no answer."""

    def following(self, request: Due, answer: Sequence[int], now: float) -> Due | None:
        """The request that is sent because this one was answered ``now``, if any."""


@dataclass(frozen=True)
class Conversations:
    """Conversations of one size. A turn's prompt is all that was said before, answers included, and new text.

    Attributes:
        conversations: how many.
        turns: requests of each.
        first_tokens: length of its first prompt.
        user_tokens: new text of a later turn.
        answer_tokens: of every turn.
        think_seconds: mean of the exponential time from an answer to the next turn, and before the first; 0: at once.
        begin_within: seconds over which they begin, evenly at random; 0: all at once.

    """

    conversations: int
    turns: int
    first_tokens: int
    user_tokens: int
    answer_tokens: int
    think_seconds: float = 0.0
    begin_within: float = 0.0

    @property
    def requests(self) -> int:
        return self.conversations * self.turns

    @property
    def max_model_len(self) -> int:
        return self.first_tokens + self.turns * self.answer_tokens + (self.turns - 1) * self.user_tokens

    @property
    def working_set(self) -> int:
        return self.conversations * self.max_model_len

    def described(self) -> dict[str, Any]:
        return asdict(self)

    def first(self) -> list[Due]:
        begin = [Random(number).uniform(0, self.begin_within) for number in range(self.conversations)]
        return [self._turn(f"{number}/0", [], self.first_tokens, seconds) for number, seconds in enumerate(begin)]

    def following(self, request: Due, answer: Sequence[int], now: float) -> Due | None:
        conversation, turn = map(int, request.name.split("/"))
        if turn + 1 == self.turns:
            return None
        return self._turn(f"{conversation}/{turn + 1}", [*request.prompt, *answer], self.user_tokens, now)

    def _turn(self, name: str, history: list[int], new_tokens: int, now: float) -> Due:
        random = Random(name)
        think = random.expovariate(1 / self.think_seconds) if self.think_seconds else 0.0
        return Due(now + think, name, history + random_prompt(random, new_tokens), self.answer_tokens)


@dataclass(frozen=True)
class Recorded:
    """A request of a trace, scaled.

    Attributes:
        seconds: when it is sent.
        prompt_tokens: length of its prompt.
        output_tokens: of its answer.
        blocks: names of the blocks of its prompt, the last one cut.

    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests at recorded times. Blocks of the same name are the same tokens.

    A trace names no tokens, so in place of an earlier answer a prompt repeats what the trace has there, and not what
    the engine said: the answers themselves are reused by no engine.

    Attributes:
        recorded: the requests, in the order in which they are sent.
        block_tokens: tokens of a block.
        options: what ``described`` says.

    """

    recorded: tuple[Recorded, ...]
    block_tokens: int
    options: dict[str, Any]

    @property
    def requests(self) -> int:
        return len(self.recorded)

    @property
    def max_model_len(self) -> int:
        return max(one.prompt_tokens + one.output_tokens for one in self.recorded)

    @property
    def working_set(self) -> int:
        longest: defaultdict[int, int] = defaultdict(int)  # a last block may be whole in another request
        for one in self.recorded:
            for start, block in zip(range(0, one.prompt_tokens, self.block_tokens), one.blocks, strict=False):
                longest[block] = max(longest[block], min(self.block_tokens, one.prompt_tokens - start))
        return sum(longest.values())

    def described(self) -> dict[str, Any]:
        return self.options

    def first(self) -> list[Due]:
        tokens = {
            block: random_prompt(Random(block), self.block_tokens) for one in self.recorded for block in one.blocks
        }
        return [
            Due(
                one.seconds,
                str(number),
                [token for block in one.blocks for token in tokens[block]][: one.prompt_tokens],
                one.output_tokens,
            )
            for number, one in enumerate(self.recorded)
        ]

    def following(self, request: Due, answer: Sequence[int], now: float) -> Due | None:
        return None


def read_trace(path: Path, scale: float, speed: float, limit: int, longest: int) -> Trace:
    """A trace in the format of Mooncake (https://github.com/kvcache-ai/Mooncake, FAST25-release).

    A part of it is chosen by whole conversations, because the first minutes of a trace repeat next to nothing: at
    random, the same ones every time. A conversation is the requests that have the first two blocks in common.

    Args:
        path: lines of ``{"timestamp": ms, "input_length", "output_length", "hash_ids": one per 512 tokens}``, gzipped
            if it ends in ``.gz``.
        scale: times the lengths of prompts, answers and blocks.
        speed: over the times.
        limit: so many requests, at most.
        longest: no conversation with a request of more tokens, scaled, its answer included.

    Raises:
        TangramError: the file cannot be read, a line is not a request, or nothing is left.

    """
    block_tokens = max(round(scale * _TRACE_BLOCK), 1)
    found: defaultdict[tuple[int, ...], list[Recorded]] = defaultdict(list)
    for milliseconds, prompt, output, blocks in read_records("--trace", path, _request):
        tokens = min(max(round(scale * prompt), 1), block_tokens * len(blocks))
        one = Recorded(milliseconds / 1000 / speed, tokens, max(round(scale * output), 1), blocks)
        found[blocks[:2]].append(one)
    conversations = list(found.values())
    Random(0).shuffle(conversations)
    chosen: list[Recorded] = []
    for many in conversations:
        most = max(one.prompt_tokens + one.output_tokens for one in many)
        if most <= longest and len(chosen) + len(many) <= limit:
            chosen += many
    if not chosen:
        raise TangramError(
            f"--trace: {path} has no conversation of at most {limit} requests (--limit) of at most {longest} tokens "
            f"(--longest) at --scale {scale:g}"
        )
    chosen.sort(key=lambda one: one.seconds)
    start = chosen[0].seconds
    shifted = tuple(Recorded(one.seconds - start, one.prompt_tokens, one.output_tokens, one.blocks) for one in chosen)
    options = {"trace": path.name, "scale": scale, "speed": speed, "limit": limit, "longest": longest}
    return Trace(shifted, block_tokens, options)


def read_records(option: str, path: Path, parse: Callable[[dict[str, Any]], _Record]) -> Iterator[_Record]:
    """What the lines of a file of JSON objects say.

    Args:
        option: that named the file, for messages.
        path: gzipped if its name ends in ``.gz``.
        parse: an object; raises KeyError, TypeError or ValueError where it is wrong.

    Raises:
        TangramError: the file cannot be read, or a line is wrong.

    """
    for where, record in read_json_lines(path, option):
        try:
            yield parse(record)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise TangramError(f"{option}: {where}: {reason}") from None


def _request(given: dict[str, Any]) -> tuple[float, int, int, tuple[int, ...]]:
    """Milliseconds, prompt tokens, new tokens, blocks; KeyError, TypeError or ValueError if it is not a request."""
    values = [given[name] for name in ("timestamp", "input_length", "output_length")]
    blocks = given["hash_ids"]
    if not all(type(value) in (int, float) and 0 <= value < float("inf") for value in values):
        raise ValueError("timestamp, input_length and output_length must be numbers, 0 or more")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise TypeError("hash_ids must be a list of whole numbers")
    milliseconds, prompt, output = values
    if prompt < 1 or len(blocks) != -(-prompt // _TRACE_BLOCK):
        raise ValueError(f"input_length {prompt} must be above 0 and hash_ids one per {_TRACE_BLOCK} tokens of it")
    return milliseconds, prompt, output, tuple(blocks)
