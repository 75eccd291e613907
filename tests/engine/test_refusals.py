# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused before any process starts, with the option's name and what to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from tests.models import LATENT_ATTENTION, SLIDING_WINDOW, copy_without_weights

import vllm_tangram
from vllm_tangram.engine import compat
from vllm_tangram.errors import TangramError

pytestmark = pytest.mark.engine


def refused(model: Path | str, message: str, **options: Any) -> None:
    """``LLM`` raises an error that matches, and leaves no process behind."""
    children = set(psutil.Process().children(recursive=True))
    options = {"retention": 0.25, "budgets": "uniform", "dtype": "float32", "enforce_eager": True, **options}
    with pytest.raises(TangramError, match=message):
        vllm_tangram.LLM(str(model), **options)
    assert set(psutil.Process().children(recursive=True)) <= children


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention": 0}, "--retention: .*greater than 0"),
        ({"retention": 1.2}, "--retention: .*less than or equal to 1"),
        ({"retention": "much"}, "--retention: .*number"),
        ({"scorer": "magic"}, "--scorer: unknown scorer 'magic'; known: .*snapkv"),
        (
            {"scorer": "keydiff", "gate": "/no/such/gate"},
            "is for scorers that are made with one, and keydiff is not",
        ),
        ({"gate": "/no/such/gate"}, "there is no gate /no/such/gate"),
        ({"page_group_size": 0}, "--page-group-size: "),
        ({"page_group_size": 91}, "--page-group-size"),
        ({"chunk_size": 100}, r"--chunk-size \(100\) must be a multiple of --block-size"),
        ({"window": 4096}, "sinks \\+ window"),
        ({"alpha": -1}, "--alpha"),
        ({"margin": "outside"}, "--margin"),
        ({"profile": "/no/such/file", "budgets": "profile"}, "/no/such/file"),
        ({"retentoin": 0.5}, "unknown option 'retentoin'; did you mean 'retention'?"),
        ({"worker_cls": "mine.Worker"}, "--worker-cls is set by"),
        ({"scheduler_cls": "mine.Scheduler"}, "--scheduler-cls is set by"),
        ({"block_size": 48}, "--block-size must be a multiple of 32"),
        ({"max_num_batched_tokens": 1024}, "--max-num-batched-tokens 1024 leaves no room"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "--speculative-config"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill"),
        ({"long_prefill_token_threshold": 512}, "--long-prefill-token-threshold"),
        ({"scheduler_reserve_full_isl": False}, "--no-scheduler-reserve-full-isl"),
        ({"kv_offloading_size": 1.0}, "--kv-(offloading-size|transfer-config)"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "--kv-transfer-config",
        ),
        ({"tensor_parallel_size": 2}, r"attention heads \(9\) must be divisible by tensor parallel size \(2\)"),
        ({"tensor_parallel_size": 3, "page_group_size": 31}, "from 1 to 30 for the 30 KV heads of a rank"),
        ({"pipeline_parallel_size": 3, "page_group_size": 31}, "from 1 to 30 for the 30 KV heads of a rank"),
        ({"data_parallel_size": 2}, "data.parallel.size"),
        # The first where Ray is installed, the second, which is vLLM's, where it is not.
        ({"distributed_executor_backend": "ray"}, "--distributed-executor-backend ray on a CPU|Failed to import Ray"),
        ({"decode_context_parallel_size": 3, "tensor_parallel_size": 3}, "decode.context.parallel"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"kv_cache_memory_bytes": 1 << 20}, "--kv-cache-memory-bytes 1048576 is too small"),
        ({"session_spill_gib": -1}, "--session-spill-gib: .*greater than or equal to 0"),
        ({"session_spill_gib": 1e6}, r"--session-spill-gib: 1000000\.00 GiB .* but only [\d.]+ GiB are available"),
        ({"session_spill_gib": 1e6, "tensor_parallel_size": 3}, r"--session-spill-gib: 1000000\.00 GiB .* but only"),
        ({"session_spill_gib": 0.001}, r"--session-spill-gib: 0\.001 GiB hold no chunk of 1024 tokens at .* bytes"),
        ({"session_spill_gib": 1, "enable_prefix_caching": False}, "--session-spill-gib: there are no sessions"),
        ({"num_gpu_blocks_override": 95}, "--num-gpu-blocks-override 95 is too small"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options(embedded: Path, options: dict[str, Any], message: str) -> None:
    refused(embedded, message, **options)


def test_a_check_that_is_neither_on_nor_off(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_CHECK", "yes")
    refused(embedded, "TANGRAM_CHECK must be 0 or 1, got 'yes'")


@pytest.fixture
def model_like(embedded: Path, tmp_path: Path) -> Callable[..., Path]:
    """The embedded model's folder with another config.json, and no weights."""
    return partial(copy_without_weights, embedded, tmp_path / "model")


def test_heads_that_ranks_cannot_share(model_like: Callable[..., Path]) -> None:
    folder = model_like(num_attention_heads=12, num_key_value_heads=6, head_dim=64)
    refused(folder, "--tensor-parallel-size 4 does not fit the model's 6 KV heads", tensor_parallel_size=4)


def test_no_profile_is_made_across_nodes(model_like: Callable[..., Path]) -> None:
    across = {"tensor_parallel_size": 3, "nnodes": 3, "distributed_executor_backend": "mp", "budgets": "profile"}
    refused(model_like(), "there is no retention profile of .* make one on one node .* --profile", window=48, **across)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            SLIDING_WINDOW,
            "sliding-window models",
        ),
        (
            LATENT_ATTENTION,
            r"\(MLA\) models",
        ),
        (
            {
                "architectures": ["MambaForCausalLM"],
                "model_type": "mamba",
                "state_size": 16,
                "conv_kernel": 4,
                "expand": 2,
                "time_step_rank": 36,
                "intermediate_size": 1152,
            },
            "Mamba models|attention-free",
        ),
    ],
    ids=["sliding window", "MLA", "Mamba"],
)
def test_models(model_like: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    refused(model_like(**changes), message, max_model_len=1024)


def test_a_profile_of_something_else(
    embedded: Path, model_like: Callable[..., Path], skewed_profile: Callable[[str], str], tmp_path: Path
) -> None:
    good = Path(skewed_profile("keydiff"))
    profiled = {"budgets": "profile", "scorer": "keydiff"}
    refused(embedded, "snapkv.*keydiff|keydiff.*snapkv", profile=str(good), budgets="profile", scorer="snapkv")
    other = model_like(num_hidden_layers=12)
    refused(other, "layers", profile=str(good), **profiled)

    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(good.read_bytes()[:-100])
    refused(embedded, "truncated.safetensors", profile=str(truncated), **profiled)
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"\x80\x04pickle?" * 100)
    refused(embedded, "garbage.safetensors", profile=str(garbage), **profiled)

    with safe_open(good, "np") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    newer = {key: value.replace('"format_version": 1', '"format_version": 99') for key, value in metadata.items()}
    assert newer != metadata
    save_file(tensors, tmp_path / "newer.safetensors", newer)
    refused(embedded, "newer.safetensors.*99", profile=str(tmp_path / "newer.safetensors"), **profiled)


