# SPDX-License-Identifier: Apache-2.0
"""How likely real text is after a compressed context: replies of conversations, and the continuation of long texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from vllm_tangram.errors import TangramError
from vllm_tangram.eval.tasks.base import Case, Question, Request, field, needs_data
from vllm_tangram.eval.tasks.needles import hay_ids
from vllm_tangram.json_lines import read_json_lines

CONTINUATION = 128  # tokens
_ROLES = ("user", "assistant")
_MARK = "<|here|>"


def perplexity_cases(request: Request) -> Iterator[Case]:
    """Excerpts of a long text, evenly spread over it; the `CONTINUATION` tokens that follow each are the answer.

    Raises:
        TangramError: the text is shorter than one excerpt and its continuation.

    """
    hay = hay_ids(request)
    head = list(request.tokenizer.encode(""))  # what the model wants at the start of any text
    room = request.length - len(head)
    last = len(hay) - room - CONTINUATION
    if last < 0 or room < 1:
        raise TangramError(
            f"--lengths: the text has {len(hay)} tokens, {request.length} and {CONTINUATION} that follow are asked "
            "for; choose another length, or give a longer text with --data"
        )
    for index in range(request.count):
        random = Random(f"perplexity/{request.seed}/{request.length}/{index}")
        start = int(last * (index + random.random()) / request.count)
        end = start + room
        answer = tuple(hay[end : end + CONTINUATION])
        yield Case((*head, *hay[start:end]), (Question(f"after token {end}", (), answer),))


def dialogue_cases(request: Request) -> Iterator[Case]:
    """The last reply of conversations of several turns; all turns before the last are the context.

    Conversations are drawn from those whose history has at least ``length`` tokens.

    Raises:
        TangramError: no file is given, a line of it is wrong, or too few conversations are long enough.

    """
    what = "conversations (MT-Bench-101)"
    path = needs_data(request, what)
    cases = [_dialogue(request, where, record) for where, record in read_json_lines(path, "--data")]
    long = [case for case in cases if len(case.context) >= request.length]
    if len(long) < request.count:
        raise TangramError(
            f"--data: {path} has {len(long)} conversations with a history of {request.length} tokens, --samples asks "
            f"for {request.count}; ask for fewer or shorter ones"
        )
    random = Random(f"dialogues/{request.seed}/{request.length}")
    yield from random.sample(long, request.count)


def _dialogue(request: Request, where: str, record: dict[str, Any]) -> Case:
    turns = record.get("history")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise TangramError(f'--data: {where}: "history" must be a list of objects with "user" and "bot"')
    texts = [(field(turn, "user", where), field(turn, "bot", where)) for turn in turns]
    before, after = _last_turn(request.tokenizer, texts[:-1])
    user, bot = texts[-1]
    prompt, answer = request.ids(f"{user}{after}"), request.ids(bot)
    label = f"{record.get('task', 'conversation')} {record.get('id', where)}"
    return Case(tuple(request.ids(before)), (Question(label, tuple(prompt), tuple(answer)),))


def _last_turn(tokenizer: Any, past: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """What the model expects before a user's message that follows earlier turns, and between it and the reply."""
    if not tokenizer.chat_template:
        turns = "".join(f"User: {user}\nAssistant: {bot}\n" for user, bot in past)
        return f"{tokenizer.bos_token or ''}{turns}User: ", "\nAssistant: "
    messages = [{"role": role, "content": text} for turn in past for role, text in zip(_ROLES, turn, strict=True)]
    messages.append({"role": "user", "content": _MARK})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, after = text.split(_MARK)
    return before, after
