# SPDX-License-Identifier: Apache-2.0
"""``tangram serve``: whose option is whose, and what is refused before any process starts."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from tests.compression.documents import random_scores
from typer.testing import CliRunner

from vllm_tangram import RetentionProfile, TangramConfig, TangramError
from vllm_tangram.cli.app import app

pytest.importorskip("vllm", reason="vLLM is not installed")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
MODEL = "MODEL"  # stands for the folder of `model`
UNIFORM = TangramConfig(budgets="uniform")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without weights: enough for everything that is checked before a process starts."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


def test_every_option_of_ours_is_there() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    names = {option: parameter for parameter in command.params for option in parameter.opts}
    for name, field in TangramConfig.model_fields.items():
        parameter = names["--" + name.replace("_", "-")]
        depends = name == "scorer"  # on whether the model has a gate
        assert parameter.default == (None if depends else field.default)
        assert parameter.help


def test_no_option_of_ours_is_one_of_vllm() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    vllms = {action.dest for action in make_arg_parser(FlexibleArgumentParser())._actions}
    assert "max_num_seqs" in vllms
    assert not vllms & set(TangramConfig.model_fields)


@pytest.mark.parametrize(
    ("line", "rest"),
    [
        ("m --retention 0.5 --chunk-size 512 --port 8001", "m --port 8001"),
        ("--retention=0.5 --port=8001 m -tp 1 --chunk-size=512 -O3", "--port=8001 m -tp 1 -O3"),
        ("--port 8001 --chunk-size 512 m -cc.mode=0 --retention 0.5 --no-enable-log-requests", None),
        ("--served-model-name a b --retention 0.5 --chunk-size 512 --seed -1 --model m", None),
    ],
)
def test_options_may_be_mixed_in_any_order(monkeypatch: pytest.MonkeyPatch, line: str, rest: str | None) -> None:
    calls: list[tuple[TangramConfig, list[str]]] = []
    monkeypatch.setattr("vllm_tangram.engine.serve.serve", lambda config, arguments: calls.append((config, arguments)))
    result = CliRunner().invoke(app, ["serve", *line.split()])
    assert result.exit_code == 0, result.output
    ((config, arguments),) = calls
    assert config == TangramConfig(retention=0.5, chunk_size=512)
    ours = {"--retention", "--chunk-size", "0.5", "512", "--retention=0.5", "--chunk-size=512"}
    assert arguments == (rest.split() if rest else [word for word in line.split() if word not in ours])


def test_a_wrong_value_of_ours_is_one_line() -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--retention", "1.5", "--scorer", "tarot"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --retention: ")
    assert "--scorer: unknown scorer 'tarot'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_help_lists_ours_and_names_those_of_vllm() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--page-group-size" in result.stdout
    assert "vllm serve --help=all" in result.stdout


def prepare(config: TangramConfig, arguments: list[str], model: str) -> Any:
    from vllm_tangram.engine.serve import prepare

    return prepare(config, [model if argument == MODEL else argument for argument in arguments])


def test_vllm_options_are_completed_and_otherwise_untouched(model: str) -> None:
    args = prepare(UNIFORM, ["--port", "8001", MODEL, "--max-num-seqs", "4", "--additional_config", '{"a": 1}'], model)
    assert (args.model, args.model_tag, args.port, args.max_num_seqs) == (model, model, 8001, 4)
    assert args.max_num_batched_tokens == 2048 + 4
    assert args.worker_cls.startswith("vllm_tangram.")
    assert args.scheduler_cls.startswith("vllm_tangram.")
    assert args.additional_config == {"a": 1, "tangram": UNIFORM.model_dump()}
    assert args.generation_config == "auto"
    assert args.enforce_eager is False
    assert args.served_model_name is None
    assert not logging.root.manager.disable


def test_the_embedded_model_has_a_name(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr("vllm_tangram.engine.resolve.embedded_model", lambda: Path(model))
    args = prepare(UNIFORM, ["embedded"], model)
    assert (args.model, args.served_model_name) == (model, ["SmolLM2-135M-Instruct"])
    assert prepare(UNIFORM, ["embedded", "--served-model-name", "x"], model).served_model_name == ["x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model given: tangram serve MODEL"),
        (["/no/such/model"], "there is no model folder /no/such/model"),
        ([MODEL, "--worker-cls", "mine.Worker"], "--worker-cls is set by vllm-tangram"),
        ([MODEL, "--kv-cache-dtype", "fp8"], "not supported by vllm-tangram: --kv-cache-dtype: quantised"),
        ([MODEL, "--block-size", "16"], "--block-size must be a multiple of 32"),
        ([MODEL, "--max-num-batched-tokens", "1024"], "--max-num-batched-tokens 1024 leaves no room"),
        (
            [MODEL, "--kv-cache-memory-bytes", "100000"],
            "-bytes 100000 is too small: .* need [0-9]+ bytes",
        ),
        ([MODEL, "--max-model-len", "5000"], "/model.*: User-specified max_model_len .5000. is greater"),
        ([MODEL, "--chat-template", "/no/such.jinja"], "chat template"),
    ],
)
def test_what_cannot_be_served_is_refused(model: str, arguments: list[str], message: str) -> None:
    with pytest.raises(TangramError, match=message) as error:
        prepare(UNIFORM, arguments, model)
    assert "\n" not in str(error.value)


def test_nodes_are_readied_alike(model: str) -> None:
    """What each node's processes read must make the same plan: they compare it when they start."""
    across = ["-tp", "2", "--nnodes", "2", "--master-addr", "host0", "--distributed-executor-backend", "mp"]
    first = prepare(UNIFORM, [MODEL, *across, "--node-rank", "0"], model)
    other = prepare(UNIFORM, [MODEL, *across, "--node-rank", "1", "--headless"], model)
    assert (first.node_rank, first.headless, other.node_rank, other.headless) == (0, False, 1, True)
    assert first.additional_config == other.additional_config
    assert first.worker_cls == other.worker_cls
    assert first.block_size == other.block_size


