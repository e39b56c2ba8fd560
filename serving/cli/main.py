"""The `weft` command.

Each command has its own file. Commands write results to stdout, and everything else to stderr. An
error that weft raises is one line. The exit status is then 1, or 2 if the command line or a
setting is wrong; after an interrupt it is 130.

Only this folder reads argv and the environment. Heavy libraries are imported when a command runs,
so `weft --version` and `--help` stay quick.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import NoReturn

import click

from weft.errors import ConfigError, WeftError
from weft.serving.cli.batch import batch
from weft.serving.cli.bench.command import bench
from weft.serving.cli.chat import chat
from weft.serving.cli.check import check
from weft.serving.cli.compile import compile_steps
from weft.serving.cli.config import config
from weft.serving.cli.doctor import doctor
from weft.serving.cli.eval import evaluate
from weft.serving.cli.generate import generate
from weft.serving.cli.join import join
from weft.serving.cli.plan.command import make_plan
from weft.serving.cli.quantize import quantize
from weft.serving.cli.serve import serve
from weft.serving.config import logs
from weft.version import __version__


@click.group(invoke_without_command=True, context_settings={"max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def weft(context: click.Context) -> int:
    """Serve large language models, and use them from the command line.

    \b
    weft generate "What is 47 + 85?"     one answer
    weft serve                           an OpenAI-compatible endpoint
    weft COMMAND --help                  more about a command

    MODEL is OWNER/NAME on the Hugging Face hub, a checkpoint's directory, a GGUF file, or a bundled
    model: weft-demo, the default, or weft-demo-moe.

    You can give each setting as a flag (--max-queue), as a variable (WEFT_MAX_QUEUE), or as a key
    in the --config file (max_queue). The flag wins over the variable, and the variable over the
    file. `weft config` shows all values.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


for command in (
    *(batch, bench, chat, check, compile_steps, config),
    *(doctor, evaluate, generate, join, make_plan, quantize, serve),
):
    weft.add_command(command)


def main() -> NoReturn:
    """Run the command line, and exit with its status."""
    status = 1
    logs.configure()  # before a model is loaded in this process
    try:
        status = weft(prog_name="weft", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        status = _show_error(error.format_message(), 2)
    except WeftError as error:
        status = _show_error(str(error), 2 if isinstance(error, ConfigError) else 1)
    except click.Abort:  # click raises it for an interrupt
        status = 130
    except BrokenPipeError:  # the reader has closed stdout, as in `weft ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if any(thread.name == "weft-core" for thread in threading.enumerate()):
        # The thread still loads a model. At a normal exit, Python would stop the thread inside
        # native code, which aborts the process.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _show_error(message: str, status: int) -> int:
    logs.say(f"weft: error: {message}", logging.ERROR)
    return status


if __name__ == "__main__":
    main()
