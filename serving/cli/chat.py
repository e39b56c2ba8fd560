"""A conversation in the terminal: lines in, answers streamed out.

Works the same with a person and with a pipe, except that a person sees a
prompt and help, can stop an answer with Ctrl-C, and is told of a turn that
cannot be served instead of being thrown out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from weft.errors import ConfigError, EngineError, RequestError
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.parsing.pieces import Answer

if TYPE_CHECKING:
    from weft.serving.engine.sampling_params import SamplingParams
    from weft.serving.llm import LLM, Conversation, Prompt

HELP = "/reset forgets the conversation, /system TEXT sets the instructions, /exit ends"


def write_answer(llm: LLM, prompt: Prompt | Conversation, params: SamplingParams) -> str:
    """Stream one answer to stdout, ended by a newline; returns it.

    Raises EngineError when it fails half-way.
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


def decoded(data: bytes) -> str:
    """What came through a pipe; ConfigError when it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8: {error}") from None


def converse(llm: LLM, params: SamplingParams, system: str | None = None) -> None:
    """Answer each line of stdin until it ends or says /exit."""
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
        elif line.strip():
            messages.append({"role": "user", "content": line})
            try:
                answer = write_answer(llm, messages, params)
                messages.append(_turn(llm, messages, answer))
            except RequestError as error:
                if not interactive:
                    raise
                messages.pop()
                print(f"weft: error: {error}; /reset starts anew", file=sys.stderr)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                messages.pop()
                print()


def _turn(llm: LLM, messages: Conversation, text: str) -> dict[str, str]:
    """The assistant's message, its thought told from what it says, as chat templates have it."""
    parser = AnswerFormat.of(llm.tokenizer).parser(llm.tokenizer.render_chat(messages))
    answer = Answer([*parser.push(text), *parser.flush()])
    thought = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    return {"role": "assistant", "content": answer.content} | thought


def _opening(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _lines(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (decoded(line).rstrip("\r\n") for line in sys.stdin.buffer)
        return
    import readline  # noqa: F401  # gives input() a history and editing

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