def test_another_checkpoint_of_the_same_shape(
    embedded: Path, model_like: Callable[..., Path], skewed_profile: Callable[[str], str]
) -> None:
    folder = model_like()
    weights = bytearray((embedded / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    refused(folder, "weights", scorer="snapkv", profile=skewed_profile("snapkv"), budgets="profile")


def test_a_cache_that_cannot_be_written(embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "file"))
    # a window that no shipped profile was made with, so that one would have to be made now
    refused(embedded, "TANGRAM_CACHE", budgets="profile", window=48)


def test_an_engine_that_is_half_ours(embedded: Path) -> None:
    """Somebody wires the classes by hand and forgets one."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_tangram.config import TangramConfig
    from vllm_tangram.engine.options import engine_options

    options = engine_options(TangramConfig(retention=0.25, budgets="uniform"), {})
    for name, option in (("worker_cls", "--worker-cls"), ("scheduler_cls", "--scheduler-cls")):
        missing = {key: value for key, value in options.items() if key != name}
        config = EngineArgs(model=str(embedded), **missing).create_engine_config()
        with pytest.raises(TangramError, match=f"{option} is .*not vllm-tangram's"):
            compat.check_supported(config)


def test_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_vllm()
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(TangramError, match=r"vLLM 0\.33\.0 is installed, but vllm-tangram needs 0\.32"):
        compat.check_vllm()
    monkeypatch.undo()
    monkeypatch.delattr("vllm.v1.core.sched.scheduler.Scheduler._reserve_prefill_lookahead")
    with pytest.raises(TangramError, match="_reserve_prefill_lookahead"):
        compat.check_vllm()
    monkeypatch.undo()
    monkeypatch.setattr("vllm.v1.request.Request.__init__", lambda self: None)
    with pytest.raises(TangramError, match=r"requests of vLLM .* have no drop_stale_output, num_computed_tokens, "):
        compat.check_vllm()


def test_every_refusal_has_a_reason() -> None:
    assert len(compat.REFUSED) > 20
    assert all(option and len(reason) > 15 for option, reason in compat.REFUSED)
