"""Streamed text equals unstreamed text, for any tokens, stop strings and chunks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tokenizers as kinds

from weft.serving.engine.detokenizer import Detokenizer
from weft.serving.engine.tokenizer import Tokenizer

WRITERS: dict[str, Callable[[Path], Path]] = {
    "byte-level": kinds.write_byte_level,
    "sentencepiece": kinds.write_sentencepiece,
    "metaspace": kinds.write_metaspace,
    "wordpiece": kinds.write_wordpiece,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    path = tmp_path_factory.mktemp("tokenizers")
    return {name: Tokenizer.load(write(path / name)) for name, write in WRITERS.items()}


def chunks(token_ids: list[int], cuts: list[int]) -> Iterator[list[int]]:
    """The tokens, cut at the places that `cuts` names (modulo their number)."""
    places = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    yield from (token_ids[a:b] for a, b in pairwise(places))


def until_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The slow way: the stop string that is complete first wins, then the longest."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_token_ids_in_any_chunks_join_to_decode_of_all(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    # Some ids beyond the vocabulary too: the table of a model is often larger.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=40))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    streamed = "".join(detokenizer.push(chunk) for chunk in chunks(ids, cuts))
    assert streamed + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("abc é日😀\x00hel"), max_size=40) | st.text(max_size=20),
    stop=st.lists(
        st.text(st.sampled_from("abc é日😀\ufffdhel"), min_size=1, max_size=5), max_size=4
    ),
    cuts=st.lists(st.integers(0, 100), max_size=40),
    noise=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 300)), max_size=4),
)
def test_stop_strings_cut_the_same_text_however_it_is_chunked(
    tokenizers: dict[str, Tokenizer],
    kind: str,
    text: str,
    stop: list[str],
    cuts: list[int],
    noise: list[tuple[int, int]],
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    for place, token_id in noise:
        ids.insert(place % (len(ids) + 1), token_id % tokenizer.vocab_size)
    detokenizer = Detokenizer(tokenizer, stop=stop)
    streamed = "".join(detokenizer.push(chunk) for chunk in chunks(ids, cuts))
    streamed += detokenizer.flush()
    assert (streamed, detokenizer.stopped) == until_stop(tokenizer.decode(ids), stop)


def test_no_part_of_a_character_is_released(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["byte-level"])
    ids = [i for byte in "é😀".encode() for i in ids_of_byte(tokenizers["byte-level"], byte)]
    assert [detokenizer.push([i]) for i in ids] == ["", "é", "", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_a_cut_off_character_becomes_one_replacement_character(
    tokenizers: dict[str, Tokenizer],
) -> None:
    detokenizer = Detokenizer(tokenizers["byte-level"])
    ids = [i for byte in "😀".encode()[:3] for i in ids_of_byte(tokenizers["byte-level"], byte)]
    assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == "\ufffd"


def test_nothing_follows_a_stop_string(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop=["STOP"])
    assert detokenizer.push(tokenizer.encode("hello STO")) == "hello "
    assert detokenizer.push(tokenizer.encode("P world")) == ""
    assert detokenizer.stopped == "STOP"
    assert detokenizer.push(tokenizer.encode("more")) == ""
    assert detokenizer.flush() == ""


def test_a_beginning_of_a_stop_string_is_released_at_the_end(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte-level"]
    detokenizer = Detokenizer(tokenizer, stop=["STOP"])
    assert detokenizer.push(tokenizer.encode("hello STO")) == "hello "
    assert detokenizer.flush() == "STO"
    assert detokenizer.stopped is None


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_time_grows_with_the_number_of_tokens(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """A run of invalid bytes, with a stop string that almost matches, is the worst case."""
    tokenizer = tokenizers[kind]
    byte = ids_of_byte(tokenizer, 0xF0)[0]
    ids = [byte if random.random() < 0.999 else tokenizer.encode("a")[-1] for _ in range(20_000)]

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(tokenizer, stop=["\ufffd" * 512 + "x"])
        start = time.process_time()
        for i in ids[:count]:
            detokenizer.push([i])
        detokenizer.flush()
        return time.process_time() - start

    short, long = (min(seconds(count) for _ in range(3)) for count in (2_000, 20_000))
    assert long < 40 * short, f"10 times the tokens took {long / short:.0f} times as long"


def ids_of_byte(tokenizer: Tokenizer, byte: int) -> list[int]:
    """The tokens that are exactly this byte."""
    return [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte])][:1]
