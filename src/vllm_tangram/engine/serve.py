# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server with head-group pages: everything that can be wrong is found before any process starts."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args, init_logger
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_tangram.config import TangramConfig
from vllm_tangram.embedded import MODEL_NAME
from vllm_tangram.engine.admission import request_check_installed
from vllm_tangram.engine.compat import check_vllm
from vllm_tangram.engine.options import vllm_refusals
from vllm_tangram.engine.ready import ready_options
from vllm_tangram.engine.resolve import EMBEDDED, model_path
from vllm_tangram.errors import TangramError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.tangram")

_CANNOT_LISTEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)


def serve(config: TangramConfig, arguments: Sequence[str]) -> None:
    """Serve until the process is told to stop.

    Args:
        config: our options.
        arguments: the rest of the command line, as ``vllm serve`` takes it.

    Raises:
        TangramError: something is wrong with the options, the model, the profile or the port; no process was started.

    """
    args = prepare(config, arguments)
    try:
        ServeSubcommand.cmd(args)
    except OSError as error:
        if error.errno not in _CANNOT_LISTEN:
            raise
        raise TangramError(
            f"cannot listen on {args.host or 'any address'}, port {args.port}: {error.strerror}; "
            "give another --port or --host"
        ) from error


def prepare(config: TangramConfig, arguments: Sequence[str]) -> argparse.Namespace:
    """vLLM's parsed arguments, completed for head-group pages and checked as far as it goes without weights.

    A retention profile is made here if there is none yet.

    Raises:
        TangramError: see ``serve``.
        SystemExit: vLLM's parser does not know an argument, or was asked for its help.

    """
    cli_env_setup()
    check_vllm()
    with vllm_refusals():
        args = _parse(arguments)
    _check_front_end()
    given = dict(vars(args))

    def build(options: dict[str, Any]) -> VllmConfig:
        vars(args).update(options)
        return AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)

    vars(args).update(ready_options(config, args.model, given, build))
    return args


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="vllm")
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args([command.name, *arguments])
    configure_logging_from_args(args)
    command.validate(args)
    if args.model_tag is None and args.model == AsyncEngineArgs.model:
        raise TangramError("no model given: tangram serve MODEL, where MODEL is a path, a name or the word `embedded`")
    name = args.model_tag or args.model
    args.model = args.model_tag = model_path(name)
    if name == EMBEDDED:
        args.served_model_name = args.served_model_name or [MODEL_NAME]
    return args


def _check_front_end() -> None:
    if envs.VLLM_USE_RUST_FRONTEND:
        raise TangramError(
            "VLLM_USE_RUST_FRONTEND is not supported: requests are checked in the Python front end; unset it"
        )
    if not request_check_installed():
        raise TangramError("vLLM did not load this plugin: run `tangram doctor` to see why")
