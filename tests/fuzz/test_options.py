# SPDX-License-Identifier: Apache-2.0
"""Combinations of options: an engine is configured exactly if ``tangram doctor`` lists none of them as refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.cli.test_serve_options import LLAMA, prepare

from vllm_tangram import TangramConfig, TangramError
from vllm_tangram.cli.app import app

#: What doctor calls it -> how it is asked for.
REFUSED: dict[str, tuple[str, ...]] = {
    "--speculative-config": ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
    "--kv-transfer-config": ("--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'),
    "--kv-events-config": ("--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "zmq"}'),
    "--kv-cache-dtype": ("--kv-cache-dtype", "fp8"),
    "--kv-sharing-fast-prefill": ("--kv-sharing-fast-prefill",),
    "--no-enable-chunked-prefill": ("--no-enable-chunked-prefill",),
    "--long-prefill-token-threshold": ("--long-prefill-token-threshold", "64"),
    "--no-scheduler-reserve-full-isl": ("--no-scheduler-reserve-full-isl",),
    "--enable-prompt-embeds": ("--enable-prompt-embeds",),
    "pooling models": ("--runner", "pooling"),
}
#: What works beside each other.
TAKEN: tuple[tuple[str, ...], ...] = (
    ("--enforce-eager",),
    ("--max-num-seqs", "7"),
    ("--max-model-len", "1000"),
    ("--dtype", "float32"),
    ("--block-size", "64"),
    ("--no-enable-prefix-caching",),
    ("--no-async-scheduling",),
    ("--scheduling-policy", "priority"),
    ("--enable-lora",),
    ("--kv-cache-dtype", "auto"),
    ("--kv-cache-memory-bytes", "200000000"),
    ("--logprobs-mode", "raw_logits"),
    ("--seed", "3"),
    ("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
#: Options of ours, right and wrong alone or together.
OURS = st.fixed_dictionaries(
    {"budgets": st.just("uniform")},
    optional={
        "retention": st.sampled_from([0.1, 0.25, 1.0]),
        "page_group_size": st.sampled_from([1, 3, 8]),
        "grouping": st.sampled_from(["global", "layer", "neighbours"]),
        "chunk_size": st.sampled_from([128, 1024]),
        "window": st.sampled_from([1, 16, 60]),
        "scorer": st.sampled_from(["keydiff", "snapkv", "streaming"]),
        "session_ttl": st.sampled_from([0.0, 5.0]),
    },
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """Doctor's list: option -> reason."""
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--no-model"]).stdout)
    return {each["option"]: each["reason"] for each in found["refused"]}


def test_every_row_is_one_of_doctors(verdicts: dict[str, str]) -> None:
    assert set(REFUSED) <= set(verdicts)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    refused=st.one_of(st.just([]), st.lists(st.sampled_from(sorted(REFUSED)), max_size=3, unique=True)),
    taken=st.lists(st.sampled_from(TAKEN), max_size=5, unique=True),
    ours=OURS,
)
def test_doctors_verdict(
    refused: list[str], taken: list[tuple[str, ...]], ours: dict[str, Any], model: str, verdicts: dict[str, str]
) -> None:
    arguments = [model, *(word for option in taken for word in option)]
    arguments += [word for name in refused for word in REFUSED[name]]
    config = TangramConfig(**ours)
    if refused:
        with pytest.raises(TangramError) as error:
            prepare(config, arguments, model)
        missing = [name for name in refused if f"{name}: {verdicts[name]}" not in str(error.value)]
        # vLLM itself says of a few that they do not go together; it stops at the first.
        assert not missing or (len(refused) + len(taken) > 1 and str(error.value).startswith(model)), str(error.value)
    else:
        args = prepare(config, arguments, model)
        assert args.additional_config["tangram"]["retention"] == config.retention


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_alone(name: str, model: str, verdicts: dict[str, str]) -> None:
    with pytest.raises(TangramError) as error:
        prepare(TangramConfig(budgets="uniform"), [model, *REFUSED[name]], model)
    assert f"{name}: {verdicts[name]}" in str(error.value)


@pytest.mark.parametrize("option", TAKEN, ids=lambda option: option[0])
def test_each_is_taken(option: tuple[str, ...], model: str, tmp_path: Path) -> None:
    prepare(TangramConfig(budgets="uniform"), [model, *option], model)
