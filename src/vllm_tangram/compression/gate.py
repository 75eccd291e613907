# SPDX-License-Identifier: Apache-2.0
"""The gate of Fast KVzip, https://arxiv.org/abs/2601.17668: a token's importance, told from its hidden state.

KVzip (https://arxiv.org/abs/2505.23416) scores a token by the attention that it gets while the model repeats the text,
which takes a second pass. A gate is trained once per model to predict that score, one small network per layer:

    q = RMSNorm(W_q h + b_q) [H, group, i]      k = RMSNorm(W_k h) [H, i]            h: input of the attention block [D]
    l = q . k / sqrt(i) + b [H, group]          l_s = q . k_base[H, s] / sqrt(i)     s = 1..S learned sinks
    score = mean over the group of 1 / (1 + sum_s exp(l_s - l))

``b`` is added once, in training as in inference (the published training code adds it twice). Published gates have an
inner size i and S of 16. Cost per layer: O(T * D * i * (Hq + H)) time, O(T * (D + Hq * (i + S))) float32 memory; on a
GPU see `split_gate`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from vllm_tangram.budget.fingerprint import check_made_for
from vllm_tangram.errors import TangramError
from vllm_tangram.files import write_atomically
from vllm_tangram.tensor_file import TensorFile, UnreadableFile

#: Added to the mean square under the root of both norms.
EPSILON = 1e-6
_MOST_SPLIT = 64  # inner size and sinks of a `SplitGate`: what a GPU's smallest shared memory, of 99 KiB, can hold


@dataclass(frozen=True, eq=False)
class GateWeights:
    """Weights of all layers (``[L, ...]``) or of one, float32.

    Attributes:
        q_weight: [L, H * group * i, D]; rows by KV head, then query head of its group, then inner dimension.
        q_bias: [L, H * group * i].
        k_weight: [L, H * i, D].
        q_norm: [L, i], factors of the norm of q.
        k_norm: [L, i].
        k_base: [L, H, S, i].
        bias: [L, H, group], b.

    """

    q_weight: Tensor
    q_bias: Tensor
    k_weight: Tensor
    q_norm: Tensor
    k_norm: Tensor
    k_base: Tensor
    bias: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, in a fixed order."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def map(self, change: Callable[[Tensor], Tensor]) -> GateWeights:
        """The same with ``change`` applied to every tensor."""
        return GateWeights(**{name: change(tensor) for name, tensor in self.tensors().items()})

    def scores(self, hidden: Tensor) -> Tensor:
        """[T, D] hidden states of one layer -> [H, T] float32; for weights of one layer (no leading L)."""
        num_heads, _, inner = self.k_base.shape
        hidden = hidden.float()
        query = linear(hidden, self.q_weight, self.q_bias).view(len(hidden), num_heads, -1, inner)
        key = linear(hidden, self.k_weight).view(len(hidden), num_heads, 1, inner)
        query = rms_norm(query, (inner,), self.q_norm, EPSILON) * inner**-0.5  # [T, H, group, i]
        key = rms_norm(key, (inner,), self.k_norm, EPSILON)
        own = (query * key).sum(-1) + self.bias  # [T, H, group]
        sinks = (query.transpose(0, 1).flatten(1, 2) @ self.k_base.transpose(1, 2)).logsumexp(-1)  # [H, T * group]
        sinks = sinks.view(num_heads, len(hidden), -1)
        return (own.transpose(0, 1) - sinks).sigmoid().mean(-1)


_FILE = TensorFile(
    name="gate",
    title="a gate",
    key="tangram_gate",
    version=1,
    tensors=tuple(item.name for item in fields(GateWeights)),
    command="tangram gate train",
)


class PlacedGate(Protocol):
    """A gate on the device where it scores."""

    def scores(self, layer: int, hidden: Tensor) -> Tensor:
        """See `Gate.scores`."""
        ...


@dataclass(frozen=True, eq=False)
class Gate:
    """A trained gate of one model.

    Attributes:
        weights: of all layers.
        model: fingerprint of the model that it was trained for (``model_fingerprint``).
        recipe: how it was trained, values that JSON can carry.
        agreement: how far it agrees with KVzip on text that it was not trained on: top-25 % overlap by scorer name.
        info: free text: date, versions, where the weights came from.
        source: the file, for messages.

    """

    weights: GateWeights
    model: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    source: str = "<memory>"

    def __post_init__(self) -> None:
        """Refuse weights that do not belong together.

        Raises:
            TangramError: a tensor is missing dimensions, has another shape than the others imply, or is not finite.

        """
        weights = self.weights
        if weights.k_base.ndim != 4 or weights.bias.ndim != 3 or weights.q_weight.ndim != 3:
            raise self._damaged("k_base, bias and q_weight are not [L, H, S, i], [L, H, group] and [L, H*group*i, D]")
        num_layers, num_heads, num_sinks, inner = weights.k_base.shape
        group, hidden = weights.bias.shape[-1], weights.q_weight.shape[-1]
        expected = {
            "q_weight": (num_layers, num_heads * group * inner, hidden),
            "q_bias": (num_layers, num_heads * group * inner),
            "k_weight": (num_layers, num_heads * inner, hidden),
            "q_norm": (num_layers, inner),
            "k_norm": (num_layers, inner),
            "k_base": (num_layers, num_heads, num_sinks, inner),
            "bias": (num_layers, num_heads, group),
        }
        for name, tensor in weights.tensors().items():
            if tuple(tensor.shape) != expected[name] or tensor.numel() == 0:
                raise self._damaged(f"{name} is {list(tensor.shape)}, not {list(expected[name])}")
            if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise self._damaged(f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}")
            if not bool(tensor.isfinite().all()):
                raise self._damaged(f"{name} has values that are not finite")
        object.__setattr__(self, "weights", weights.map(lambda tensor: tensor.detach().float().contiguous()))

    @property
    def num_layers(self) -> int:
        """Layers, L."""
        return int(self.weights.bias.shape[0])

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer, H."""
        return int(self.weights.bias.shape[1])

    @property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return int(self.weights.bias.shape[2])

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states, D."""
        return int(self.weights.q_weight.shape[2])

    @property
    def num_parameters(self) -> int:
        """Weights of all layers together."""
        return sum(tensor.numel() for tensor in self.weights.tensors().values())

    def layer(self, index: int) -> GateWeights:
        """Views of one layer's weights."""
        return self.weights.map(lambda tensor: tensor[index])

    def scores(self, layer: int, hidden: Tensor) -> Tensor:
        """Score tokens of one layer.

        Args:
            layer: index of the layer.
            hidden: ``[T, D]`` what enters the layer's attention block (after its norm), on the weights' device.

        Returns:
            ``[H, T]`` float32 in [0, 1]; higher means keep.

        """
        return self.layer(layer).scores(hidden)

    def part(self, layers: slice, heads: slice) -> Gate:
        """The gate of some layers, and of each some KV heads, counted from 0 again: what one rank of many needs."""

        def rows(tensor: Tensor) -> Tensor:
            """[L, H * n, ...], the same of a part."""
            by_head = tensor.view(self.num_layers, self.num_kv_heads, -1, *tensor.shape[2:])
            return by_head[layers, heads].flatten(1, 2)

        whole = self.weights
        weights = GateWeights(
            q_weight=rows(whole.q_weight),
            q_bias=rows(whole.q_bias),
            k_weight=rows(whole.k_weight),
            q_norm=whole.q_norm[layers],
            k_norm=whole.k_norm[layers],
            k_base=whole.k_base[layers, heads],
            bias=whole.bias[layers, heads],
        )
        return replace(self, weights=weights)

    def placed(self, device: torch.device | str, dtype: torch.dtype) -> PlacedGate:
        """The same gate, on a device, for the hidden states of a model.

        Args:
            device: where it scores.
            dtype: of the hidden states.

        Returns:
            On a GPU, for types of 16 bits, a `SplitGate`, whose scores are within 1e-5; else a gate as this one.

        """
        side = max(self.weights.k_base.shape[2:])
        if torch.device(device).type == "cuda" and dtype in (torch.bfloat16, torch.float16) and side <= _MOST_SPLIT:
            from vllm_tangram.compression.split_gate import SplitGate  # needs Triton

            return SplitGate(self, device, dtype)
        return replace(self, weights=self.weights.map(lambda tensor: tensor.to(device)))

    def digest(self) -> str:
        """SHA-256 of the weights: what scores depend on, whatever file or device they are in."""
        digest = hashlib.sha256()
        for name, tensor in self.weights.tensors().items():
            digest.update(f"{name}{list(tensor.shape)}".encode())
            digest.update(tensor.cpu().numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    def check(self, *, model: Mapping[str, Any]) -> None:
        """Refuse to score another model than the one that the gate was trained for.

        Args:
            model: fingerprint of the served model.

        Raises:
            TangramError: names what the gate says and what is served.

        """
        sizes = {
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "hidden_size": self.hidden_size,
        }
        problems = check_made_for("the gate's weights are", sizes, self.model, model)
        if problems:
            raise TangramError(
                f"gate {self.source} does not fit ({'; '.join(problems)}); give a gate of this model, or train one "
                "with `tangram gate train`"
            )

    def save(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a safetensors file, all of it or nothing.

        Args:
            path: the file.
            dtype: of the weights in the file. They are float32 again when read, so a gate that was rounded has
                another digest than before.

        Raises:
            TangramError: the file cannot be written.

        """
        header = {
            "model": self.model,
            "recipe": self.recipe,
            "agreement": self.agreement,
            "info": self.info,
        }
        tensors = self.weights.map(lambda tensor: tensor.to("cpu", dtype).contiguous()).tensors()
        data = to_safetensors(tensors, metadata=_FILE.metadata(header))
        write_atomically(Path(path), data, "gate")

    @classmethod
    def load(cls, path: str | Path) -> Gate:
        """Read a gate; weights are float32, on the CPU.

        Raises:
            TangramError: the file is missing, damaged, incomplete, something else, or of a newer format.

        """
        path = Path(path)
        header, tensors = _read(path)
        with _FILE.parsing(path):
            return cls(
                weights=GateWeights(**tensors),
                model=dict(header["model"]),
                recipe=dict(header["recipe"]),
                agreement={str(name): float(value) for name, value in dict(header["agreement"]).items()},
                info={str(name): str(text) for name, text in dict(header["info"]).items()},
                source=str(path),
            )

    @staticmethod
    def model_of(path: Path) -> dict[str, Any]:
        """Fingerprint of the model that a file's gate is for, without reading its weights.

        Raises:
            TangramError: as ``load``, as far as it shows.

        """
        header, _ = _read(path, header_only=True)
        with _FILE.parsing(path):
            return dict(header["model"])

    def _damaged(self, reason: str) -> TangramError:
        return _FILE.damaged(self.source, reason)


def _read(path: Path, *, header_only: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file whose format version is known."""
    if not path.is_file():
        raise TangramError(f"there is no gate {path}; make one with `tangram gate train`")
    try:
        return _FILE.read(path, "pt", header_only=header_only)
    except UnreadableFile as error:
        if path.suffix not in (".pt", ".pth", ".bin"):
            raise
        raise TangramError(
            f"{path} is not a gate but maybe a published checkpoint: convert it with `tangram gate convert`"
        ) from error
