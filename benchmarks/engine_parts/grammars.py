"""Compiling grammars: how long a short one waits behind long ones, in seconds of wall time.

A short grammar is a schema with one property. A long one takes more than one second processor time
until it is refused. The model is `weft-demo`, with 1,536 tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from engine_parts.measure import Case
from weft.errors import RequestError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.grammar.compiler import GrammarCompiler
from weft.serving.engine.sampling_params import Grammar
from weft.serving.engine.tokenizer import load_tokenizer

LONG = 10
GOAL = 1.0

_numbers = count()


def _short() -> Grammar:
    """Make a new schema, not in the cache."""
    return Grammar("json_schema", f'{{"properties": {{"a{next(_numbers)}": {{}}}}}}')


def _long() -> Grammar:
    return Grammar("regex", f"(a{{1,{1000 + next(_numbers)}}}){{1,1000}}")


async def _behind(compiler: GrammarCompiler, long: int, keys: int) -> float:
    """Return the seconds for a short grammar behind long ones from some keys."""
    tasks = [asyncio.create_task(compiler.compile(_long(), f"key {i % keys}")) for i in range(long)]
    await asyncio.sleep(0)
    begin = time.perf_counter()
    await compiler.compile(_short(), "key 0" if keys == 1 else "another key")
    seconds = time.perf_counter() - begin
    for task in tasks:
        task.cancel()
    for done in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(done, asyncio.CancelledError | RequestError)
    return seconds


@contextmanager
def cases() -> Iterator[list[Case]]:
    """See the module's text."""
    config = EngineConfig()
    with asyncio.Runner() as runner:
        compiler = GrammarCompiler(config, load_tokenizer(config).vocab_size)

        def waits(long: int, keys: int) -> Callable[[float], float]:
            return lambda seconds: runner.run(_behind(compiler, long, keys))

        runner.run(compiler.compile(_short()))  # starts the process
        yield [
            Case("a short one alone", "s", waits(0, 1)),
            Case(f"behind {LONG} long ones of the same key", "s", waits(LONG, 1), at_most=GOAL),
            Case(f"behind {LONG} long ones of as many keys", "s", waits(LONG, LONG), at_most=GOAL),
        ]
        runner.run(compiler.close())
