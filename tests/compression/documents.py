# SPDX-License-Identifier: Apache-2.0
"""Scores of documents for tests that do not ask what the numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_tangram.compression.document import DocumentScores

#: Fingerprint of a model that there is not.
MODEL: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 3, "weights": "abc"}


def random_scores(ids: Sequence[int], model: dict[str, Any] = MODEL, seed: int = 0) -> DocumentScores:
    shape = (model["num_hidden_layers"], model["num_key_value_heads"], len(ids))
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).half()
    return DocumentScores(np.array(ids, np.int32), scores, model, {"method": "made up"}, {"date": "2026-12-01"})
