# SPDX-License-Identifier: Apache-2.0
"""What the dense reference holds of a prompt: full KV, and a mask of the tokens that each KV head retained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from vllm_tangram.budget import EvictionSchedule, RetentionPlan
from vllm_tangram.compression import places


@dataclass(frozen=True, eq=False)
class DenseState:
    """Tokens that were read, and what each KV head retained of them.

    Attributes:
        keys: per layer ``[H, t, d]`` after RoPE, of all tokens.
        values: per layer ``[H, t, d]``.
        retained: ``[L, H, t]`` bool.
        logits: ``[vocabulary]`` float32 of the next token; empty before the first.

    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    retained: Tensor
    logits: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens read, t."""
        return self.retained.shape[-1]

    def kept_positions(self, layer: int, head: int) -> Tensor:
        """[n] int64 positions that one KV head retained, ascending."""
        return self.retained[layer, head].nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class DenseChunk:
    """A chunk that was attended to and scored, but not compressed yet.

    Attributes:
        state: with all of the chunk's tokens retained.
        start: position of the chunk's first token.
        scores: scorer name -> ``[L, H, T]`` float32.

    """

    state: DenseState
    start: int
    scores: Mapping[str, Tensor]
    _places: dict[tuple[str, int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def compress(self, scorer: str, plan: RetentionPlan, schedule: EvictionSchedule, prompt_len: int) -> DenseState:
        """Keep what a schedule leaves to each head, the best by one of the scorers.

        Args:
            scorer: a name in ``scores``.
            plan: tells which head is in which group, the sinks and the window.
            schedule: tells how many tokens a group holds.
            prompt_len: tokens of the whole prompt, P.

        """
        end = self.state.num_tokens
        kept = schedule.lengths(end, prompt_len) - schedule.lengths(self.start, prompt_len)
        counts = torch.from_numpy(kept[plan.groups.group])
        return self.keep(scorer, counts, sinks=plan.config.sinks, window=plan.config.window)

    def keep(self, scorer: str, counts: Tensor, *, sinks: int, window: int) -> DenseState:
        """Keep the best tokens of each head.

        Args:
            scorer: a name in ``scores``.
            counts: ``[L, H]`` int64, tokens of the chunk that a head keeps, the protected ones included.
            sinks: first tokens of the prompt that are kept.
            window: last tokens of the chunk that are kept.

        """
        head, tail = max(0, sinks - self.start), window
        ranked = self._places.get((scorer, head, tail))
        if ranked is None:
            ranked = places(self.scores[scorer], protect_head=head, protect_tail=tail)
            self._places[scorer, head, tail] = ranked
        retained = self.state.retained.clone()
        retained[..., self.start :] = ranked < counts.to(ranked.device)[..., None]
        return DenseState(self.state.keys, self.state.values, retained, self.state.logits)


class Past:
    """What some rows of a pass read before: the same tokens, of which each row and head retained its own.

    Args:
        states: of the rows, with the same keys and values.

    """

    def __init__(self, states: Sequence[DenseState]) -> None:
        self.keys, self.values = states[0].keys, states[0].values
        self.rows, self.num_tokens = len(states), states[0].num_tokens
        if self.num_tokens:
            self.retained = torch.stack([state.retained for state in states], dim=1)  # [L, B, H, t]
            self.most: list[int] = self.retained.sum(-1).amax((1, 2)).tolist()  # per layer; waits for the device once

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Each KV head's queries attend to what that head retained, then causally to the new tokens.

        Args:
            layer: index of the layer.
            query: ``[B, Hq, T, d]``.
            key: ``[B, H, T, d]``.
            value: ``[B, H, T, d]``.
            scale: factor of the logits.

        Returns:
            ``[B, Hq, T, d]``.

        """
        num_heads, num_tokens = key.shape[1:3]
        visible = None
        if self.num_tokens:
            before, there = self._retained(layer)
            key = torch.cat([embedding(before, self.keys[layer].flatten(0, 1)), key], dim=2)
            value = torch.cat([embedding(before, self.values[layer].flatten(0, 1)), value], dim=2)
            causal = there.new_ones(num_tokens, num_tokens).tril_().expand(*there.shape[:2], -1, -1)
            visible = torch.cat([there[:, :, None].expand(-1, -1, num_tokens, -1), causal], dim=-1).flatten(0, 1)
        # Every KV head of every row is a row of its own, with its query heads.
        queries = torch.unflatten(query, 1, (num_heads, -1)).flatten(0, 1)  # [B * H, group, T, d]
        shape = (-1, queries.shape[1], -1, -1)
        return scaled_dot_product_attention(
            queries,
            key.flatten(0, 1)[:, None].expand(shape),
            value.flatten(0, 1)[:, None].expand(shape),
            attn_mask=None if visible is None else visible[:, None],
            is_causal=visible is None,
            scale=scale,
        ).reshape(query.shape)

    def _retained(self, layer: int) -> tuple[Tensor, Tensor]:
        """[B, H, n] where the retained tokens are among those of all heads, side by side, and which of them exist."""
        retained, most = self.retained[layer], self.most[layer]
        counts = retained.cumsum(-1)
        slots = torch.where(retained, counts - 1, most)
        position = torch.arange(self.num_tokens, device=retained.device).expand_as(slots)
        # Where a head has fewer tokens than another, the first token stands in and is not looked at.
        tokens = slots.new_zeros(*slots.shape[:2], most + 1).scatter_(-1, slots, position)[..., :most]
        first = torch.arange(retained.shape[1], device=retained.device)[:, None] * self.num_tokens
        return tokens + first, torch.arange(most, device=retained.device) < counts[..., -1:]
