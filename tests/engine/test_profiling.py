# SPDX-License-Identifier: Apache-2.0
"""A profile made by the engine is the competition of the dense reference's scores, and leaves no engine behind."""

from __future__ import annotations

from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm_tangram import TangramConfig, TangramError
from vllm_tangram.budget import PROFILE_RETENTIONS, RetentionProfile
from vllm_tangram.compression import get_scorer
from vllm_tangram.compression.competition import compete
from vllm_tangram.engine import profiling
from vllm_tangram.engine.profiling import profile_model
from vllm_tangram.engine.resolve import make_profile
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.pilot import Sample, pilot_samples

CONFIG = TangramConfig(scorer="keydiff", chunk_size=256, window=16)
TOKENS = 600  # two whole chunks and a part


def dense_kept(model: DenseModel, ids: list[int]) -> np.ndarray:
    """[R, L, H] fractions, chunk by chunk, full KV."""
    scorer, state, kept = get_scorer("keydiff"), model.empty(), 0
    for start in range(0, len(ids), CONFIG.chunk_size):
        chunk = ids[start : start + CONFIG.chunk_size]
        read = model.read(chunk, [scorer], sinks=CONFIG.sinks, window=CONFIG.window, after=state)
        kept = kept + compete(
            read.scores["keydiff"],
            PROFILE_RETENTIONS,
            protect_head=CONFIG.sinks if start == 0 else 0,
            protect_tail=min(CONFIG.window, len(chunk)),
        )
        state = read.state
    return np.asarray(kept) / len(ids)


@pytest.mark.engine
def test_the_engine_profiles_as_the_dense_reference_does(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # as for users: the engine is a process of its own
    engines = []

    def watched(*arguments: Any, **options: Any) -> RetentionProfile:
        engines.append(len(active_children()))
        return profile_model(*arguments, **options)

    monkeypatch.setattr(profiling, "profile_model", watched)
    samples = pilot_samples(2)
    made = make_profile(CONFIG, str(embedded), {"dtype": "float32"}, samples, "two texts", max_tokens=TOKENS)
    engines.append(len(active_children()))
    assert engines == [1, 0]  # the server's own engine starts next: a model that fits once must do
    assert made.domains == ("prose", "code")
    assert (made.scorer, made.chunk_size, made.window) == ("keydiff", 256, 16)
    assert made.info["tokens_per_sample"] == "600 to 600"

    dense = DenseModel.load(embedded, dtype=torch.float32)
    for sample, kept in zip(samples, made.kept, strict=True):
        expected = dense_kept(dense, dense.tokenizer.encode(sample.text)[:TOKENS])
        # Scores that differ by rounding may swap a token or two between heads.
        np.testing.assert_allclose(kept, expected, atol=3 / TOKENS)
        assert np.abs(kept - expected).mean() < 0.1 / TOKENS


def test_a_sample_that_is_too_short_starts_no_engine(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tangram.engine.llm.LLM", None)
    samples = [pilot_samples(1)[0], Sample("Too short.", "prose")]
    with pytest.raises(TangramError, match=r"sample 2 has .* tokens; a pilot sample needs"):
        make_profile(CONFIG, str(embedded), {"dtype": "float32"}, samples, "two texts", max_tokens=TOKENS)
