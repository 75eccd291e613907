# SPDX-License-Identifier: Apache-2.0
"""What a chat template puts around a user's message."""

from __future__ import annotations

from typing import Any

_MARK = "<|here|>"


def chat_frame(tokenizer: Any) -> tuple[str, str]:
    """What a model expects before a user's message, and between it and its answer; without a template next to nothing.

    Args:
        tokenizer: that of transformers.

    """
    if not tokenizer.chat_template:
        return tokenizer.bos_token or "", "\n"
    message = [{"role": "user", "content": _MARK}]
    before, after = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split(_MARK)
    return before, after
