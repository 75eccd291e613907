# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864), as far as scorers need it.

RoPE turns pairs of a head's dimensions by angles that grow with the position, so it can be undone: what a query was
before it needs no look into the model. A model that also scales its tables (YaRN's attention factor) multiplies queries
and keys by m; undoing divides by it, and a rotation to come multiplies by it as the model will.

Everything is told from the model's own table, whatever made its frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_tangram.errors import TangramError

_TOLERANCE = 0.04  # of a product of two entries: tables may be rounded to bfloat16
_CHECKED = 4096


class Rope:
    """The rotations of one model, by position.

    Args:
        table: ``[P, rotary_dim]``, the cosines of all pairs, then the sines, as the model multiplies with them. The
            first ``rotary_dim`` dimensions of a head are turned, others stay.
        interleaved: pairs are neighbours (0, 1), (2, 3), ... (GPT-J); else (i, i + rotary_dim / 2) (NeoX).

    Raises:
        TangramError: the table is not one of rotations by angles proportional to the position.

    """

    def __init__(self, table: Tensor, *, interleaved: bool = False) -> None:
        self.table = table
        self.interleaved = interleaved
        self._ahead: dict[int, Tensor] = {}
        if table.ndim != 2 or len(table) < 2 or table.shape[1] % 2:
            raise TangramError(f"a table of rotary embeddings must be [positions, rotary_dim], not {list(table.shape)}")
        # Angles of far positions are rounded in float32 when a table is made: look at near ones.
        factors = self._factors(0, min(len(table), _CHECKED))
        doubled = factors[: (len(factors) + 1) // 2] ** 2 - factors[0] * factors[::2]
        stepped = factors[:-1] * factors[1] - factors[0] * factors[1:]
        error = torch.cat([doubled, stepped]).abs().max()
        if not error <= _TOLERANCE * factors[0].abs().max() ** 2 or factors[0].imag.any():
            raise TangramError("the table of rotary embeddings does not hold angles proportional to the position")

    def unrotate(self, vectors: Tensor, start: int) -> Tensor:
        """Undo the rotation of queries or keys.

        Args:
            vectors: ``[T, heads, d]`` of positions ``start`` to ``start + T - 1``, which the table must hold.
            start: position of the first.

        Returns:
            ``[T, heads, d]`` float32.

        """
        factors = self._factors(start, len(vectors))[:, None]
        # Rounded entries are no exact rotation, but what the model did: divide by their own square.
        square = factors.real.square() + factors.imag.square()
        return self.turn(vectors, torch.complex(factors.real / square, -factors.imag / square))

    def ahead(self, position: int, count: int) -> Tensor:
        """Mean rotation over the ``count`` positions after ``position``, which the table must hold.

        Those after may lie beyond the table: they are this one, turned on.

        Returns:
            ``[rotary_dim / 2]`` complex64 factors of the pairs, for `turn`.

        """
        if count not in self._ahead:
            unit = self._factors(0, min(count + 1, len(self.table)))
            unit = unit / unit[0]
            while len(unit) <= count:
                unit = torch.cat([unit, unit[1:] * unit[-1]])
            self._ahead[count] = unit[1 : count + 1].mean(0)
        return self._factors(position, 1)[0] * self._ahead[count]

    def turn(self, vectors: Tensor, factors: Tensor) -> Tensor:
        """Multiply each pair, seen as a complex number, by its factor.

        Args:
            vectors: ``[T, heads, d]``.
            factors: complex64, broadcast to ``[T, heads, rotary_dim / 2]``.

        Returns:
            ``[T, heads, d]`` float32.

        """
        rotary_dim = self.table.shape[1]
        turned = vectors.to(torch.float32, copy=True)
        if self.interleaved:
            first, second = turned[..., 0:rotary_dim:2], turned[..., 1:rotary_dim:2]
        else:
            first, second = turned[..., : rotary_dim // 2], turned[..., rotary_dim // 2 : rotary_dim]
        cos, sin = factors.real, factors.imag
        new_first = first * cos - second * sin
        second.mul_(cos).addcmul_(first, sin)
        first.copy_(new_first)
        return turned

    def _factors(self, start: int, count: int) -> Tensor:
        """[count, rotary_dim / 2] complex64."""
        cos, sin = self.table[start : start + count].float().chunk(2, dim=-1)
        return torch.complex(cos, sin)
