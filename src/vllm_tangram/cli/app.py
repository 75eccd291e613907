# SPDX-License-Identifier: Apache-2.0
"""The ``tangram`` command: one line per subcommand, and how errors reach the user."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vllm_tangram import __version__
from vllm_tangram.cli import bench, chat, demo, doctor, evaluate, gate, inspect, profile, score, serve, sessions
from vllm_tangram.cli.rendering import print_error
from vllm_tangram.errors import TangramError


class _Group(TyperGroup):
    """Turns a ``TangramError`` of any command into one line on stderr and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TangramError as error:
            print_error(str(error))
            raise typer.Exit(2) from error


app = typer.Typer(
    name="tangram",
    cls=_Group,
    help="Non-uniform KV cache compression for unmodified vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"vllm-tangram {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# Commands import vLLM, torch and matplotlib inside their functions, so that `tangram --help` is immediate.
app.command("serve", **serve.COMMAND)(serve.serve)
app.command("profile")(profile.profile)
app.command("score")(score.score)
app.command("chat")(chat.chat)
app.add_typer(sessions.app, name="sessions")
app.command("doctor")(doctor.doctor)
app.command("inspect")(inspect.inspect)
app.add_typer(gate.app, name="gate")
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.demo)
app.command("eval")(evaluate.evaluate)


def main() -> None:
    """Entry point of the ``tangram`` script."""
    app()
