"""Bodies for hostile.py: each kind could stop a server in its own way."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

CHAT, TEXT, RESPONSES, MESSAGES, EMBEDDINGS, DETOKENIZE, TOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/detokenize",
    "/tokenize",
)


@dataclass(frozen=True)
class Body:
    """A request's body.

    Attributes:
        kind: its name in the table.
        path: the route.
        data: JSON.
    """

    kind: str
    path: str
    data: bytes


@dataclass(frozen=True)
class Kind:
    """A body kind: the head, many elements with commas, and the tail.

    Attributes:
        path: the route.
        head, element, tail: JSON. In an element, ####### becomes its number.
        most: maximum element count.
        comma: between two elements.
    """

    path: str
    head: str
    element: str
    tail: str
    most: int = 1 << 40
    comma: str = ","

    def body(self, size: int, model: str) -> bytes:
        """Return a body up to this size in bytes, or with `most` elements."""
        head = f'{{"model":{json.dumps(model)},{self.head}'.encode()
        each, comma = self.element.encode(), self.comma.encode()
        room = size - len(head) - len(self.tail)
        elements = max(1, min(self.most, room // (len(each) + len(comma))))
        middle = comma.join([each] * elements)
        if b"#######" in each:
            numbers = itertools.count()
            middle = re.sub(rb"#{7}", lambda _: b"%07d" % next(numbers), middle)
        return head + middle + self.tail.encode()


def _text(path: str, head: str, text: str, tail: str = '"}', most: int = 1 << 40) -> Kind:
    return Kind(path, f'{head}"', text * 500, tail, most, comma="")


CONTEXT = 1 << 17
"""Tokens in the context of the model under test: a server's limits grow with it."""
_HI = '{"role":"user","content":"1234567890"}'  # ten tokens, so that few do not fit either
_CALL = '{"type":"function_call","call_id":"a","name":"f","arguments":"{\\"a\\":1234567890}"}'
_FEW = 16_000  # elements, few enough to be read
_NUMBERS = 260_000  # the same for numbers

KINDS = {
    "wrong: stop": Kind(TEXT, '"prompt":"a","stop":[', "1", "]}"),
    "wrong: stop, few": Kind(TEXT, '"prompt":"a","stop":[', "1", "]}", _NUMBERS),
    "wrong: messages": Kind(CHAT, '"messages":[', "0", "]}"),
    "wrong: messages, few": Kind(CHAT, '"messages":[', "0", "]}", _NUMBERS),
    "wrong: tools": Kind(CHAT, f'"messages":[{_HI}],"tools":[', "1", "]}"),
    "wrong: metadata, few": Kind(TEXT, '"prompt":"a","metadata":{', '"#######":1', "}}", 60_000),
    "wrong: tokens": Kind(DETOKENIZE, '"tokens":[', '""', "]}"),
    "wrong: inputs": Kind(EMBEDDINGS, '"input":[', "0.5", "]}"),
    "wrong: items, few": Kind(RESPONSES, '"input":[', '{"type":"message"}', "]}", _FEW),
    "unknown fields": Kind(TEXT, '"prompt":"a",', '"#######":1', "}"),
    "unknown fields, few": Kind(TEXT, '"prompt":"a",', '"#######":1', "}", 60_000),
    "deep": Kind(CHAT, '"messages":[', "[" * 199 + "]" * 199, "]}"),
    "deep, few": Kind(CHAT, '"messages":[', "[" * 190 + "]" * 190, "]}", 80),
    "wide: empty lists": Kind(CHAT, '"messages":[', "[]", "]}"),
    "wide: schema, few": Kind(
        TEXT,
        '"prompt":"a","guided_json":{"type":"object","properties":{',
        '"#######":{"type":"string"}',
        "}}}",
        _FEW,
    ),
    "messages": Kind(CHAT, '"messages":[', _HI, "]}"),
    "messages, few": Kind(CHAT, '"messages":[', _HI, "]}", _FEW),
    "parts, few": Kind(
        CHAT,
        '"messages":[{"role":"user","content":[',
        '{"type":"text","text":"1234567890"}',
        "]}]}",
        _FEW,
    ),
    "items": Kind(RESPONSES, '"input":[', _HI, "]}"),
    "items, few": Kind(RESPONSES, '"input":[', _HI, "]}", _FEW),
    "calls, few": Kind(RESPONSES, '"input":[', _CALL, "]}", 7_000),
    "Anthropic messages": Kind(MESSAGES, '"max_tokens":9,"messages":[', _HI, "]}"),
    "Anthropic messages, few": Kind(MESSAGES, '"max_tokens":9,"messages":[', _HI, "]}", _FEW),
    "tools, few": Kind(
        CHAT,
        f'"messages":[{_HI}],"tools":[',
        '{"type":"function","function":{"name":"f","description":"1234567890"}}',
        "]}",
        _FEW // 2,
    ),
    "token ids": Kind(TEXT, '"prompt":[', "1234", "]}"),
    "token ids, few": Kind(TEXT, '"prompt":[', "1234", "]}", _NUMBERS),
    "token ids to decode, few": Kind(DETOKENIZE, '"tokens":[', "1234", "]}", _NUMBERS),
    "long numbers": Kind(TEXT, '"prompt":[', "9" * 4300, "]}"),
    "text": _text(TEXT, '"prompt":', "a bcd"),
    "text of a message": _text(CHAT, '"messages":[{"role":"user","content":', "a bcd", tail='"}]}'),
    "text of Chinese": _text(TEXT, '"prompt":', "我们"),
    "text of Chinese, few": _text(TEXT, '"prompt":', "我们", most=2_700),
    "text of emoji": _text(TEXT, '"prompt":', "\U0001f600"),
    "text of emoji, few": _text(TEXT, '"prompt":', "\U0001f600", most=4_000),
    "text of escapes": _text(TEXT, '"prompt":', r"\n"),
    "text of escapes, few": _text(TEXT, '"prompt":', r"\u4e2d", most=2_000),
    "text to count": _text(TOKENIZE, '"prompt":', "a bcd"),
    "texts to embed": Kind(EMBEDDINGS, '"input":[', f'"{"a b " * 2000}"', "]}", 256),
}
"""Kinds of bodies by name. Where bodies of full size are refused before they are read, a second
kind has few enough elements to be read with a context of `CONTEXT`: its size is in the table."""


def bodies(model: str, size: int) -> list[Body]:
    """Return one body for each kind, up to this size in bytes."""
    return [Body(name, kind.path, kind.body(size, model)) for name, kind in KINDS.items()]


def small(model: str) -> Body:
    """Return a usual request."""
    return _completion("a small request", model)


def easy_schema(model: str, kind: str, name: str) -> Body:
    """Return a request with a fast schema; each name gives another one."""
    schema = {"type": "object", "properties": {name: {"type": "integer"}}}
    return _completion(kind, model, guided_json=schema)


def hard_schema(model: str, i: int) -> Body:
    """Return a request with a slow schema (seconds to compile); each number gives another one."""
    pattern = f"[a-z]{{1,{9000 + i}}}x"
    return _completion("a hard schema", model, guided_json={"type": "string", "pattern": pattern})


def _completion(kind: str, model: str, **fields: Any) -> Body:
    body = {"model": model, "prompt": "a", "max_tokens": 4} | fields
    return Body(kind, TEXT, json.dumps(body).encode())