def test_a_stated_pool_need_is_enough(model: str) -> None:
    with pytest.raises(TangramError) as error:
        prepare(UNIFORM, [MODEL, "--kv-cache-memory-bytes", "1"], model)
    needed = int(str(error.value).split(" bytes;")[0].split()[-1])
    prepare(UNIFORM, [MODEL, "--kv-cache-memory-bytes", str(needed)], model)
    with pytest.raises(TangramError):
        prepare(UNIFORM, [MODEL, "--kv-cache-memory-bytes", str(needed - 1)], model)


def test_a_profile_is_made_once_and_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str) -> None:
    from vllm_tangram.engine.resolve import model_identity

    made = []

    def make_profile(config: TangramConfig, name: str, *_: object) -> RetentionProfile:
        made.append(name)
        return RetentionProfile(
            retentions=np.array([0.25, 0.5]),
            kept=np.sort(np.random.default_rng(0).uniform(size=(3, 2, 4, 2)).astype(np.float32), axis=1),
            scorer=config.scorer,
            model=model_identity(name, {}),
            sinks=config.sinks,
            window=config.window,
            chunk_size=config.chunk_size,
            info={},
        )

    monkeypatch.setattr("vllm_tangram.engine.resolve.make_profile", make_profile)
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TangramError, match="--page-group-size must be from 1 to 8"):
        prepare(TangramConfig(page_group_size=9), [MODEL], model)
    assert not made, "a profile was made for options that cannot be served"
    paths = [prepare(TangramConfig(), [MODEL], model).additional_config["tangram"]["profile"] for _ in range(2)]
    assert made == [model]
    assert paths[0] == paths[1]
    assert Path(paths[0]).is_relative_to(tmp_path / "cache")
    assert RetentionProfile.load(paths[0]).num_layers == 4


