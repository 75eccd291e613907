# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from typer.testing import CliRunner

from vllm_tangram.bench import page_table
from vllm_tangram.bench.page_table import measure_page_table
from vllm_tangram.cli.app import app
from vllm_tangram.pages.reference import PythonPageTable


@pytest.mark.parametrize(("requests", "groups", "steps"), [(1, 1, 1), (3, 5, 4), (2, 7, 30)])
def test_times_are_positive(requests: int, groups: int, steps: int) -> None:
    assert all(seconds > 0 for seconds in vars(measure_page_table(requests, groups, steps)).values())


def test_tables_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(PythonPageTable):
        def _next_birth(self, request: object) -> int:
            return self.groups_total - 1 - super()._next_birth(request)  # type: ignore[arg-type]

    monkeypatch.setattr(page_table, "PythonPageTable", Wrong)
    with pytest.raises(AssertionError, match="slot 0, group 0 differ"):
        measure_page_table(2, 4, 3)


def test_command() -> None:
    result = CliRunner().invoke(app, ["bench", "pagetable", "--requests", "2", "--groups", "3", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["requests"], report["groups"]) == (2, 3)
    times = [value for name, value in report.items() if name.endswith("_microseconds")]
    assert len(times) == 4
    assert min(times) > 0


def test_command_for_people() -> None:
    result = CliRunner().invoke(app, ["bench", "pagetable", "--requests", "2", "--groups", "3"])
    assert result.exit_code == 0
    assert "2 requests, 3 head groups" in result.stdout
