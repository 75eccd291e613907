# SPDX-License-Identifier: Apache-2.0
"""Retention profiles: what a scorer keeps of each member, measured once per model and scorer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import save as to_safetensors

from vllm_tangram.budget.fingerprint import check_same_model
from vllm_tangram.errors import TangramError
from vllm_tangram.files import write_atomically
from vllm_tangram.tensor_file import TensorFile

FORMAT_VERSION = 1
_FILE = TensorFile(
    name="profile",
    title="a retention profile",
    key="tangram_profile",
    version=FORMAT_VERSION,
    tensors=("retentions", "kept", "mean", "std"),
    command="tangram profile",
)


@dataclass(frozen=True, eq=False)
class RetentionProfile:
    """Fractions of their tokens that all members kept, in pilot samples, at a grid of global retentions.

    Attributes:
        retentions: [R] float64, strictly increasing in (0, 1): the levels ``x`` of the competition.
        kept: [S, R, L, H] float32 in [0, 1]: fraction that a member kept in sample s at level x.
        scorer: name of the scorer.
        model: fingerprint of the model (``model_fingerprint``).
        sinks: first tokens that were always kept.
        window: last tokens of every chunk that were always kept.
        chunk_size: tokens that competed at once.
        info: free text: versions, date, where the samples came from.
        gate: digest of the scorer's gate; None for scorers without one.
        source: the file, for messages.

    """

    retentions: NDArray[np.float64]
    kept: NDArray[np.float32]
    scorer: str
    model: dict[str, Any]
    sinks: int
    window: int
    chunk_size: int
    info: dict[str, str] = field(default_factory=dict)
    gate: str | None = None
    source: str = "<memory>"

    def __post_init__(self) -> None:
        """Freeze the arrays.

        Raises:
            TangramError: an array has a wrong shape or values out of range.

        """
        retentions, kept = _frozen(self.retentions, np.float64), _frozen(self.kept, np.float32)
        object.__setattr__(self, "retentions", retentions)
        object.__setattr__(self, "kept", kept)
        if retentions.ndim != 1 or kept.ndim != 4 or kept.shape[1] != len(retentions) or kept.size == 0:
            raise self._damaged(f"retentions {retentions.shape} and kept {kept.shape} are not [R] and [S, R, L, H]")
        # Conditions are stated positively: every comparison with NaN is false.
        if not (np.all(retentions > 0) and np.all(retentions < 1) and np.all(np.diff(retentions) > 0)):
            raise self._damaged("retentions do not increase inside (0, 1)")
        if not np.all((kept >= 0) & (kept <= 1)):
            raise self._damaged("kept has values outside [0, 1]")

    @property
    def num_samples(self) -> int:
        """Pilot samples, S."""
        return int(self.kept.shape[0])

    @property
    def num_layers(self) -> int:
        """Layers, L."""
        return int(self.kept.shape[2])

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer, H."""
        return int(self.kept.shape[3])

    @property
    def mean(self) -> NDArray[np.float64]:
        """[R, L, H] float64, mean over samples."""
        return self.kept.mean(axis=0, dtype=np.float64)

    @property
    def std(self) -> NDArray[np.float64]:
        """[R, L, H] float64, population standard deviation over samples."""
        return self.kept.std(axis=0, dtype=np.float64)

    def save(self, path: Path) -> None:
        """Write a safetensors file, all of it or nothing.

        Raises:
            TangramError: the file cannot be written.

        """
        header = {
            "scorer": self.scorer,
            "model": self.model,
            "sinks": self.sinks,
            "window": self.window,
            "chunk_size": self.chunk_size,
            "info": self.info,
        }
        if self.gate is not None:
            header["gate"] = self.gate
        tensors: dict[str, NDArray[Any]] = {
            "retentions": self.retentions,
            "kept": self.kept,
            "mean": self.mean,
            "std": self.std,
        }
        data = to_safetensors(tensors, metadata=_FILE.metadata(header))
        write_atomically(Path(path), data, "profile")

    @classmethod
    def load(cls, path: str | Path) -> RetentionProfile:
        """Read a profile.

        Raises:
            TangramError: the file is missing, damaged, incomplete, or of a newer format.

        """
        path = Path(path)
        header, tensors = _read(path)
        with _FILE.parsing(path):
            profile = cls(
                retentions=tensors["retentions"],
                kept=tensors["kept"],
                scorer=str(header["scorer"]),
                model=_checked_model(dict(header["model"])),
                sinks=int(header["sinks"]),
                window=int(header["window"]),
                chunk_size=int(header["chunk_size"]),
                info={str(name): str(text) for name, text in dict(header["info"]).items()},
                gate=None if header.get("gate") is None else str(header["gate"]),
                source=str(path),
            )
        for name, expected in (("mean", profile.mean), ("std", profile.std)):
            stored = tensors[name]
            if stored.shape != expected.shape or not np.allclose(stored, expected, atol=1e-6):
                raise profile._damaged(f"{name} does not follow from kept")
        return profile

    def check(self, *, model: dict[str, Any], scorer: str, gate: str | None = None) -> None:
        """Refuse to serve another model or scorer than the profiled one.

        Args:
            model: fingerprint of the served model.
            scorer: name of the scorer that is served.
            gate: digest of its gate, if it has one.

        Raises:
            TangramError: names what the profile says and what is served.

        """
        problems = [] if scorer == self.scorer else [f"scorer: recorded {self.scorer}, served {scorer}"]
        if gate != self.gate:
            recorded, served = (str(digest)[:12] if digest else "none" for digest in (self.gate, gate))
            problems.append(f"gate: recorded {recorded}, served {served}")
        served_shape = (model.get("num_hidden_layers"), model.get("num_key_value_heads"))
        if served_shape != (self.num_layers, self.num_kv_heads):
            problems.append(
                f"layers x KV heads: recorded {self.num_layers} x {self.num_kv_heads}, "
                f"served {served_shape[0]} x {served_shape[1]}"
            )
        problems += check_same_model(self.model, model)
        if problems:
            raise TangramError(
                f"profile {self.source} does not fit ({'; '.join(problems)}); give --profile and --scorer that belong "
                "to this model, or make a profile with `tangram profile`"
            )

    def rank_stability(self) -> NDArray[np.float64]:
        """[R] float64: do samples agree on which members matter?

        Mean over pairs of samples of Spearman's rank correlation of the members' kept fractions. A sample that keeps
        the same of every member has no ranks and is left out; NaN where no pair is left.
        """
        samples = self.kept.reshape(self.num_samples, len(self.retentions), -1)
        return np.array([_mean_spearman(samples[:, level]) for level in range(len(self.retentions))])

    def _damaged(self, reason: str) -> TangramError:
        return _FILE.damaged(self.source, reason)


