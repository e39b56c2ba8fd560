"""Grammars that would hang, crash or fill the memory are refused, and the next one works."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, get_args

import psutil
import pytest
import pytest_asyncio
import xgrammar

from weft.errors import EngineError, RequestError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.grammar import trial
from weft.serving.engine.grammar.compiler import LANES, GrammarCompiler
from weft.serving.engine.grammar.messages import Start, Stop, Vocabulary
from weft.serving.engine.grammar.structural_tag import FORMATS
from weft.serving.engine.protocol import Compiled
from weft.serving.engine.sampling_params import Grammar, GrammarKind
from weft.serving.engine.tokenizer import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(grammar_timeout=20.0)


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def wide(size: int, *, required: bool = False) -> str:
    """A schema with many texts."""
    texts = {f"property_{i}": {"type": "string"} for i in range(size)}
    return json.dumps(
        {"type": "object", "properties": texts, "required": [*texts] if required else []}
    )


def tag(form: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def token_triggered(*tokens: int) -> str:
    """Each token begins a tag."""
    tags = [{"begin": {"token": t}, "content": {"type": "any_text"}, "end": "!"} for t in tokens]
    return tag({"type": "token_triggered_tags", "trigger_tokens": tokens, "tags": tags})


HOSTILE: dict[str, tuple[GrammarKind, str]] = {
    "repetitions": ("regex", "(a{1,1000}){1,1000}"),
    "more repetitions": ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "a deep regex": ("regex", "(" * 60_000 + "a" + ")" * 60_000),
    "an open group": ("regex", "(a"),
    "lookahead": ("regex", "(?=a)b"),
    "a back reference": ("regex", r"(a)\1"),
    "a deep schema": ("json_schema", nested(10_000)),
    "a less deep schema": ("json_schema", nested(100)),
    "a schema of itself": ("json_schema", '{"$ref": "#"}'),
    "schemas of each other": (
        "json_schema",
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
    ),
    "a missing schema": ("json_schema", '{"$ref": "#/$defs/a"}'),
    "a schema elsewhere": ("json_schema", '{"$ref": "http://localhost/schema"}'),
    "a pattern of repetitions": (
        "json_schema",
        '{"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}',
    ),
    "a character that is none": ("regex", "a\x00b"),
    "an ambiguous choice": (
        "json_schema",
        '{"oneOf": [{"type": "number"}, {"type": "integer"}]}',
    ),
    "no integer": ("json_schema", '{"type": "number", "multipleOf": 0.5}'),
    "a number without an end": (
        "json_schema",
        '{"type": "integer", "maximum": 1' + "0" * 400 + "}",
    ),
    "many optional properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(600)}}),
    ),
    "a huge number": ("json_schema", '{"type": "integer", "minimum": -1e30, "maximum": 1e40}'),
    "nothing": ("json_schema", "false"),
    "a deep grammar": ("ebnf", "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000),
    "a grammar of itself": ("ebnf", "root ::= root"),
    "a grammar with many readings": ("ebnf", 'root ::= root root | "a"'),
    "a list of lists": ("ebnf", "root ::= item*\nitem ::= item item | [a-z]"),
    "a missing rule": ("ebnf", "root ::= other"),
    "no root": ("ebnf", 'other ::= "a"'),
    "no tag": ("structural_tag", "{}"),
    "an unknown tag": ("structural_tag", tag({"type": "x"})),
    "an unknown tag within": ("structural_tag", tag({"type": "star", "content": {"type": "x"}})),
    "a tag that is none": ("structural_tag", tag({"type": ["star"]})),
    "a schema without a type": ("structural_tag", tag({"json_schema": {"not": {}}})),
    "an older schema": (
        "structural_tag",
        tag({"type": "qwen_xml_parameter", "json_schema": {"type": "object", "not": {}}}),
    ),
    "a rule of no token": (
        "structural_tag",
        tag({"type": "token_dispatch", "rules": [["no token", {"type": "any_text"}]]}),
    ),
    "rules that are none": ("structural_tag", tag({"type": "token_dispatch", "rules": [1, []]})),
    "too many tokens": (
        "structural_tag",
        tag({"type": "any_tokens", "exclude_tokens": list(range(300, 600))}),
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = make(CONFIG)
    yield compiler
    await compiler.close()


def make(config: EngineConfig) -> GrammarCompiler:
    return GrammarCompiler(config, load_tokenizer(config).vocab_size)


async def refusal(compiler: GrammarCompiler, grammar: Grammar) -> str:
    with pytest.raises(RequestError) as error:
        await compiler.compile(grammar)
    assert (error.value.status, error.value.param) == (400, grammar.param)
    assert error.value.message.startswith(grammar.param)
    assert len(error.value.message) < 600
    return error.value.message


def hard(param: str, i: int = 0) -> Grammar:
    """A grammar that takes seconds to refuse."""
    return Grammar("regex", f"(a{{1,{900 + i}}}){{1,1000}}", param)


def noted(compiler: GrammarCompiler) -> list[Start | Stop]:
    """Note all orders to the process."""
    sent: list[Start | Stop] = []
    send = compiler._send

    def note(order: Start | Stop) -> None:
        sent.append(order)
        send(order)

    compiler._send = note  # type: ignore[method-assign]
    return sent


async def stopped(compiler: GrammarCompiler) -> asyncio.subprocess.Process:
    """Start the process, and stop it: as if all grammars took for ever."""
    while compiler._process is None:
        waiting = asyncio.create_task(compiler.compile(Grammar("regex", "started")))
        await asyncio.gather(waiting, return_exceptions=True)
    os.kill(compiler._process.pid, signal.SIGSTOP)
    return compiler._process


def attempts(compiler: GrammarCompiler) -> list[psutil.Process]:
    """The forked processes."""
    if compiler._process is None:
        return []
    return psutil.Process(compiler._process.pid).children()


SLOW = ("repetitions", "more repetitions", "a pattern of repetitions",
        "a grammar with many readings", "a list of lists")  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars_are_refused(compiler: GrammarCompiler, name: str) -> None:
    kind, text = HOSTILE[name]
    await refusal(compiler, Grammar(kind, text, "guided_x"))
    again = await refusal(compiler, Grammar(kind, text, "other"))
    assert "guided_x" not in again, "what is remembered belongs to no field"
    assert (await compiler.compile(Grammar("regex", "[ab]+"))).text


@pytest.mark.parametrize("name", SLOW)
async def test_slow_grammars_are_refused_by_counts_and_not_by_time(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(trial.time, "thread_time", lambda: 0.0)  # an infinitely fast machine
    compiling = trial.Compiler(Vocabulary(CONFIG, load_tokenizer(CONFIG).vocab_size))
    answer = compiling.compile(Grammar(*HOSTILE[name], "regex"))
    assert answer.error is not None
    assert answer.error.startswith("regex is too slow to match")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_object", ""),
        ("regex", r"\d{1,3}(\.\d{1,3}){3}"),
        ("regex", "(a|aa)*b"),
        ("ebnf", 'root ::= "a" root "b" | ""'),
        ("ebnf", 'root ::= line*\nline ::= [^\\n]* "\\n"?'),  # linear, although ambiguous
        ("ebnf", 'root ::= root "+" root | root "*" root | "(" root ")" | [0-9]+'),
        ("choice", json.dumps(["yes", 'say "no"', "\\", "é\n☃\U0001f600"])),
        ("json_schema", '{"type": "object", "properties": {"next": {"$ref": "#"}}}'),
        ("json_schema", nested(50)),
        ("json_schema", json.dumps({"enum": ["x" * i for i in range(100)]})),
        ("json_schema", json.dumps({"enum": [f"value{i}" for i in range(10_000)]})),
        ("json_schema", wide(512)),
        ("json_schema", wide(1_000, required=True)),
        ("structural_tag", tag({"type": "any_text"})),
        ("structural_tag", token_triggered(*range(300, 400))),
        (
            "structural_tag",
            tag(
                {"type": "token_dispatch", "rules": [[n, {"type": "any_text"}] for n in (300, 316)]}
            ),
        ),
        (
            "structural_tag",
            tag({"type": "qwen_xml_parameter", "json_schema": {"properties": {"token": True}}}),
        ),
    ],
)
async def test_what_is_large_but_sane_is_taken(
    compiler: GrammarCompiler, kind: GrammarKind, text: str
) -> None:
    assert (await compiler.compile(Grammar(kind, text))).text


async def test_the_same_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "once(upon)?")
    first, second = await asyncio.gather(*(compiler.compile(grammar) for _ in range(2)))
    assert first is second
    assert await compiler.compile(Grammar("regex", "once(upon)?", "elsewhere")) is first


async def test_what_takes_too_long_is_refused_and_remembered() -> None:
    compiler = make(replace(CONFIG, grammar_timeout=0.001))
    sent = noted(compiler)
    try:
        said = await refusal(compiler, hard("regex"))
        assert said == "regex took more than 0.001 s of processor time to compile; simplify it"
        assert len(sent) == len(LANES), "one attempt in each lane"
        assert await refusal(compiler, hard("other")) == said.replace("regex", "other")
        assert len(sent) == len(LANES)
    finally:
        await compiler.close()


@pytest.mark.parametrize(("keys", "most"), [(10, 10), (1, 2)])
async def test_a_short_grammar_overtakes_long_ones(keys: int, most: int) -> None:
    """It waits for at most one short attempt per other key; no long one ends before."""
    compiler = make(CONFIG)
    try:
        await compiler.compile(Grammar("regex", "first"))
        sent = noted(compiler)
        waiting = [
            asyncio.create_task(compiler.compile(hard("regex", i), f"key {i % keys}"))
            for i in range(10)
        ]
        await asyncio.sleep(0)
        easy = Grammar("json_schema", '{"type": "object", "properties": {"a": {}}}')
        assert (await compiler.compile(easy, "another key")).text
        starts = [order for order in sent if isinstance(order, Start)]
        place = next(i for i, order in enumerate(starts) if order.grammar.text == easy.text)
        first = [each for each in starts[:place] if each.seconds == compiler._lanes[0].seconds]
        assert len(first) <= most
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not compiler._jobs
    finally:
        await compiler.close()


async def test_too_many_are_turned_away() -> None:
    compiler = make(replace(CONFIG, max_queue=8))
    try:
        await stopped(compiler)
        grammars = [Grammar("regex", f"a{{{i + 1}}}", "regex") for i in range(9)]
        waiting = [asyncio.create_task(compiler.compile(each, "a")) for each in grammars[:2]]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="this API key has 2 grammars") as error:
            await compiler.compile(grammars[2], "a")
        assert (error.value.status, error.value.param) == (429, "regex")
        waiting += [asyncio.create_task(compiler.compile(each)) for each in grammars[2:8]]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="8 grammars are being compiled") as error:
            await compiler.compile(grammars[8], "b")
        assert (error.value.status, error.value.param) == (429, "regex")
        assert (error.value.retry_after or 0) >= 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not compiler._jobs
        assert not compiler._owners
    finally:
        await compiler.close()


async def test_the_time_in_the_queue_is_bounded() -> None:
    compiler = make(replace(CONFIG, grammar_timeout=0.01))
    try:
        await stopped(compiler)
        with pytest.raises(RequestError, match=r"regex was not compiled within 0.02 s") as error:
            await compiler.compile(Grammar("regex", "a", "regex"))
        assert (error.value.status, error.value.param) == (429, "regex")
        assert not compiler._jobs
    finally:
        await compiler.close()


async def test_an_attempt_ends_when_nobody_waits(compiler: GrammarCompiler) -> None:
    leaving = asyncio.create_task(compiler.compile(hard("regex")))
    while not attempts(compiler):
        await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert not compiler._jobs
    assert (await compiler.compile(Grammar("regex", "another"))).text
    while attempts(compiler):
        await asyncio.sleep(0.01)


async def test_attempts_end_with_the_process() -> None:
    compiler = make(CONFIG)
    waiting = asyncio.create_task(compiler.compile(hard("regex")))
    while not (running := attempts(compiler)):
        await asyncio.sleep(0.01)
    await compiler.close()
    with pytest.raises(EngineError):
        await waiting
    psutil.wait_procs(running)


async def test_the_end_is_told_to_those_who_wait() -> None:
    compiler = make(CONFIG)
    waiting = [
        asyncio.create_task(compiler.compile(Grammar("regex", text))) for text in ("a", "b", "b")
    ]
    await asyncio.sleep(0)
    await compiler.close()
    for done in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(done, EngineError)
        assert "shutting down" in str(done)
    with pytest.raises(EngineError, match="shutting down"):
        await compiler.compile(Grammar("regex", "c"))
    await compiler.close()


async def test_a_process_that_is_killed_is_replaced(compiler: GrammarCompiler) -> None:
    killed = await stopped(compiler)
    waiting = [
        asyncio.create_task(compiler.compile(Grammar("regex", f"killed{i}"))) for i in range(3)
    ]
    await asyncio.sleep(0)
    killed.kill()
    assert all([(await each).text for each in waiting]), "the grammars are not to blame"
    assert compiler._process is not killed


async def test_a_process_that_dies_again_is_no_fault_of_the_grammar() -> None:
    compiler = make(CONFIG)
    try:
        waiting = asyncio.create_task(compiler.compile(hard("regex", 40)))
        deaths = 0
        while not waiting.done():
            if compiler._lanes[0].job is not None and compiler._process is not None:
                compiler._process.kill()
                deaths += 1
                while compiler._process is not None:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
        assert deaths == 2
        with pytest.raises(EngineError, match="was killed by SIGKILL"):
            await waiting
        assert (await compiler.compile(Grammar("regex", "a"))).text
    finally:
        await compiler.close()


async def test_a_process_that_does_not_start_is_an_error() -> None:
    compiler = make(replace(CONFIG, load_stall_timeout=0.001))
    with pytest.raises(EngineError, match=r"did not start within 0.001 s"):
        await compiler.compile(Grammar("regex", "a"))
    await compiler.close()


async def test_what_kills_two_attempts_is_refused(compiler: GrammarCompiler) -> None:
    grammar = hard("regex", 20)
    sent = noted(compiler)
    waiting = asyncio.create_task(refusal(compiler, grammar))
    killed: set[int] = set()
    while not waiting.done():
        for attempt in attempts(compiler):
            if attempt.pid not in killed:
                attempt.kill()
                killed.add(attempt.pid)
        await asyncio.sleep(0)
    assert await waiting == "regex is too much to compile"
    count = len(sent)
    assert await refusal(compiler, grammar) == "regex is too much to compile"
    assert len(sent) == count, "the second time it was remembered"
    assert (await compiler.compile(Grammar("regex", "e"))).text


async def test_what_the_machine_lacks_is_not_the_grammars_fault(compiler: GrammarCompiler) -> None:
    await compiler.compile(Grammar("regex", "f"))
    assert compiler._process is not None
    pid, grammar = compiler._process.pid, Grammar("regex", "g")
    _, most = limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, most))
    with pytest.raises(EngineError, match="Too many open files"):
        await compiler.compile(grammar)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert (await compiler.compile(grammar)).text
    assert compiler._process.pid == pid


async def test_a_client_that_leaves_takes_nothing_from_others(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "left|right")
    leaving, staying = (asyncio.create_task(compiler.compile(grammar)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    done: Any = await asyncio.gather(leaving, staying, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert isinstance(done[1], Compiled)


async def test_every_format_of_xgrammar_is_known() -> None:
    formats, _ = get_args(xgrammar.structural_tag.Format)
    assert {each.model_fields["type"].default for each in get_args(formats)} == FORMATS
