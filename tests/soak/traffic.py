# SPDX-License-Identifier: Apache-2.0
"""Mixed traffic for a small server: what is asked, how its client behaves, and what may come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

#: Of the engine that the traffic is for.
MAX_MODEL_LEN = 1024
RETENTION_FLOOR = 0.1
POOL = 160  # pages: about 20 of the requests below; so the pool is full and requests are preempted
STOCK_OPTIONS = (
    "--dtype=float32",
    "--enforce-eager",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=48",
    f"--num-gpu-blocks-override={POOL + 1}",
    "--kv-cache-memory-bytes=64000000",
)
SERVER_OPTIONS = (
    "--retention=0.25",
    f"--retention-floor={RETENTION_FLOOR}",
    "--budgets=uniform",
    "--chunk-size=64",
    "--window=16",
    *STOCK_OPTIONS,
)

READ, SLOWLY, VANISH = "reads", "reads slowly", "vanishes"


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        number: of it.
        prompt: token ids.
        max_tokens: that it asks for; no other end is possible.
        retention: that it asks for; None: the server's.
        client: what its client does with the stream: reads it, reads it slowly, or vanishes after a few tokens.
        refusal: what the refusal must say; None: it must be answered in full.

    """

    number: int
    prompt: list[int]
    max_tokens: int
    retention: float | None = None
    client: str = READ
    refusal: str | None = None

    @property
    def key(self) -> tuple[tuple[int, ...], int, float | None]:
        """What its answer depends on."""
        return tuple(self.prompt), self.max_tokens, self.retention


@dataclass
class Traffic:
    """Requests without end, a burst at a time, by one seed."""

    seed: int
    number: int = 0
    _random: Random = field(init=False)
    _texts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._texts = [self._tokens(900) for _ in range(12)]  # conversations and documents that come back

    def burst(self) -> list[Ask]:
        """Requests that come at the same time."""
        kinds = self._random.choice([self._tiny, self._mixed, self._mixed, self._growing, self._growing])
        return [kinds() for _ in range(self._random.choice([1, 5, 40, 120]))]

    def bursts(self, total: int) -> Iterator[list[Ask]]:
        """Bursts of ``total`` requests together."""
        while total > 0:
            burst = self.burst()[:total]
            total -= len(burst)
            yield burst

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(32, 127) for _ in range(count)]

    def _next(self, prompt: list[int], max_tokens: int, retention: float | None = None, **more: str | None) -> Ask:
        self.number += 1
        return Ask(self.number, prompt, max_tokens, retention, **more)  # type: ignore[arg-type]

    def _tiny(self) -> Ask:
        return self._next(self._tokens(self._random.randrange(1, 20)), self._random.randrange(1, 5))

    def _growing(self) -> Ask:
        """Generates much, so that the pool fills up and somebody is preempted."""
        text = self._random.choice(self._texts)
        return self._next(text[: self._random.choice([64, 100, 200])], self._random.choice([100, 200]))

    def _mixed(self) -> Ask:
        random, draw = self._random, self._random.random()
        if draw < 0.05:
            return self._next(
                self._tokens(MAX_MODEL_LEN + random.randrange(1, 500)), 4, refusal="maximum context length"
            )
        if draw < 0.10:
            wrong = random.choice([0.01, 1.5, -1.0, 7])
            return self._next(self._tokens(5), 4, wrong, refusal="retention must be in")
        if draw < 0.35:
            return self._tiny()
        retention = random.choice([None, None, None, RETENTION_FLOOR, 0.5, round(random.uniform(0.1, 1), 3)])
        text = random.choice(self._texts)
        prompt, answer = text[: random.choice([64, 130, 300, 640, 900])], random.choice([1, 8, 30])
        client = random.choices([READ, SLOWLY, VANISH], [8, 1, 1])[0]
        return self._next(prompt, answer, retention, client=client)
