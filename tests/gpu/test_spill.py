# SPDX-License-Identifier: Apache-2.0
"""Host memory for sessions on a GPU: copies in the stream's order, a conversation that comes back from it, a fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.engine.drive import Engine
from tests.engine.test_spill import check_copies

from vllm_tangram.engine.host import HostBuffer
from vllm_tangram.engine.spill import Copies

CHUNK = 512
OPTIONS = {
    "retention": 0.25,
    "chunk_size": CHUNK,
    "max_model_len": 4096,
    "num_gpu_blocks_override": 400,
    "session_spill_gib": 0.2,
}


@pytest.mark.parametrize("seed", range(5))
def test_copies_are_done_as_if_one_after_the_other(seed: int) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # as in vLLM's workers; the driver's call takes no default stream
        check_copies(seed, torch.device("cuda"))


def spilled(engine: Engine, prompt: list[int], token_ids: list[int]) -> list[int]:
    """The answer to a prompt of three chunks and more, whose pages lie on the host when this returns."""
    [answer] = engine.ask([prompt], 8)
    for other in range(1, 4):
        engine.ask([token_ids[5000 * other : 5000 * other + 3500]], 2)
    [session] = [each for each in engine.llm.tangram_sessions() if each["tokens"] == 3 * CHUNK]
    assert session["spilled_pages"] == session["pages"]
    return answer.tokens


def test_a_conversation_comes_back_from_the_host(make_engine: Callable[..., Engine], token_ids: list[int]) -> None:
    engine = make_engine(**OPTIONS)
    first = token_ids[: 3 * CHUNK + 30]
    prompt = first + spilled(engine, first, token_ids) + token_ids[-20:]
    [again] = engine.ask([prompt], 8)
    assert again.cached == 3 * CHUNK
    assert engine.llm.tangram_drop_sessions() > 0
    [computed] = engine.ask([prompt], 8)
    assert computed.cached == 0
    assert again.tokens == computed.tokens
    assert again.logprobs == pytest.approx(computed.logprobs, abs=0.1)  # other batches round bfloat16 otherwise


def test_a_copy_that_fails_costs_no_answer(
    make_engine: Callable[..., Engine], token_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last of this file: the engine that it shares gives up its host memory."""
    engine = make_engine(**OPTIONS)
    assert engine.llm.llm_engine.reset_prefix_cache()
    first = token_ids[900 : 900 + 3 * CHUNK + 30]
    prompt = first + spilled(engine, first, token_ids) + token_ids[-20:]
    run, failed = HostBuffer.run, []

    def faulty(buffer: HostBuffer, copies: Copies) -> None:
        if any(not to_host for to_host, _ in copies.runs):
            failed.append(copies)
            raise RuntimeError("the bus is gone")
        run(buffer, copies)

    monkeypatch.setattr(HostBuffer, "run", faulty)
    [survived] = engine.ask([prompt], 8)
    assert len(failed) == 1
    assert engine.llm.tangram_stats()["sessions_spilled"] == 0
    assert engine.llm.tangram_drop_sessions() > 0
    [computed] = engine.ask([prompt], 8)
    assert survived.tokens == computed.tokens
    assert survived.logprobs == pytest.approx(computed.logprobs, abs=0.1)
    assert engine.free_pages == engine.total_pages
