# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_tangram import TangramError, __version__
from vllm_tangram.cli.app import app
from vllm_tangram.cli.rendering import human_bytes, human_tokens, percent, print_json


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"vllm-tangram {__version__}\n")


def test_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: object) -> None:
        raise TangramError("profile p is damaged [/red]: make it again, " + "long " * 60)

    monkeypatch.setattr("vllm_tangram.budget.RetentionProfile.load", fail)
    result = CliRunner().invoke(app, ["inspect", "p"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: profile p is damaged [/red]: make it again")
    assert result.stderr.count("\n") == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, atexit; from vllm_tangram.cli.app import main; sys.argv = ['tangram', '--help']; "
        "heavy = {'torch', 'vllm', 'numba', 'matplotlib'}; "
        "atexit.register(lambda: print('loaded:', *heavy & sys.modules.keys())); main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("loaded:")


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [{"c": float("inf")}], "d": (1, "é")})
    assert "".join(capsys.readouterr().out.split()) == '{"a":null,"b":[{"c":null}],"d":[1,"é"]}'


def test_human_numbers() -> None:
    assert [human_bytes(count) for count in (0, 1023, 1536, 1 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 GiB",
        "5.0 TiB",
    ]
    assert [human_tokens(count) for count in (0, 1000, 1024, 131072)] == ["0", "1000", "1k", "128k"]
    assert [percent(share) for share in (0.25, 1, float("nan"))] == ["25.0 %", "100.0 %", "-"]
