# SPDX-License-Identifier: Apache-2.0
"""A gate on a GPU: projected by tensor cores, and hardly less exact than in float32.

Tensor cores multiply numbers of 16 bits and add in float32. Hidden states are such numbers; a float32 weight is the sum
of two, but for what both round away. So one product with a matrix of twice as many rows is the float32 projection:

    w = high + low,    high = round(w),  low = round(w - high)       in the type of the hidden states
    W h = High h + Low h                                             each added up in float32

A weight that was rounded to 16 bits, as in a file of half size, is exactly such a sum. Of others at most 2**-17
(bfloat16) or 2**-23 (float16) is left out. With such weights instead of the shipped gate's that moved a score by at
most 5e-6 and 6e-8, and no token out of a head's best quarter or into it. Sums in float32 err by 8e-7; high parts alone
by 4e-3 and 3e-4, and they changed up to 1.2 % of a best quarter. (30 layers, 1024 tokens, hidden states of the embedded
model or random, parts summed in float64 and compared with float64.)

All the rest is one kernel (`gate_kernel`). Scratch: ``4 * P * (Hq + H) * i`` bytes a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from vllm_tangram.compression.gate import EPSILON, Gate, GateWeights
from vllm_tangram.compression.gate_kernel import gate_kernel

_TOKENS = 64  # of a program
_WARPS = 1  # measured: 0.70 ms of 36 layers of 8192 tokens, with 2 1.07, with 4 1.28
_LEAST_SIDE = 16  # of a matrix that Triton multiplies
_EXPONENT = 14  # of the largest weight of a layer
_LEAST = -100  # exponent of the largest weight, beyond which no scale is representable


@dataclass(frozen=True, eq=False)
class SplitWeights:
    """Weights of one layer as the kernel takes them; all contiguous, float32 where nothing else is said.

    A row is ``(KV head, member, inner dimension)``, R of them; the last of the ``group + 1`` members is the key.

    Attributes:
        parts: [P * R, D] of the type of the hidden states: the weights times the scale, high parts first; P is 1 if
            there are no low ones.
        unscale: 1 / scale, a power of two.
        bias: [R], 0 for keys.
        factor: [i] both norms' factors and ``i**-0.5``.
        sinks: [H, S, i] sinks, with the factors of q's norm and ``i**-0.5``.
        own_bias: [H, group].

    """

    parts: Tensor
    unscale: float
    bias: Tensor
    factor: Tensor
    sinks: Tensor
    own_bias: Tensor

    @classmethod
    def of(cls, weights: GateWeights, dtype: torch.dtype) -> SplitWeights:
        """Split a layer's weights, on their device; waits for it.

        Args:
            weights: of one layer.
            dtype: of the hidden states.

        """
        num_heads, group = weights.bias.shape
        inner = len(weights.q_norm)

        def rows(query: Tensor, key: Tensor) -> Tensor:
            parts = (query.view(num_heads, group * inner, -1), key.view(num_heads, inner, -1))
            return torch.cat(parts, 1).flatten(0, 1)

        matrix = rows(weights.q_weight, weights.k_weight)
        # float16 has few exponents: without a scale the low parts would be subnormal there, and lose bits.
        exponent = _EXPONENT - max(int(torch.frexp(matrix.abs().max()).exponent), _LEAST)
        matrix = matrix * 2.0**exponent
        high = matrix.to(dtype)
        low = (matrix - high.float()).to(dtype)
        query_factor = weights.q_norm * inner**-0.5
        return cls(
            parts=torch.cat([high, low]) if bool(low.any()) else high,
            unscale=2.0**-exponent,
            bias=rows(weights.q_bias, torch.zeros(num_heads * inner, device=matrix.device)).flatten(),
            factor=query_factor * weights.k_norm,
            sinks=(weights.k_base * query_factor).contiguous(),
            own_bias=weights.bias.contiguous(),
        )

    def project(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, P * R] float32; on CUDA alone."""
        return torch.mm(hidden, self.parts.T, out_dtype=torch.float32)

    def scores(self, hidden: Tensor) -> Tensor:
        """[T, D] hidden states of the type of the parts -> [H, T] float32; queued, waits for nothing."""
        num_heads, group = self.own_bias.shape
        _, num_sinks, inner = self.sinks.shape
        assert hidden.dtype == self.parts.dtype
        with torch.cuda.device(hidden.get_device()):  # Triton launches on the current device
            projections = self.project(hidden)
            scores = torch.empty(num_heads, len(hidden), dtype=torch.float32, device=hidden.device)
            assert projections.stride(1) == 1
            gate_kernel[(triton.cdiv(len(hidden), _TOKENS), num_heads)](
                *(projections, scores, self.bias, self.factor, self.sinks, self.own_bias),
                *(len(hidden), self.unscale, projections.stride(0), len(self.bias), scores.stride(0)),
                PARTS=len(self.parts) // len(self.bias),
                GROUP=group,
                INNER=inner,
                INNER_PADDED=_padded(inner),
                SINKS=num_sinks,
                SINKS_PADDED=_padded(num_sinks),
                TOKENS=_TOKENS,
                num_warps=_WARPS,
                EPSILON=EPSILON,
            )
        return scores


class SplitGate:
    """A gate for hidden states of 16 bits, on a GPU.

    Args:
        gate: wherever its weights are.
        device: a CUDA device.
        dtype: of the hidden states, bfloat16 or float16.

    """

    def __init__(self, gate: Gate, device: torch.device | str, dtype: torch.dtype) -> None:
        # Layer by layer, so that the device never holds the float32 weights of more than one.
        self._layers = [
            SplitWeights.of(gate.layer(layer).map(lambda tensor: tensor.to(device)), dtype)
            for layer in range(gate.num_layers)
        ]

    def scores(self, layer: int, hidden: Tensor) -> Tensor:
        """See `Gate.scores`; ``hidden`` has the type that the gate was made for."""
        return self._layers[layer].scores(hidden)


def _padded(side: int) -> int:
    return max(triton.next_power_of_2(side), _LEAST_SIDE)
