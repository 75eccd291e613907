# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings as matrices in float64, and the tables that models make of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotation(position: int, head_dim: int, rotary_dim: int, interleaved: bool, scaling: float = 1.0) -> Tensor:
    """``[d, d]`` float64: what RoPE multiplies a column vector at ``position`` with (base 10000)."""
    matrix = torch.eye(head_dim, dtype=torch.float64)
    for pair in range(rotary_dim // 2):
        angle = position / 10000 ** (2 * pair / rotary_dim)
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
        matrix[a, a] = matrix[b, b] = scaling * math.cos(angle)
        matrix[a, b], matrix[b, a] = -scaling * math.sin(angle), scaling * math.sin(angle)
    return matrix


def table(num_positions: int, rotary_dim: int, scaling: float = 1.0) -> Tensor:
    """``[P, rotary_dim]`` float32 cosines, then sines, of the same rotations."""
    frequencies = 10000 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return (scaling * torch.cat([angles.cos(), angles.sin()], dim=-1)).float()
