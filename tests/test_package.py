# SPDX-License-Identifier: Apache-2.0
"""Rules that hold for the package as a whole."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_tangram

PACKAGE = Path(vllm_tangram.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FRONT = {"cli", "bench", "eval", "gates"}
# Folder or module -> what it must not import.
ABOVE = {
    "engine": FRONT,
    **dict.fromkeys(("budget", "pages", "compression", "attention", "config", "errors"), FRONT | {"engine"}),
}


def part(path: Path) -> str:
    """``budget/plan.py`` -> ``"budget"``, ``config.py`` -> ``"config"``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, wherever in it, ``if TYPE_CHECKING`` included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_engine_imports_vllm(path: Path) -> None:
    imported = {name for name in imports(path) if name == "vllm" or name.startswith("vllm.")}
    assert part(path) == "engine" or not imported


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    imported = {name.split(".")[1] for name in imports(path) if name.startswith("vllm_tangram.")}
    assert not imported & ABOVE.get(part(path), set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_names_its_license(path: Path) -> None:
    assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_import_is_quick_and_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import vllm_tangram; took = time.process_time() - start; "
        "print({'took': took, 'heavy': [*{'torch', 'vllm', 'numpy', 'pydantic', 'typer'} & sys.modules.keys()]})"
    )
    runs = [ast.literal_eval(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]
    assert [run["heavy"] for run in runs] == [[], [], []]
    assert min(run["took"] for run in runs) < 0.05


def test_lazy_names() -> None:
    from vllm_tangram.budget import RetentionProfile
    from vllm_tangram.config import TangramConfig

    assert vllm_tangram.RetentionProfile is RetentionProfile
    assert vllm_tangram.TangramConfig is TangramConfig
    assert set(vllm_tangram.__all__) <= set(dir(vllm_tangram))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vllm_tangram.nothing
