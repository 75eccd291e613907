# SPDX-License-Identifier: Apache-2.0
"""Compile the decode kernel for an H100 or H200 and print, a line of JSON each, what the compiler made of it.

Run as a program without ``TRITON_INTERPRET``; needs no GPU: Triton brings its assembler.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_tangram.attention.decode import Tuning
from vllm_tangram.attention.decode_kernel import QUERY_ROWS, decode_kernel

_TARGET = GPUTarget("cuda", 90, 32)
_TYPES = {
    **dict.fromkeys(("query", "key", "value", "pool", "output"), "numbers"),
    **dict.fromkeys(("flat", "positions", "segments", "shares", "arrived"), "*i32"),
    **dict.fromkeys(("partial", "log_sums"), "*fp32"),
    "scale_log2": "fp32",
}


def describe(head_dim: int, ratio: int, block_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory of one build; what tiles and queries under way take of the last."""
    tuning = Tuning.default(head_dim, dtype)
    constants = tuning.constants(8, ratio, head_dim, block_size)
    numbers = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    types, aligned = {}, {}
    for index, parameter in enumerate(decode_kernel.params):
        kind = "constexpr" if parameter.name in constants else _TYPES.get(parameter.name, "i32")
        types[parameter.name] = numbers if kind == "numbers" else kind
        if kind not in ("constexpr", "fp32") and not parameter.do_not_specialize:
            aligned[(index,)] = [["tt.divisibility", 16]]
    places = {(decode_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=decode_kernel, signature=types, constexprs=places, attrs=aligned)
    kernel = triton.compile(source, target=_TARGET, options={"num_warps": tuning.warps, "num_stages": tuning.stages})
    registers, spilled = _resources(kernel.asm["cubin"])
    return {
        "registers": registers,
        "spilled": spilled,
        "shared": kernel.metadata.shared,
        "threads": 32 * tuning.warps,
        "ahead": (tuning.stages - 1) * (2 * tuning.tile + QUERY_ROWS.value) * constants["D_PADDED"] * dtype.itemsize,
    }


def _resources(machine_code: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of what did not fit into them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(describe(*case[:3], getattr(torch, case[3]))))
