"""A content has the log probabilities of exactly its tokens, for any answer, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.serving.api.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from weft.serving.api.parsing.harmony import HarmonyParser
from weft.serving.api.parsing.parser import AnswerParser, Stage
from weft.serving.api.parsing.pieces import Content, Piece, merged
from weft.serving.api.parsing.reasoning import ReasoningParser
from weft.serving.api.parsing.scored import ScoredParser
from weft.serving.api.parsing.tool_calls import ToolCallParser
from weft.serving.engine.protocol import TokenLogprob
from weft.serving.engine.request_stream import Delta, joined

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
PARTS = (
    *("<think>", "</think>", CALL, "<tool_call>", '{"name": "f", ', "</tool_call>", "<", "\n"),
    *(" ", "hm", "é", ""),
)


def make(
    tools: str | None = "hermes", *, opened: bool = False, parallel: bool = True
) -> list[Stage]:
    thoughts = ReasoningParser(REASONING_FORMATS["think"], place="within" if opened else "before")
    stages: list[Stage] = [thoughts]
    if tools is not None:
        stages.append(ToolCallParser(TOOL_FORMATS[tools], {"f": {}}, parallel=parallel))
    return stages


def deltas(tokens: Iterable[str]) -> list[Delta]:
    """A delta for each token; the log probability is the token's place."""
    return [
        Delta(text, (i,), logprobs=(TokenLogprob(i, -float(i), 1),), token_texts=(text,))
        for i, text in enumerate(tokens)
    ]


def parse(stages: list[Stage], parts: Iterable[Delta]) -> list[Piece]:
    parser = ScoredParser(AnswerParser(stages))
    pieces = [piece for part in parts for piece in parser.push(part)]
    return [*pieces, *parser.flush()]


def contents(pieces: Iterable[Piece], tokens: list[str]) -> list[tuple[str, list[str]]]:
    """The text of each message, and its tokens."""
    found: list[tuple[str, list[str]]] = []
    inside = False
    for piece in pieces:
        if isinstance(piece, Content):
            text, named = found.pop() if inside else ("", [])
            found.append((text + piece.text, named + [tokens[s.token_id] for s in piece.logprobs]))
        inside = isinstance(piece, Content)
    return found


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12),
    tools=st.sampled_from([None, *TOOL_FORMATS]),
    opened=st.booleans(),
)
def test_the_tokens_hold_the_text(tokens: list[str], tools: str | None, opened: bool) -> None:
    def fresh() -> list[Stage]:
        return make(tools, opened=opened)

    pieces = parse(fresh(), deltas(tokens))
    plain = AnswerParser(fresh())
    expected = merged([*plain.push("".join(tokens)), *plain.flush()])
    assert [text for text, _ in contents(pieces, tokens)] == [
        piece.text for piece in expected if isinstance(piece, Content)
    ]
    places = [score.token_id for p in pieces if isinstance(p, Content) for score in p.logprobs]
    assert places == sorted(set(places))
    for text, own in contents(pieces, tokens):
        whole, seen = "".join(own), [token for token in own if token]
        # The first and the last of its tokens have a part of the text.
        at = whole.find(text)
        while at >= 0 and at + len(text) <= len(whole) - len(seen[-1]):
            at = whole.find(text, at + 1)
        assert 0 <= at < len(seen[0])
    if tokens:
        at_once = parse(fresh(), [joined(deltas(tokens))])
        assert contents(at_once, tokens) == contents(pieces, tokens)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        # Each token of a text that is cut within a character, and the end token.
        (["Hi", "", "é", "\n", ""], [("Hié\n", ["Hi", "", "é", "\n", ""])]),
        (["<think>", "hm", "</think>", "\n\n", "Hi", ""], [("Hi", ["Hi", ""])]),
        (["<think>", "hm", "</think>"], []),
        (
            ["<", "<", "b", "\n", CALL, "\n", "Hi"],
            [("<<b", ["<", "<", "b"]), ("\nHi", ["\n", "Hi"])],
        ),
        (["a <", "tool_call", "> b"], [("a <tool_call> b", ["a <", "tool_call", "> b"])]),
        (["a<", "tool_call>", CALL.removeprefix("<tool_call>"), ""], [("a", ["a<"])]),
        (["<think>hm</", "think>Hi", " you"], [("Hi you", ["think>Hi", " you"])]),
    ],
)
def test_marks_have_none(tokens: list[str], found: list[tuple[str, list[str]]]) -> None:
    assert contents(parse(make(), deltas(tokens)), tokens) == found


def test_a_dropped_call_has_none() -> None:
    tokens = ["Hi", CALL, "you", CALL, "there", ""]
    found = contents(parse(make(parallel=False), deltas(tokens)), tokens)
    assert found == [("Hi", ["Hi"]), ("youthere", ["you", "there", ""])]


def test_two_messages_in_harmony() -> None:
    start, head = "<|start|>assistant", "<|channel|>final<|message|>"
    tokens = [head, "a", "<|end|>", start, "<|channel|>analysis<|message|>", "hm", "<|end|>"]
    tokens += [start, head, "b", "c", ""]
    found = contents(parse([HarmonyParser(start, {})], deltas(tokens)), tokens)
    assert found == [("a", ["a"]), ("\nbc", ["b", "c", ""])]
