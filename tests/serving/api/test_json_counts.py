"""A JSON text's values are counted as a reader would find them, and too many are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server import Server

from weft.errors import RequestError
from weft.serving.api import body_room, json_counts
from weft.serving.api.json_counts import LEAST, MOST, Counts, count, limits

TEXTS = st.text(alphabet='a"\\[]{},:é\n', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> tuple[Counts, int]:
    """The counts in a value, and its number of empty containers."""
    containers, texts, values, empty = 0, int(isinstance(value, str)), 1, 0
    if isinstance(value, list | dict):
        containers, empty = 1, int(not value)
        texts += len(value) if isinstance(value, dict) else 0
        for each in value.values() if isinstance(value, dict) else value:
            inner, hollow = counted(each)
            containers += inner.containers
            texts += inner.texts
            values += inner.values
            empty += hollow
    return Counts(containers, texts, values), empty


@given(VALUES, st.booleans(), st.integers(2, 9))
def test_a_count_is_that_of_a_reader(value: Any, ascii: bool, chunk: int) -> None:
    """Wherever the text is cut; an empty container counts as if it had an element."""
    data = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_counts, "_CHUNK", chunk)
        found = count(data, MOST)
    wanted, empty = counted(value)
    escapes = len(re.findall(rb"\\.", data))
    wide = sum(byte >= 128 for byte in data)
    assert found == wanted._replace(values=wanted.values + empty, escapes=escapes, wide=wide)


def test_a_fault_hides_nothing_before_it() -> None:
    data = b"[" + b"[]," * MOST.containers + b'\\"'
    with pytest.raises(RequestError, match="more than 32,768 objects and lists"):
        count(data, MOST)


def many(element: str, number: int) -> bytes:
    return b'{"model":"echo","prompt":[' + b",".join([element.encode()] * number) + b"]}"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (many("[]", LEAST.containers), "more than 16,384 objects and lists"),
        (many('{"a":0}', LEAST.containers), "more than 16,384 objects and lists"),
        (many('""', LEAST.texts), "more than 65,536 texts"),
        (many("0", LEAST.values), "more than 262,144 values"),
        (many('"' + r"\n\\" * LEAST.escapes + '"', 1), "more than 1,048,576 escapes"),
        (many('"' + "é" * (LEAST.wide // 2) + '€"', 1), "more than 8,388,608 bytes outside ASCII"),
        (many("9" * 1000, 100), "a number with 400 or more digits"),
    ],
)
def test_too_many_values_are_refused_before_they_are_read(
    echo: Server, data: bytes, says: str
) -> None:
    answer = echo.http.post(
        "/v1/completions", content=data, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "body_too_complex"


def test_as_many_as_the_limit_are_read(echo: Server) -> None:
    data = many("5", LEAST.values - 8)
    answer = echo.http.post(
        "/v1/completions", content=data, headers={"content-type": "application/json"}
    )
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_small_bodies_are_not_counted() -> None:
    """They cannot have too many values."""
    least = (2, 3, 2, 2, 1)  # bytes of `[]` and of `"",` and of `0,` and of `\\n`
    for most, size in zip(LEAST, least, strict=True):
        assert most * size >= body_room.LARGE


def test_long_texts_of_digits_are_no_numbers() -> None:
    assert count(json.dumps(["1" * 100_000, 10**300, 1e300]).encode(), MOST).values == 4


@pytest.mark.parametrize("context", [16, 2048, 1 << 17, 1 << 20, 1 << 24])
def test_limits_grow_with_the_context(context: int) -> None:
    found = limits(context)
    assert all(a <= each <= b for a, each, b in zip(LEAST, found, MOST, strict=True))
    assert found.values > min(context, 1_300_000)  # so a prompt of token ids can fill the context
    assert limits(16) == LEAST
    assert limits(1 << 24) == MOST
