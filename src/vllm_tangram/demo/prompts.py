# SPDX-License-Identifier: Apache-2.0
"""The demo's prompts, made of the documentation that ships with Python."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

#: About the document `conversation` starts with.
QUESTIONS = (
    "What is pdb? Answer in one sentence.",
    "Which command continues execution until a breakpoint is hit?",
    "How do I print the value of an expression?",
)
_DOCUMENT = "debugger"
_TASK = "Summarise this excerpt from the documentation of Python."
_PLACE = "@@"


def document(tokenizer: Any, num_tokens: int) -> str:
    """The manual of Python's debugger: as many whole paragraphs of it as ``num_tokens`` tokens hold."""
    start = str(tokenizer.decode(_encode(tokenizer, topics[_DOCUMENT])[:num_tokens]))
    return start[: start.rindex("\n\n")]


def chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the assistant speaks."""
    return _encode(tokenizer, _template(tokenizer, messages))


def long_prompts(tokenizer: Any, count: int, num_tokens: int) -> list[list[int]]:
    """``count`` prompts of exactly ``num_tokens`` tokens that differ from the first words on."""
    before, after = _template(tokenizer, [{"role": "user", "content": _PLACE}]).split(_PLACE)
    text = _encode(tokenizer, "\n\n".join(topics[name] for name in sorted(topics) if name != _DOCUMENT))
    tail = _encode(tokenizer, f"\n\n{_TASK}{after}")
    prompts = []
    for number in range(count):
        head = _encode(tokenizer, f"{before}Excerpt {number + 1}.\n\n")
        length = num_tokens - len(head) - len(tail)
        start = number * num_tokens % max(len(text) - length, 1)
        prompts.append(head + text[start : start + length] + tail)
    return prompts


def _template(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
