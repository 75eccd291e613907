# SPDX-License-Identifier: Apache-2.0
"""The embedded model starts at once: its profiles come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vllm_tangram
from vllm_tangram import RetentionProfile, TangramConfig
from vllm_tangram.budget import model_fingerprint
from vllm_tangram.compression import needs_gate, scorer_names
from vllm_tangram.compression.gate import Gate
from vllm_tangram.embedded import embedded_model
from vllm_tangram.pilot import pilot_samples

FOLDER = Path(vllm_tangram.__file__).parent / "profiles"


@pytest.mark.parametrize("scorer", scorer_names())
def test_fits_the_embedded_model_and_the_defaults(scorer: str) -> None:
    profile = RetentionProfile.load(FOLDER / f"smollm2-135m-instruct.{scorer}.safetensors")
    model = embedded_model()
    identity = model_fingerprint(json.loads((model / "config.json").read_text()), model)
    gate = (
        Gate.load(FOLDER.parent / "gates_data" / "smollm2-135m-instruct.safetensors").digest()
        if needs_gate(scorer)
        else None
    )
    profile.check(model=identity, scorer=scorer, gate=gate)
    defaults = TangramConfig()
    assert (profile.sinks, profile.window, profile.chunk_size) == (defaults.sinks, defaults.window, defaults.chunk_size)
    assert profile.num_samples == 50
    assert profile.domains == tuple(sample.domain for sample in pilot_samples(50))
    assert not any("/" in value for value in profile.info.values())  # nothing of the machine that made it