@pytest.mark.parametrize("agree", [True, False])
def test_a_profile_whose_samples_do_not_agree_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, agree: bool
) -> None:
    from vllm_tangram.engine import ready
    from vllm_tangram.engine.resolve import model_identity

    config = TangramConfig(profile=str(tmp_path / "profile"))
    kept = np.random.default_rng(0).uniform(size=(1 if agree else 3, 1, 4, 2)).astype(np.float32)
    RetentionProfile(
        retentions=np.array([0.25]),
        kept=np.tile(kept, (3 if agree else 1, 1, 1, 1)),
        scorer=config.scorer,
        model=model_identity(model, {}),
        sinks=config.sinks,
        window=config.window,
        chunk_size=config.chunk_size,
    ).save(tmp_path / "profile")
    warnings: list[str] = []
    monkeypatch.setattr(ready.logger, "warning", lambda text, *values: warnings.append(text % values))
    prepare(config, [MODEL], model)
    if agree:
        assert warnings == []
    else:
        (warning,) = warnings
        assert warning.startswith("Tangram: pilot samples do not agree on which heads matter (rank correlation")
        assert "tangram profile --samples" in warning
        prepare(config.model_copy(update={"budgets": "uniform"}), [MODEL], model)
        assert len(warnings) == 1  # equal budgets rest on no ranking


def test_a_profile_that_is_not_there(model: str) -> None:
    with pytest.raises(TangramError, match=r"--profile: there is no file /no/profile"):
        prepare(TangramConfig(profile="/no/profile"), [MODEL], model)


def test_scores_of_documents(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_tangram.engine.resolve import model_identity

    monkeypatch.chdir(tmp_path)
    identity = model_identity(model, {})
    for name, count, of in (("a", 3, identity), ("b", 4096, identity), ("other", 3, identity | {"hidden_size": 64})):
        random_scores(range(count), of).save(Path(name))
    config = UNIFORM.model_copy(update={"document_scores": ("a", "b")})
    ours = prepare(config, [MODEL], model).additional_config["tangram"]
    assert ours["document_scores"] == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert TangramConfig.parse(json.loads(json.dumps(ours))).document_scores == ours["document_scores"]
    for arguments, files, message in (
        ([], ("a", "none"), "there is no file none"),
        ([], ("other",), "other does not fit .hidden_size: recorded 64, served 128"),
        (["--max-model-len", "4095"], ("a", "b"), "document of b has 4096 tokens, .* --max-model-len is 4095"),
    ):
        with pytest.raises(TangramError, match=f"--document-scores: .*{message}"):
            prepare(UNIFORM.model_copy(update={"document_scores": files}), [MODEL, *arguments], model)


def test_a_document_may_be_named_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[TangramConfig] = []
    monkeypatch.setattr("vllm_tangram.engine.serve.serve", lambda config, _: given.append(config))
    result = CliRunner().invoke(app, ["serve", "m", "--document-scores", "a", "--document-scores", "b"])
    assert result.exit_code == 0, result.output
    assert given[0].document_scores == ("a", "b")


def test_options_of_nobody_are_left_to_vllm(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        prepare(UNIFORM, [MODEL, "--bogus", "1"], model)
    assert stop.value.code == 2
    assert "unrecognized arguments: --bogus 1" in capsys.readouterr().err


def test_front_ends_that_check_no_requests_are_refused(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr("vllm_tangram.engine.serve.request_check_installed", lambda: False)
    with pytest.raises(TangramError, match="tangram doctor"):
        prepare(UNIFORM, [MODEL], model)


@pytest.mark.engine
def test_a_port_in_use_leaves_nothing_running(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "vllm_tangram.cli", "serve", model, "--budgets", "uniform"]
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port, "--enforce-eager"],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, stderr = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 2
    assert stderr.splitlines()[-1].startswith(f"error: cannot listen on 127.0.0.1, port {port}: ")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
