"""Offsets into the text, where tokens and text differ."""

from __future__ import annotations

import math
from pathlib import Path

from support.tokenizers import write_byte_level, write_sentencepiece

from weft.serving.api.logprobs import TextLogprobs, chat_logprobs
from weft.serving.engine.protocol import TokenLogprob
from weft.serving.engine.tokenizer import Tokenizer


def scored(token_ids: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0, 1) for token in token_ids]


def test_an_added_bos_token_takes_no_room(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path))
    ids = tokenizer.encode("he a")
    lists = TextLogprobs(tokenizer).prompt("he a", ids, scored(ids[1:]))
    assert lists.tokens == ["<s>", " he", " a"]
    assert lists.text_offset[:2] == [0, 0]


def test_an_end_token_takes_no_room(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path))
    text = TextLogprobs(tokenizer)
    assert text.output(scored(tokenizer.encode("hello<|im_end|>"))).text_offset == [0, 2, 5]
    assert text.output(scored(tokenizer.encode("x"))).text_offset == [5]


def test_a_token_without_probability_has_a_finite_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path))
    entry = TokenLogprob(5, -math.inf, 9, ((6, -math.inf),))
    content = chat_logprobs(tokenizer, [entry]).content
    assert content is not None
    assert content[0].logprob == content[0].top_logprobs[0].logprob == -9999.0
    assert TextLogprobs(tokenizer).output([entry]).token_logprobs == [-9999.0]
