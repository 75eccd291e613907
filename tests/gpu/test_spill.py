# SPDX-License-Identifier: Apache-2.0
"""Host memory for sessions on a GPU: copies in the stream's order, and a conversation that comes back from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.engine.drive import Engine
from tests.engine.test_spill import check_copies

CHUNK = 512


@pytest.mark.parametrize("seed", range(5))
def test_copies_are_done_as_if_one_after_the_other(seed: int) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # as in vLLM's workers; the driver's call takes no default stream
        check_copies(seed, torch.device("cuda"))


def test_a_conversation_comes_back_from_the_host(make_engine: Callable[..., Engine], token_ids: list[int]) -> None:
    engine = make_engine(
        retention=0.25, chunk_size=CHUNK, max_model_len=4096, num_gpu_blocks_override=400, session_spill_gib=0.2
    )
    first = token_ids[: 3 * CHUNK + 30]
    [answer] = engine.ask([first], 8)
    for other in range(1, 4):
        engine.ask([token_ids[5000 * other : 5000 * other + 3500]], 2)
    [session] = [each for each in engine.llm.tangram_sessions() if each["tokens"] == 3 * CHUNK]
    assert session["spilled_pages"] == session["pages"]
    prompt = first + answer.tokens + token_ids[-20:]
    [again] = engine.ask([prompt], 8)
    assert again.cached == 3 * CHUNK
    assert engine.llm.tangram_drop_sessions() > 0
    [computed] = engine.ask([prompt], 8)
    assert computed.cached == 0
    assert again.tokens == computed.tokens
    assert again.logprobs == pytest.approx(computed.logprobs, abs=0.1)  # other batches round bfloat16 otherwise
