# SPDX-License-Identifier: Apache-2.0
"""Documents that an engine knows beforehand, and the requests whose prompts begin with them; shared by both runners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_tangram.compression.document import DocumentScores
from vllm_tangram.compression.known import KnownPrefix
from vllm_tangram.config import TangramConfig
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    import torch

    from vllm_tangram.budget import RetentionPlan

logger = init_logger("vllm.tangram")


def resolve_documents(config: TangramConfig, identity: Mapping[str, Any], max_tokens: int) -> TangramConfig:
    """Options with the full paths of document scores, which are checked against the model.

    Args:
        config: our options.
        identity: fingerprint of the model.
        max_tokens: longest prompt.

    Raises:
        TangramError: a file is missing, damaged, of another model, or of a document that no prompt has room for.

    """
    paths = []
    for path in config.document_scores:
        document = DocumentScores.load(path)
        document.check(model=identity)
        if document.num_tokens > max_tokens:
            raise TangramError(
                f"--document-scores: the document of {path} has {document.num_tokens} tokens, and no prompt can begin "
                f"with it: --max-model-len is {max_tokens}"
            )
        paths.append(str(Path(path).resolve()))
    return config.model_copy(update={"document_scores": tuple(paths)})


class KnownPrompts:
    """Scores of documents for the heads of one rank, read once, and what the requests of this worker share with them.

    Args:
        documents: the scores, on the device.

    """

    def __init__(self, documents: Sequence[DocumentScores]) -> None:
        self._documents = tuple(documents)
        self._prefixes: dict[int, KnownPrefix] = {}
        self._told: set[str] = set()

    @classmethod
    def load(cls, plan: RetentionPlan, rank: int, device: torch.device) -> KnownPrompts:
        """Read the files that the options name.

        Raises:
            TangramError: one cannot be read.

        """
        layers, heads = plan.sharding.part(rank)
        files = plan.config.document_scores
        return cls([DocumentScores.load(path).part(layers, heads, device) for path in files])

    def open(self, slot: int, prompt: Sequence[int] | None, *, adapted: bool) -> None:
        """A request gets a slot.

        Args:
            slot: it may have been another's before.
            prompt: its tokens.
            adapted: whether it runs with a LoRA adapter: the scores are those of the model without.

        """
        self.close(slot)
        if not self._documents or prompt is None or adapted:
            return
        if (prefix := KnownPrefix.of(prompt, self._documents)) is not None:
            self._prefixes[slot] = prefix
            self._tell(prefix)

    def close(self, slot: int) -> None:
        """The slot's request is gone; one that was never opened is nothing new."""
        self._prefixes.pop(slot, None)

    def of(self, slot: int) -> KnownPrefix | None:
        """What the prompt of a slot has in common with documents."""
        return self._prefixes.get(slot)

    def _tell(self, prefix: KnownPrefix) -> None:
        """Once for each document: else nobody could tell that the tokens of prompts are those that were scored."""
        for document, count in prefix.common:
            if count == document.num_tokens and document.source not in self._told:
                self._told.add(document.source)
                logger.info("Tangram: a prompt begins with the %d tokens of %s", count, document.source)
