"""Messages between the API process and the compiler process for grammars."""

from __future__ import annotations

from typing import Any

import msgspec

from weft.serving.config.settings import EngineConfig
from weft.serving.engine.sampling_params import Grammar

HEAD = 4
"""Bytes of the length in front of each message."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The first message to the process.

    Attributes:
        config: settings, with the tokenizer's name.
        size: number of columns in the model's logits.
    """

    config: EngineConfig
    size: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """An order to compile a grammar.

    Attributes:
        number: names this attempt.
        grammar: the grammar.
        seconds: maximum processor time.
        nice: nice value for its process.
    """

    number: int
    grammar: Grammar
    seconds: float
    nice: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """An order to give an attempt up, because nobody waits for it."""

    number: int


class Answer(msgspec.Struct, frozen=True):
    """The reply to Start. The first reply, to Vocabulary, is empty.

    Attributes:
        number: as in Start.
        tag: the grammar as xgrammar's structural tag.
        size: the compiled grammar's bytes in memory.
        slow: compiling the tag again takes long.
        error: reason for rejecting the grammar.
        fault: a failure that the grammar did not cause.
        late: the attempt took all its processor time.
        died: how the attempt's process died.
    """

    number: int = 0
    tag: str = ""
    size: int = 0
    slow: bool = False
    error: str | None = None
    fault: str | None = None
    late: bool = False
    died: str | None = None


def framed(message: Any) -> bytes:
    """Return a message for the pipe: its length, then MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD, "little") + data