def _checked_model(model: dict[str, Any]) -> dict[str, Any]:
    """The fields that are read one by one; the others are only compared."""
    architectures, head_dim = model.get("architectures"), model.get("head_dim")
    if not isinstance(architectures or [], list) or not all(isinstance(name, str) for name in architectures or []):
        raise TypeError(f"architectures must be a list of names, not {architectures!r}")
    if head_dim is not None and not isinstance(head_dim, int):
        raise TypeError(f"head_dim must be a number, not {head_dim!r}")
    return model


def _frozen(values: ArrayLike, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    array = np.array(values, dtype=dtype, order="C")  # a copy: the caller's array stays writable
    array.setflags(write=False)
    return array


def _read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and tensors of a file whose format version is known."""
    if not path.is_file():
        raise TangramError(f"--profile: there is no file {path}; make it with `tangram profile`")
    return _FILE.read(path, "numpy")


def _mean_spearman(samples: NDArray[np.float32]) -> float:
    """Mean pairwise Spearman correlation of the rows of [S, M]; NaN without a pair of rows that vary."""
    ranks = np.stack([_ranks(row) for row in samples])
    ranks -= ranks.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(ranks, axis=1)
    unit = ranks[norms > 0] / norms[norms > 0, None]
    if len(unit) < 2:
        return float("nan")
    pairs = np.triu_indices(len(unit), k=1)
    return float((unit @ unit.T)[pairs].mean())


def _ranks(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]
