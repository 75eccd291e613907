# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_tangram.cli.app import app
from vllm_tangram.cli.demo import demo_json
from vllm_tangram.demo.prompts import QUESTIONS, chat, document, long_prompts
from vllm_tangram.demo.scenario import FULL, QUICK, Measured, Turn, run_scenario

SCHEMA = {
    "model": str,
    "retention": float,
    "prompt_tokens": int,
    "stock": {"kv_bytes_per_request": int, "requests_at_once": int, "requests_per_second": float},
    "tangram": {
        "kv_bytes_per_request": int,
        "requests_at_once": int,
        "requests_per_second": float,
        "kept_fraction": float,
        "pages_reclaimed": int,
    },
}


class Characters:
    """A tokenizer: one token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: bool) -> str:
        return "".join(f"<{message['role']}>{message['content']}</>" for message in messages) + "<assistant>"


class FakeStepper:
    """Serves ``fits`` requests at once, three steps each; a request holds 10 bytes more with every step."""

    tokenizer, kv_cache_bytes, pages_reclaimed, profile = Characters(), 1000, 0, "p.safetensors"

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.age: dict[str, int] = {}
        self.prompts: dict[str, str] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> None:
        self.age[request_id] = 0
        self.prompts[request_id] = self.tokenizer.decode(prompt)

    def step(self) -> Any:
        from types import SimpleNamespace

        running = list(self.age)[: self.fits]
        for name in running:
            self.age[name] += 1
        finished = {name: f"answer to {name}" for name in running if self.age[name] == 3}
        self.age = {name: age for name, age in self.age.items() if name not in finished}
        held = tuple(10 * self.age[name] for name in running if name in self.age)
        return SimpleNamespace(finished=finished, held_bytes=held, kept_fraction=0.25 if held else None)


def assert_schema(found: Any, schema: Any) -> None:
    if isinstance(schema, dict):
        assert list(found) == list(schema)
        for name, inner in schema.items():
            assert_schema(found[name], inner)
    else:
        assert type(found) is schema


def test_scenario() -> None:
    stepper = FakeStepper(fits=3)
    measured = run_scenario(stepper, QUICK)  # type: ignore[arg-type]
    assert (measured.kv_bytes_per_request, measured.kept_fraction) == (20, 0.25)
    assert measured.requests_at_once == 3
    assert measured.requests_per_second > 0
    assert [turn.question for turn in measured.turns] == list(QUESTIONS[: QUICK.turns])
    assert [turn.answer for turn in measured.turns] == ["answer to turn 1", "answer to turn 2"]
    assert "answer to turn 1" in stepper.prompts["turn 2"]
    assert stepper.prompts["turn 2"].startswith(stepper.prompts["turn 1"])
    assert len([name for name in stepper.prompts if name.startswith("burst")]) == QUICK.requests


def test_json() -> None:
    stock = Measured(400, 1.0, (), 2, 0.5, 0, 1000, None)
    ours = Measured(100, 0.25, (), 8, 0.6, 0, 1000, "p.safetensors")
    figures = demo_json(FULL, stock, ours)
    assert_schema(json.loads(json.dumps(figures)), SCHEMA)
    assert (figures["prompt_tokens"], figures["retention"]) == (FULL.prompt_tokens, 0.25)
    assert figures["stock"]["kv_bytes_per_request"] == 400
    assert figures["tangram"]["requests_at_once"] == 8


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_tangram.cli.demo import _print

    stock = Measured(4096, 1.0, (Turn("Why?", "Because it is so.", 1.0),), 2, 0.5, 0, 1 << 20, None)
    ours = Measured(1024, 0.25, (Turn("Why?", "No idea.", 2.0),), 8, 0.75, 0, 1 << 20, "p.safetensors")
    _print(FULL, stock, ours)
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("1.0 MiB of KV memory", "1.0 KiB (1 / 4.00)", "8 (4.00 x)", "25.0 %", "No idea.", "0.750 (1.50"):
        assert part in shown


def test_prompts() -> None:
    tokenizer = Characters()
    prompts = long_prompts(tokenizer, 20, 500)
    assert {len(prompt) for prompt in prompts} == {500}
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 20
    assert all(tokenizer.decode(prompt).endswith("</><assistant>") for prompt in prompts)
    text = document(tokenizer, 1000)
    assert 500 < len(text) <= 1000
    assert document(tokenizer, 2000).startswith(text + "\n\n")
    assert tokenizer.decode(chat(tokenizer, [{"role": "user", "content": "Hi"}])) == "<user>Hi</><assistant>"


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--json", str(tmp_path / "none" / "demo.json")])
    assert result.exit_code == 2
    assert "error: --json: there is no folder" in result.stderr


@pytest.mark.slow
@pytest.mark.engine
def test_quick_demo(tmp_path: Path, embedded: Path) -> None:
    """The real thing: a quarter of the memory, at least three times the requests."""
    arguments = ["demo", "--quick", "--json", tmp_path / "demo.json", "--plot", tmp_path / "demo.png"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert_schema(figures, SCHEMA)
    stock, ours = figures["stock"], figures["tangram"]
    assert ours["kept_fraction"] < 0.3
    assert 3.5 * ours["kv_bytes_per_request"] < stock["kv_bytes_per_request"]
    assert ours["requests_at_once"] >= 3.5 * stock["requests_at_once"]
    assert ours["pages_reclaimed"] == 0
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
