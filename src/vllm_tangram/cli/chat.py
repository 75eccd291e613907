# SPDX-License-Identifier: Apache-2.0
"""``tangram chat``: talk to a running server and see what the conversation costs it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from vllm_tangram.cli.rendering import console, human_bytes, percent, print_error
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionMessageParam

_COMMANDS = "/retention R, /file PATH, /reset, /quit"


def chat(
    url: Annotated[str, typer.Option(help="The server's OpenAI API.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Name of the model; without it the server's first.")] = None,
    retention: Annotated[
        float | None,
        typer.Option(help="Share of full KV to keep of a prompt; without it the server's own.", min=0, max=1),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 512,
    temperature: Annotated[float | None, typer.Option(help="Without it the model's own.", min=0)] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A text to talk about; goes with the first message. May be repeated.")
    ] = None,
) -> None:
    """Chat with a server started by `tangram serve`.

    Commands: /retention R, /file PATH, /reset, /quit. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    conversation = Conversation(system, [_read_document(path) for path in file or ()])
    client, name = _connect(url, model)
    options: dict[str, Any] = {"model": name, "max_tokens": max_tokens, "temperature": temperature}
    if sys.stdin.isatty():
        console().print(Text(f"{name} at {url}. {_COMMANDS}; Ctrl-D leaves.", style="dim"))
    for line in _lines():
        command, _, argument = line.partition(" ")
        try:
            if command == "/quit":
                return
            if command == "/reset":
                conversation.reset()
            elif command == "/file":
                conversation.documents.append(_read_document(Path(argument.strip()).expanduser()))
            elif command == "/retention":
                retention = _retention(argument)
            elif command.startswith("/"):
                raise TangramError(f"{command} is no command; there are {_COMMANDS}")
            else:
                _turn(client, conversation, line, retention, options)
        except TangramError as error:
            print_error(str(error))


@dataclass
class Conversation:
    """What was said so far.

    Attributes:
        system: the system message.
        opening: documents that go with the first message.
        messages: as the OpenAI API takes them.
        documents: texts that go with the next message.

    """

    system: str | None
    opening: list[str]
    messages: list[ChatCompletionMessageParam] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to how it began."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.documents = list(self.opening)

    def with_question(self, question: str) -> list[ChatCompletionMessageParam]:
        """The messages to send; nothing is remembered before ``add``."""
        return [*self.messages, {"role": "user", "content": "\n\n".join([*self.documents, question])}]

    def add(self, sent: list[ChatCompletionMessageParam], answer: str) -> None:
        """Remember a turn."""
        self.messages = [*sent, {"role": "assistant", "content": answer}]
        self.documents = []


def _connect(url: str, model: str | None) -> tuple[OpenAI, str]:
    """A client of the server, and the model to ask.

    Raises:
        TangramError: nobody answers, or another kind of server, or it does not have this model.

    """
    import openai

    client = openai.OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "EMPTY"), max_retries=0)
    try:
        names = [served.id for served in client.models.list().data]
    except openai.APIConnectionError as error:
        raise TangramError(
            f"no server answers at {url} ({error.__cause__ or error}): start one with `tangram serve MODEL`, "
            "or give its --url"
        ) from error
    except openai.APIError as error:
        raise TangramError(f"{url} is no OpenAI API ({_reason(error)}): give --url, with /v1 at its end") from error
    if not names or (model is not None and model not in names):
        raise TangramError(f"the server at {url} has no model {model or ''}; it has: {', '.join(names) or 'none'}")
    return client, model or names[0]


def _turn(
    client: OpenAI, conversation: Conversation, question: str, retention: float | None, options: dict[str, Any]
) -> None:
    """Ask, print the answer as it comes and one line of figures, and remember both.

    Raises:
        TangramError: the server refused, or is gone.

    """
    import httpx
    import openai

    sent = conversation.with_question(question)
    extra = {} if retention is None else {"vllm_xargs": {"retention": retention}}
    answer = ""
    usage: CompletionUsage | None = None
    interrupted = False
    try:
        with client.chat.completions.create(
            messages=sent, stream=True, stream_options={"include_usage": True}, extra_body=extra, **options
        ) as stream:
            for chunk in stream:
                usage = chunk.usage or usage
                text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                answer += text
                sys.stdout.write(text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        interrupted = True
    except (openai.APIError, httpx.HTTPError) as error:
        raise TangramError(_reason(error)) from error
    finally:
        if answer:
            print()
    if answer:
        conversation.add(sent, answer)
    facts = ["stopped"] if interrupted else []
    if usage is None:
        facts.append("no token counts")
    else:
        facts.append(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated")
        if memory := _memory(client, usage, retention):
            facts.append(memory)
    console().print(Text("; ".join(facts), style="dim"))


def _memory(client: OpenAI, usage: CompletionUsage, retention: float | None) -> str | None:
    """What the request held when it ended; None from a server that is not `tangram serve`."""
    import openai

    asked = {
        "prompt_tokens": usage.prompt_tokens,
        "generated_tokens": usage.completion_tokens,
        **({} if retention is None else {"retention": retention}),
    }
    try:
        answer = client.get("/tangram/memory", cast_to=object, options={"params": asked})
    except openai.APIError:  # a stock server, or a proxy that lets the OpenAI API alone through
        return None
    if not isinstance(answer, dict) or not {"bytes", "full_kv_bytes"} <= answer.keys():
        return None
    held, full = answer["bytes"], answer["full_kv_bytes"]
    return f"held {human_bytes(held)} of {human_bytes(full)} at full KV, {percent(held / full)}"


def _reason(error: Exception) -> str:
    """What the server said, without the wrapping."""
    body = getattr(error, "body", None)
    message = body.get("message") if isinstance(body, dict) else None
    return " ".join(str(message or error).split())


def _lines() -> Iterator[str]:
    """Lines of stdin that are not blank, until its end. Ctrl-C at the prompt drops the line."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 (gives input() its editing keys)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            if not interactive:
                return
            continue
        if line:
            yield line


def _read_document(path: Path) -> str:
    try:
        return f"Document {path.name}:\n\n{path.read_text(encoding='utf-8').strip()}"
    except (OSError, UnicodeDecodeError) as error:
        raise TangramError(f"cannot read {path} as text: {error}") from error


def _retention(argument: str) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise TangramError(f"/retention needs a number above 0 and up to 1, such as /retention 0.5, got {argument!r}")
    return value
