# SPDX-License-Identifier: Apache-2.0
"""What the decode kernel's speed rests on can be read from its machine code, which needs no GPU to be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

#: Head size, query heads of a KV head, tokens of a block, dtype.
CASES = [
    (128, 4, 64, "bfloat16"),  # Qwen3-4B, Llama-3.1-8B
    (128, 7, 16, "float16"),  # Qwen2.5-7B, blocks smaller than a tile
    (64, 3, 64, "bfloat16"),  # SmolLM2-135M
    (64, 8, 32, "bfloat16"),  # gpt-oss-20b
    (96, 1, 128, "bfloat16"),
    (256, 2, 64, "bfloat16"),  # Gemma 3
    (128, 16, 64, "bfloat16"),  # the most query heads of a KV head
    (256, 16, 64, "bfloat16"),
]
# A multiprocessor of compute capability 9.0 has these; a thread block takes 1 KiB of shared memory for itself.
_REGISTERS, _SHARED, _OWN = 65536, 228 * 1024, 1024


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """What the compiler made of each case."""
    if not Path(triton.__file__).parent.joinpath("backends", "nvidia", "bin", "cuobjdump").exists():
        pytest.skip("this build of Triton has no assembler for NVIDIA GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("machine_code.py")
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(CASES)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_loads_are_pipelined_and_two_blocks_fit(builds: list[dict[str, int]], number: int) -> None:
    """The compiler drops the loop's pipeline without a word if it dislikes how a value is carried from tile to tile."""
    build = builds[number]
    assert build["shared"] >= build["ahead"], "keys, values and the query are not all copied ahead"
    assert build["spilled"] == 0
    by_registers = _REGISTERS // (build["threads"] * -(-build["registers"] // 8) * 8)
    assert min(by_registers, _SHARED // (build["shared"] + _OWN)) >= 2, build
