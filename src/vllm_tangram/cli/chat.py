# SPDX-License-Identifier: Apache-2.0
"""``tangram chat``: talk to a running server and see what the conversation costs it."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
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
    from openai.types.chat import ChatCompletionMessageParam

_COMMANDS = "/retention R, /file PATH, /reset, /quit"
_SAMPLING_SECONDS = 0.25


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


@dataclass(frozen=True)
class ServerPages:
    """The server's page pool at one moment, over all requests that run.

    Attributes:
        held: bytes of the pages in use.
        kept: that over full KV.
        running: requests that run.

    """

    held: float
    kept: float
    running: float

    @classmethod
    def read(cls, metrics: str) -> ServerPages | None:
        """From the text of ``/metrics``; None when nothing runs or the server has no head-group pages."""
        pages = _metric(metrics, "tangram:pages", 'state="in_use"')
        kept = _metric(metrics, "tangram:kv_retained_fraction")
        if not pages or not kept:
            return None
        return cls(pages * _metric(metrics, "tangram:page_bytes"), kept, _metric(metrics, "vllm:num_requests_running"))

    def __str__(self) -> str:
        whose = f" ({self.running:.0f} requests together)" if self.running > 1 else ""
        full = human_bytes(self.held / self.kept)
        return f"the server held {human_bytes(self.held)} of {full} at full KV, {percent(self.kept)}{whose}"


def _metric(text: str, name: str, label: str = "") -> float:
    """Sum of a metric's series, 0 without any."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*{re.escape(label)}.*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


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
    answer, usage = "", None
    interrupted = False
    with _PageWatch(str(client.base_url.join("../"))) as watch:
        try:
            with client.chat.completions.create(
                messages=sent, stream=True, stream_options={"include_usage": True}, extra_body=extra, **options
            ) as stream:
                for chunk in stream:
                    usage = chunk.usage or usage
                    text = (chunk.choices[0].delta.content or "") if chunk.choices else ""
                    if not text:
                        continue
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
    counts = f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated" if usage else "no token counts"
    facts = [*(["stopped"] if interrupted else []), counts, *([str(watch.last)] if watch.last else [])]
    console().print(Text("; ".join(facts), style="dim"))


class _PageWatch:
    """Reads the server's pages while a request runs: they are gone once the answer is complete, however short it was.

    Attributes:
        last: the newest figures in which anything ran.

    """

    def __init__(self, url: str) -> None:
        self.last: ServerPages | None = None
        self._url = url
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _PageWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        import httpx

        with httpx.Client(base_url=self._url, timeout=5) as http:
            while not self._done.wait(_SAMPLING_SECONDS):
                try:
                    self.last = ServerPages.read(http.get("metrics").text) or self.last
                except httpx.HTTPError:  # a proxy may serve the API alone
                    return


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
