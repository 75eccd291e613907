# SPDX-License-Identifier: Apache-2.0
"""Training a gate towards KVzip's scores, one layer after the other (Fast KVzip, https://arxiv.org/abs/2601.17668).

Each layer minimises the binary cross-entropy between its score and KVzip's over tokens and KV heads, drawn at random
from all texts. Layers share nothing, so one layer's examples are in memory at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from vllm_tangram.compression.gate import GateWeights


@dataclass(frozen=True)
class Recipe:
    """How a gate is trained.

    Attributes:
        steps: optimiser steps per layer.
        batch: tokens of a step.
        optimiser: "adam", or "sgd" with momentum 0.9 as in the paper.
        learning_rate: at the start; it falls to 0 along half a cosine, after a linear rise over the first 2 %.
        inner: width i of queries and keys; most of a gate's size. 8 does nearly as well (docs/gates.md).
        sinks: learned sinks S.
        seed: of initial weights and batches.

    """

    steps: int = 800
    batch: int = 1000
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 0.01
    inner: int = 16
    sinks: int = 16
    seed: int = 0


def train_layer(
    hidden: Tensor,
    target: Tensor,
    group: int,
    recipe: Recipe,
    *,
    seed: int = 0,
) -> tuple[GateWeights, list[float]]:
    """Train the gate of one layer.

    Args:
        hidden: ``[N, D]`` examples: what entered the attention block.
        target: ``[H, N]`` float32 in [0, 1]: KVzip's scores of these tokens.
        group: query heads of a KV head.
        recipe: how.
        seed: told apart from the recipe's, such as the layer.

    Returns:
        The weights, of one layer, and the loss of every step.

    """
    generator = torch.Generator().manual_seed(recipe.seed * 100_003 + seed)  # on the CPU: the same on every device
    weights = _initial(len(target), group, hidden.shape[1], recipe, generator).map(lambda x: x.to(hidden.device))
    parameters = [tensor.requires_grad_() for tensor in weights.tensors().values()]
    optimiser: torch.optim.Optimizer
    if recipe.optimiser == "sgd":
        optimiser = torch.optim.SGD(parameters, lr=recipe.learning_rate, momentum=0.9)
    else:
        optimiser = torch.optim.Adam(parameters, lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, recipe.steps))
    losses: list[Tensor] = []
    order, at = torch.empty(0, dtype=torch.long, device=hidden.device), 0
    for _ in range(recipe.steps):
        if at + recipe.batch > len(order):  # every token is seen once before any is seen twice
            order, at = torch.randperm(len(hidden), generator=generator).to(hidden.device), 0
        batch = order[at : at + recipe.batch]
        at += recipe.batch
        loss = binary_cross_entropy(weights.scores(hidden[batch]).clamp(0, 1), target[:, batch])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
        losses.append(loss.detach())
    return weights.map(lambda tensor: tensor.detach()), torch.stack(losses).tolist()


def _rate(step: int, steps: int) -> float:
    rise = max(1, steps // 50)
    return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _initial(num_heads: int, group: int, width: int, recipe: Recipe, generator: torch.Generator) -> GateWeights:
    """Sinks start at random: equal ones would get equal gradients and stay one for ever."""

    def draw(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    inner, rows = recipe.inner, num_heads * group * recipe.inner
    return GateWeights(
        q_weight=draw(rows, width, scale=width**-0.5),
        q_bias=torch.zeros(rows),
        k_weight=draw(num_heads * inner, width, scale=width**-0.5),
        q_norm=torch.ones(inner),
        k_norm=torch.ones(inner),
        k_base=draw(num_heads, recipe.sinks, inner, scale=1.0),
        bias=torch.zeros(num_heads, group),
    )
