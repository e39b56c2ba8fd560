"""`weft chat`: a conversation in the terminal.

Each line of stdin is a message; the answer streams to stdout. stdin can be a terminal or a pipe.
A terminal gets a prompt and help. There Ctrl-C stops one answer, and a message that cannot be
answered does not end the conversation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from weft.errors import ConfigError, EngineError, RequestError
from weft.serving.cli.options import (
    TopicCommand,
    greedy_by_default,
    sampling,
    sampling_params,
    takes,
)
from weft.serving.config.settings import EngineConfig
from weft.serving.config.sources import Settings

if TYPE_CHECKING:
    from weft.serving.engine.sampling_params import SamplingParams
    from weft.serving.llm import LLM, Conversation, Prompt

_COMMAND = re.compile(r"/[a-z]+( .*)?")
HELP = "/reset starts a new conversation, /system TEXT sets the instructions, /exit ends"


@click.command(cls=TopicCommand)
@click.option("--system", metavar="TEXT", help="instructions at the start of the conversation")
@sampling
@takes(EngineConfig, model=True)
def chat(settings: Settings, system: str | None, **sampling: Any) -> int:
    """Talk with MODEL.

    Each line is a message, from the keyboard or from a pipe. /reset starts a new conversation,
    /system TEXT also sets its instructions, /exit ends the command.

    \b
    weft chat
    weft chat Qwen/Qwen3-0.6B --system "Answer in French." --temperature 0.7
    """
    from weft.serving.llm import LLM

    params = sampling_params(sampling)
    with LLM.of(settings.build(EngineConfig)) as llm:
        converse(llm, greedy_by_default(params, llm), system)
    return 0


def write_answer(llm: LLM, prompt: Prompt | Conversation, params: SamplingParams) -> str:
    """Stream one answer and a newline to stdout.

    Returns:
        The answer.

    Raises:
        EngineError: the engine failed during the answer.
    """
    pieces = []
    with closing(llm.stream(prompt, params)) as deltas:
        for delta in deltas:
            pieces.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if delta.error is not None:
                raise EngineError(delta.error)
    print(flush=True)
    return "".join(pieces)


def decode(data: bytes) -> str:
    """Decode bytes from stdin; ConfigError if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8: {error}") from None


def converse(llm: LLM, params: SamplingParams, system: str | None = None) -> None:
    """Answer each line of stdin, until it ends or a line is /exit."""
    interactive = sys.stdin.isatty()
    messages = _opening(system)
    if interactive:
        print(HELP, file=sys.stderr)
    for line in _lines(interactive):
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return
        if command == "/system":
            system = rest.strip() or None
            messages = _opening(system)
        elif command == "/reset":
            messages = _opening(system)
        elif command == "/help":
            print(HELP, file=sys.stderr)
        elif interactive and _COMMAND.fullmatch(line):
            print(f"weft: there is no {command}; {HELP}", file=sys.stderr)
        elif line.strip():
            messages.append({"role": "user", "content": line})
            try:
                answer = write_answer(llm, messages, params)
                messages.append(_assistant_message(llm, messages, answer))
            except RequestError as error:
                if not interactive:
                    raise
                messages.pop()
                print(f"weft: error: {error}; /reset starts a new conversation", file=sys.stderr)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                messages.pop()
                print()


def _assistant_message(llm: LLM, messages: Conversation, text: str) -> dict[str, str]:
    """Make the assistant's message, with its reasoning apart, as chat templates expect it."""
    from weft.serving.api.parsing.parser import AnswerFormat
    from weft.serving.api.parsing.pieces import Answer

    parser = AnswerFormat.of(llm.tokenizer).parser(llm.tokenizer.chat_templates.render(messages))
    answer = Answer([*parser.push(text), *parser.flush()])
    reasoning = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {"role": "assistant", "content": answer.content} | reasoning


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (decode(line).rstrip("\r\n") for line in sys.stdin.buffer)
        return
    import readline  # noqa: F401  # gives input() a history and editing

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
