# SPDX-License-Identifier: Apache-2.0
"""Files of ours: tensors in safetensors, and a header in their metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from vllm_tangram.errors import TangramError


class UnreadableFile(TangramError):
    """A file that is no safetensors file with a header, or is cut short."""


@dataclass(frozen=True)
class TensorFile:
    """A kind of file, and what to say of one that is wrong.

    Attributes:
        name: of the kind, in a word.
        title: the same with its article.
        key: name of the header in the metadata.
        version: of the format.
        tensors: that a file must have.
        command: what makes one.

    """

    name: str
    title: str
    key: str
    version: int
    tensors: tuple[str, ...]
    command: str

    def metadata(self, header: dict[str, Any]) -> dict[str, str]:
        """A header, values that JSON can carry, as the metadata of a file."""
        return {self.key: json.dumps({"format_version": self.version, **header}, sort_keys=True)}

    def read(
        self, path: Path, framework: Literal["pt", "numpy"], *, header_only: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Header and tensors of a file that is there.

        Args:
            path: the file.
            framework: whose tensors to make.
            header_only: leave the tensors out.

        Raises:
            UnreadableFile: it cannot be read.
            TangramError: it is something else, of another format version, or lacks a tensor.

        """
        try:
            with safe_open(path, framework=framework) as file:
                text = (file.metadata() or {}).get(self.key)
                if text is None:
                    raise TangramError(f"{path} is not {self.title}; make one with `{self.command}`")
                header = json.loads(text)
                version = header["format_version"]
                if version != self.version:
                    raise TangramError(
                        f"{self.name} {path} has format version {version}, this vllm-tangram reads version "
                        f"{self.version}; upgrade vllm-tangram, or make the {self.name} again with `{self.command}`"
                    )
                missing = [name for name in self.tensors if name not in file.keys()]  # noqa: SIM118 (not a dict)
                if missing:
                    raise self._lacks(path, ", ".join(map(repr, missing)))
                return header, {} if header_only else {name: file.get_tensor(name) for name in self.tensors}
        except TangramError:
            raise
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnreadableFile(f"{self.name} {path} cannot be read ({error}); {self._advice}") from error

    @contextmanager
    def parsing(self, path: Path) -> Iterator[None]:
        """Turn what goes wrong with a header's or tensors' values into a `TangramError` that names the file."""
        try:
            yield
        except KeyError as error:
            raise self._lacks(path, repr(error.args[0])) from None
        except TangramError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise self.damaged(path, str(error)) from None

    def damaged(self, source: Path | str, reason: str) -> TangramError:
        """The error for values that cannot be."""
        return TangramError(f"{self.name} {source} is damaged: {reason}; {self._advice}")

    def _lacks(self, path: Path, what: str) -> TangramError:
        return TangramError(f"{self.name} {path} lacks {what}; {self._advice}")

    @property
    def _advice(self) -> str:
        return f"make it again with `{self.command}`"
