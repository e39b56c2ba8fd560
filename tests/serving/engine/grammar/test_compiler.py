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

import pytest
import pytest_asyncio
import xgrammar

from weft.errors import EngineError, RequestError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.grammar import worker
from weft.serving.engine.grammar.compiler import GrammarCompiler, Vocabulary
from weft.serving.engine.grammar.structural_tag import FORMATS
from weft.serving.engine.protocol import Compiled
from weft.serving.engine.sampling_params import Grammar, GrammarKind
from weft.serving.engine.tokenizer import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = EngineConfig(grammar_timeout=20.0)


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


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


SLOW = ("repetitions", "more repetitions", "a pattern of repetitions",
        "a grammar with many readings", "a list of lists")  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars_are_refused(compiler: GrammarCompiler, name: str) -> None:
    kind, text = HOSTILE[name]
    await refusal(compiler, Grammar(kind, text, "guided_x"))
    again = await refusal(compiler, Grammar(kind, text, "other"))
    assert "guided_x" not in again, "what is remembered belongs to no field"
    assert (await compiler.compile(Grammar("regex", "[ab]+"))).data


@pytest.mark.parametrize("name", SLOW)
async def test_slow_grammars_are_refused_by_counts_and_not_by_time(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(worker.time, "thread_time", lambda: 0.0)  # an infinitely fast machine
    compiling = worker.Compiler(Vocabulary(CONFIG, load_tokenizer(CONFIG).vocab_size))
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
    assert (await compiler.compile(Grammar(kind, text))).data


async def test_the_same_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "once(upon)?")
    first, second = await asyncio.gather(*(compiler.compile(grammar) for _ in range(2)))
    assert first is second
    assert await compiler.compile(Grammar("regex", "once(upon)?", "elsewhere")) is first


async def test_a_deadline_ends_the_process_and_the_next_grammar_gets_another() -> None:
    compiler = make(replace(CONFIG, grammar_timeout=1e-6))
    try:
        said = await refusal(compiler, Grammar("regex", "a", "regex"))
        assert said == "regex took longer than 1e-06 s to compile"
        compiler._config = CONFIG
        assert (await compiler.compile(Grammar("regex", "a"))).data, "it may have been the machine"
    finally:
        await compiler.close()


async def test_who_leaves_holds_up_nobody_and_too_many_are_turned_away() -> None:
    compiler = make(replace(CONFIG, grammar_timeout=600.0, max_queue=4))
    try:
        await compiler.compile(Grammar("regex", "first"))
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGSTOP)  # as if the next one took for ever
        grammars = [Grammar("regex", f"a{{{i + 1}}}", "regex") for i in range(4)]
        waiting = [asyncio.create_task(compiler.compile(grammar)) for grammar in grammars]
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as error:
            await compiler.compile(Grammar("regex", "other", "regex"))
        assert (error.value.status, error.value.param) == (429, "regex")
        assert (error.value.retry_after or 0) >= 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (await compiler.compile(Grammar("regex", "other"))).data
        assert not compiler._jobs
    finally:
        await compiler.close()


async def test_what_is_waited_for_again_gets_its_time() -> None:
    compiler = make(CONFIG)
    try:
        await compiler.compile(Grammar("regex", "first"))
        assert compiler._process is not None
        process = compiler._process
        os.kill(process.pid, signal.SIGSTOP)
        grammar = Grammar("regex", "left")
        leaving = asyncio.create_task(compiler.compile(grammar))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        staying = asyncio.create_task(compiler.compile(grammar))
        await asyncio.sleep(0)
        assert compiler._limit is not None
        assert compiler._limit.when() == compiler._until
        os.kill(process.pid, signal.SIGCONT)
        assert (await staying).data
        assert compiler._process is process
    finally:
        await compiler.close()


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
    await compiler.compile(Grammar("regex", "c"))
    killed = compiler._process
    assert killed is not None
    os.kill(killed.pid, signal.SIGSTOP)
    asked = asyncio.create_task(compiler.compile(Grammar("regex", "d")))
    await asyncio.sleep(0)
    os.kill(killed.pid, signal.SIGKILL)
    assert (await asked).data, "the grammar is not to blame"
    assert compiler._process is not killed


async def test_what_kills_two_processes_in_a_row_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = 0

    async def start_and_die() -> None:
        nonlocal starts
        starts += 1
        await GrammarCompiler._start(compiler)
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGKILL)

    await compiler._kill()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_start", start_and_die)
        for _ in range(2):
            said = await refusal(compiler, Grammar("regex", "deadly", "regex"))
            assert said == "regex is too much to compile"
        assert starts == 2, "the second time it was remembered"
    assert (await compiler.compile(Grammar("regex", "e"))).data


async def test_what_the_machine_lacks_is_not_the_grammars_fault(compiler: GrammarCompiler) -> None:
    await compiler.compile(Grammar("regex", "f"))
    assert compiler._process is not None
    pid, grammar = compiler._process.pid, Grammar("regex", "g")
    _, most = limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, most))
    with pytest.raises(EngineError, match="Too many open files"):
        await compiler.compile(grammar)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert (await compiler.compile(grammar)).data
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
