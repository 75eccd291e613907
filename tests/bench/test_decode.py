# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from typer.testing import CliRunner

from vllm_tangram.bench import decode
from vllm_tangram.bench.decode import DecodeSetup, DecodeTimes, Filled
from vllm_tangram.cli.app import app
from vllm_tangram.errors import TangramError


def times(retention: float | None, *repeats: float) -> DecodeTimes:
    return DecodeTimes(retention, Filled(1000, retention or 1.0, 5000, 1), repeats)


def test_ratios_are_of_neighbours() -> None:
    """A machine that becomes twice as slow changes no ratio."""
    stock, ours = times(None, 1.0, 2.0, 4.0), times(1.0, 1.5, 3.0, 6.0)
    assert ours.ratios(stock) == [1.5, 1.5, 1.5]
    assert (stock.seconds, ours.seconds) == (2.0, 3.0)


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def measure(setup: DecodeSetup, retentions: list[float], progress: object) -> list[DecodeTimes]:
        seen.extend((setup, retentions))
        return [times(None, 0.1, 0.2, 0.1), times(0.25, 0.05, 0.12, 0.07)]

    monkeypatch.setattr(decode, "measure_decode", measure)
    arguments = ["bench", "decode", "some/model", "--batch", "3", "--retention", "0.25"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0
    assert seen == [DecodeSetup("some/model", 4096, 3, 64, 5), [0.25]]
    stock, ours = json.loads(result.stdout)["engines"]
    assert (stock["engine"], stock["retention"], stock["ratio_to_stock"]) == ("stock", None, 1.0)
    assert ours["milliseconds"] == pytest.approx(70)
    assert ours["ratio_to_stock"] == pytest.approx(0.6)
    assert ours["ratio_range"] == pytest.approx([0.5, 0.7])
    assert "retention 0.25" in CliRunner().invoke(app, arguments).stdout


@pytest.mark.parametrize("retention", ["0", "1.5", "nan"])
def test_wrong_retention(retention: str) -> None:
    result = CliRunner().invoke(app, ["bench", "decode", "--retention", retention])
    assert result.exit_code == 2
    assert "error: --retention: must be in (0, 1]" in result.stderr


class _FakeStepper:
    """Decodes at once, but only ``fits`` requests together; a request ends after two tokens."""

    kv_cache_bytes, num_threads = 5000, 1

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.waiting: dict[str, int] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int, *, ignore_eos: bool) -> None:
        self.waiting[request_id] = 0

    def step(self) -> object:
        from types import SimpleNamespace

        running = list(self.waiting)[: self.fits]
        for name in running:
            self.waiting[name] += 1
        finished = {name: "" for name in running if self.fits < len(self.waiting) and self.waiting[name] == 2}
        for name in finished:
            del self.waiting[name]
        held = tuple(10 for _ in running)
        return SimpleNamespace(
            seconds=0.1, generated=dict.fromkeys(running, 1), finished=finished, held_bytes=held, kept_fraction=0.5
        )


def test_fill() -> None:
    setup = DecodeSetup("", context=16, batch=3, steps=4, repeats=1)
    assert decode.fill(_FakeStepper(3), setup) == Filled(30, 0.5, 5000, 1)  # type: ignore[arg-type]


def test_fill_without_room() -> None:
    setup = DecodeSetup("", context=16, batch=3, steps=4, repeats=1)
    with pytest.raises(TangramError, match="3 requests of 16 tokens never decoded all together"):
        decode.fill(_FakeStepper(2), setup)  # type: ignore[arg-type]
