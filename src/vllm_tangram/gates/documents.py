# SPDX-License-Identifier: Apache-2.0
"""KVzip's scores of a document as prompts begin with it: which tokens these are, and their scores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jinja2 import TemplateError

from vllm_tangram.compression.document import DocumentScores
from vllm_tangram.errors import TangramError
from vllm_tangram.eval.dense import DenseModel
from vllm_tangram.gates.make import versions
from vllm_tangram.gates.targets import REPEAT_CHUNK, kvzip_scores, repeat_ids

Place = Literal["system", "user", "messages", "prompt"]
"""Where a document stands: it is the text of a chat's system or first user message, a chat's first messages (JSON), or
the beginning of a prompt without a template."""

#: What may follow a document. Where a text is cut into tokens may depend on its next characters, so only tokens that
#: are the same whichever of these follows belong to the document.
_FOLLOWING = ("", "a", " 1", "\n\nA", ".", "\u4e00")
#: What templates ask for the date, on no day on which anybody scores.
_ANOTHER_DAY = {"strftime_now": datetime(1999, 11, 30).strftime}


def read_document(path: Path, place: Place) -> list[dict[str, str]] | str:
    """A document as messages of a chat, or as the text of a prompt.

    Raises:
        TangramError: the file cannot be read, is empty, or has no messages with a role and a text.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TangramError(f"cannot read the document {path}: {error}") from None
    if not text.strip():
        raise TangramError(f"the document {path} is empty")
    if place == "prompt":
        return text
    if place != "messages":
        return [{"role": place, "content": text}]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TangramError(f"{path} is not valid JSON ({error}); without --as messages it is taken as a text") from None
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise TangramError(f'{path}: expected a JSON list of messages, each with texts "role" and "content"')
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def document_ids(tokenizer: Any, document: Sequence[dict[str, str]] | str) -> list[int]:
    """The tokens that all prompts begin with whose chat begins so, or whose text does; the last message may go on.

    Args:
        tokenizer: that of transformers.
        document: messages of a chat, or the text of a prompt.

    Returns:
        Token ids, those of the chat template before the text included.

    Raises:
        TangramError: the chat template does not take these messages, or writes a date before them, or there is none.

    """
    if isinstance(document, str):
        return _beginning([tokenizer.encode(document + text) for text in _FOLLOWING])
    if not tokenizer.chat_template:
        raise TangramError("the model has no chat template: give the document as the text of a prompt (--as prompt)")
    try:
        today, another_day = (list(_rendered(tokenizer, document, **options)) for options in ({}, _ANOTHER_DAY))
    except (TemplateError, ValueError, TypeError) as error:
        raise TangramError(f"the model's chat template does not take such messages: {error}") from None
    ids, ids_then = (
        _beginning([tokenizer.encode(text, add_special_tokens=False) for text in rendered])
        for rendered in (today, another_day)
    )
    if ids != ids_then:
        raise TangramError(
            "the model's chat template writes the day's date before the document, so no prompt of another day would "
            "begin with what was scored: give the model's folder a template that writes none, or give the document as "
            "the text of a prompt (--as prompt)"
        )
    return ids


def _beginning(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The first tokens that all have in common."""
    return [first for first, *_ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))]


def _rendered(tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> Iterator[str]:
    """Chats that begin with the messages, of which the last is ended, or goes on in one way or another."""
    *before, last = messages
    question = [] if last["role"] == "user" else [{"role": "user", "content": "?"}]
    for text in _FOLLOWING:
        chat = [*before, {**last, "content": last["content"] + text}, *question]
        yield tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)


def score_document(model: DenseModel, ids: Sequence[int], info: dict[str, str]) -> DocumentScores:
    """Read a document, let the model repeat it, and keep how much it looked at each token.

    Time: about three times that of a prefill. Memory: the document's KV, and what ``kvzip_scores`` takes.

    Args:
        model: the model, on the device to compute on.
        ids: tokens of the document, at least one.
        info: what the file says about it beside versions.

    Raises:
        TangramError: there are no tokens, or they and their repetition have no room in the model's context.

    """
    if not ids:
        raise TangramError("the document has no token that would be the same whatever follows it: give a longer one")
    longest = len(ids) + len(repeat_ids(model.tokenizer, ids[-REPEAT_CHUNK:], first=False))
    if model.max_tokens is not None and longest > model.max_tokens:
        raise TangramError(
            f"the document has {len(ids)} tokens; with the part that the model has to repeat at a time these are "
            f"{longest}, and the model's context has {model.max_tokens}: shorten the document"
        )
    scores = kvzip_scores(model, ids)
    recipe = {"method": "KVzip", "repeated_at_a_time": REPEAT_CHUNK}
    return DocumentScores(
        np.asarray(ids, np.int32), scores.to("cpu", torch.float16), model.fingerprint, recipe, info | versions()
    )
