# SPDX-License-Identifier: Apache-2.0
"""Retention profiles: what a scorer keeps of each member, measured once per model and scorer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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

#: Levels at which the heads compete; budgets in between are interpolated.
PROFILE_RETENTIONS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

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
        domains: [S] what kind of text each sample is, such as "code"; empty where it is not recorded.
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
    domains: tuple[str, ...] = ()
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
        if self.domains and len(self.domains) != kept.shape[0]:
            raise self._damaged(f"{len(self.domains)} domains for {kept.shape[0]} samples")

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
        if self.domains:
            header["domains"] = list(self.domains)
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
                domains=_checked_domains(header.get("domains", [])),
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

    def kept_at(self, x: float) -> NDArray[np.float64]:
        """[S, L, H] float64, fractions kept at level ``x`` in [0, 1]: linear between levels, 0 at 0 and 1 at 1."""
        first = self.kept[:, :1]
        kept = np.concatenate([np.zeros_like(first), self.kept, np.ones_like(first)], axis=1, dtype=np.float64)
        levels = np.concatenate([[0.0], self.retentions, [1.0]])
        upper = int(np.clip(np.searchsorted(levels, x, side="right"), 1, len(levels) - 1))
        share = (x - levels[upper - 1]) / (levels[upper] - levels[upper - 1])
        return (1.0 - share) * kept[:, upper - 1] + share * kept[:, upper]

    def subset(self, samples: NDArray[np.bool_]) -> RetentionProfile:
        """The same of some samples, ``[S]`` bool, at least one."""
        domains = tuple(name for name, taken in zip(self.domains, samples, strict=False) if taken)
        return replace(self, kept=self.kept[samples], domains=domains)

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


def _checked_domains(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"domains must be a list of names, not {names!r}")
    return tuple(names)


def _frozen(values: ArrayLike, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    array = np.array(values, dtype=dtype, order="C")  # a copy: the caller's array stays writable
    array.setflags(write=False)
    return array


def _read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and tensors of a file whose format version is known."""
    if not path.is_file():
        raise TangramError(f"--profile: there is no file {path}; make it with `tangram profile`")
    return _FILE.read(path, "numpy")
