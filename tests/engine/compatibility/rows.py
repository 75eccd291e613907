# SPDX-License-Identifier: Apache-2.0
"""What works and what is refused: every row of docs/compatibility.md and the check behind it.

``python -m tests.engine.compatibility.rows > docs/compatibility.md`` writes that page anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.engine.compatibility import checks
from tests.engine.compatibility.checks import with_options
from tests.engine.compatibility.lab import Lab
from tests.models import LATENT_ATTENTION, SLIDING_WINDOW, copy_without_weights


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        feature: what users call it.
        option: how it is asked for.
        check: starts it and asserts what the row says.
        reason: why it is refused, a part of the error; empty: it works.
        note: what else to know.
        slow: whether the check takes long.

    """

    feature: str
    option: str
    check: Callable[[Lab], Any]
    reason: str = ""
    note: str = ""
    slow: bool = False

    def markdown(self) -> str:
        outcome = f"refused: {self.reason}" if self.reason else "works"
        return f"| {self.feature} | {self.option} | {outcome}{'; ' * bool(self.note)}{self.note} |"


def refused(feature: str, option: str, reason: str, *, note: str = "", **options: Any) -> Row:
    """A row of what does not start."""
    return Row(feature, option, lambda lab: lab.refused(re.escape(reason), **options), reason, note)


def refused_model(feature: str, option: str, reason: str, changes: dict[str, Any], **options: Any) -> Row:
    """A row of models that are not served."""
    return Row(
        feature,
        option,
        lambda lab: lab.refused(
            re.escape(reason), copy_without_weights(lab.model, lab.folder / "model", **changes), **options
        ),
        reason,
    )


#: Asked for with each request; one pair of engines serves them all.
REQUESTS: tuple[Row, ...] = (
    Row("greedy answers", "`temperature` 0", checks.greedy),
    Row("sampling, penalties", "`seed`, `top_p`, `top_k`, `min_p`, `*_penalty`", checks.sampling),
    Row(
        "stops and biases",
        "`stop`, `logit_bias`, `allowed_token_ids`, `min_tokens`, `bad_words`",
        checks.stops_and_biases,
    ),
    Row("log-probabilities", "`logprobs`", checks.logprobs),
    Row(
        "prompt log-probabilities",
        "`prompt_logprobs`",
        checks.prompt_logprobs,
        note="computes its whole prompt, as stock does",
    ),
    Row("several answers", "`n` > 1", checks.several_answers),
    Row("beam search", "`LLM.beam_search`", checks.beam_search),
    Row("guided decoding", "`structured_outputs`: JSON schema, regex, choice, grammar", checks.structured),
    Row(
        "streaming input",
        "a generator as prompt",
        checks.streaming_input,
        reason="the whole prompt must be known at arrival",
    ),
)

#: Asked for over HTTP; one pair of servers serves them all.
SERVER: tuple[Row, ...] = (
    Row("streaming", "`stream`", checks.streaming, slow=True),
    Row("completions with echo", "`/v1/completions`, `echo`, `logprobs`", checks.completions, slow=True),
    Row("chat tools", "`tools`, `tool_choice`", checks.chat_tools, slow=True),
    Row("beam search over HTTP", "`use_beam_search`", checks.beam_search_served, slow=True),
    Row(
        "embeddings endpoint",
        "`/v1/embeddings`",
        checks.embeddings,
        reason="Not Found",
        note="as by stock for such models",
        slow=True,
    ),
)

#: Options of an engine.
OPTIONS: tuple[Row, ...] = (
    Row("LoRA", "`--enable-lora`", checks.lora, note="adapters do not share sessions"),
    Row("priority scheduling", "`--scheduling-policy priority`", checks.priority),
    Row("compiled model", "the default, without `--enforce-eager`", with_options(enforce_eager=False), slow=True),
    Row("float16", "`--dtype float16`", with_options(0.02, dtype="float16"), slow=True),
    Row("bfloat16", "`--dtype bfloat16`", with_options(0.1, dtype="bfloat16"), slow=True),
    Row("blocks of 64 tokens", "`--block-size 64`", with_options(block_size=64), slow=True),
    Row(
        "blocks of 128 tokens",
        "`--block-size 128`",
        with_options(block_size=128, ours={"chunk_size": 128}),
        slow=True,
    ),
    Row("no prefix cache", "`--no-enable-prefix-caching`", with_options(enable_prefix_caching=False), slow=True),
    Row("asynchronous scheduling off", "`--no-async-scheduling`", with_options(async_scheduling=False), slow=True),
)

#: Refused at start.
REFUSED: tuple[Row, ...] = (
    refused(
        "speculative decoding",
        "`--speculative-config`",
        "rejected draft tokens would have to be taken out of pages again",
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    ),
    refused("quantised KV cache", "`--kv-cache-dtype fp8`", "quantised KV is not supported", kv_cache_dtype="fp8"),
    refused(
        "chunked prefill off",
        "`--no-enable-chunked-prefill`",
        "prompts are compressed chunk by chunk",
        enable_chunked_prefill=False,
    ),
    refused("prompt embeddings", "`--enable-prompt-embeds`", "prompts must be tokens", enable_prompt_embeds=True),
    refused(
        "KV connectors",
        "`--kv-transfer-config`",
        "connectors address KV by token position, which compressed pages do not have",
        kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
    ),
    refused(
        "sleep mode",
        "`--enable-sleep-mode`",
        "Sleep mode is not supported on current platform",
        note="vLLM has none for CPUs; not tried on a GPU",
        enable_sleep_mode=True,
    ),
    refused(
        "blocks of 16 tokens", "`--block-size 16`", "--block-size must be a multiple of 32 on the CPU", block_size=16
    ),
    refused_model(
        "sliding-window models",
        "Mistral and others",
        "the window already bounds what a layer keeps",
        SLIDING_WINDOW,
    ),
    refused_model(
        "multi-head latent attention",
        "DeepSeek and others",
        "one latent vector serves all heads",
        LATENT_ATTENTION,
    ),
    refused_model(
        "embedding models",
        "`--runner pooling`",
        "only generation needs a KV cache",
        {},
        runner="pooling",
    ),
)

_INTRO = """# Compatibility

What works with vllm-tangram and what is refused, on a CPU. *Works* means: at retention 1, where nothing is evicted, a
small model answers as stock vLLM 0.32 does with the same options: the same tokens, and log-probabilities within 0.0001
in float32 (0.02 in float16, 0.1 in bfloat16). *Refused* means: the error says so, before any process starts; or, of a
request, to its client.

This page is made of the tests' own list, so every row was started: `python -m pytest tests/engine/compatibility`. A row
is changed in `tests/engine/compatibility/rows.py`; `python -m tests.engine.compatibility.rows > docs/compatibility.md`
writes this page. Graphs, block sizes and scheduling on CUDA: [performance](performance.md#cuda). All that is refused:
`tangram doctor`.
"""


def document() -> str:
    """docs/compatibility.md."""
    parts = [_INTRO]
    for title, rows in (
        ("Of requests", REQUESTS),
        ("Of the server", SERVER),
        ("Of the engine", OPTIONS),
        ("Refused at start", REFUSED),
    ):
        lines = ["| feature | asked for by | outcome |", "| --- | --- | --- |", *(row.markdown() for row in rows)]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(document(), end="")
