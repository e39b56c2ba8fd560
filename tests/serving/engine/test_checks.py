"""Checks of requests: common settings are checked once, and sent in a small form."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from weft.errors import RequestError
from weft.serving.engine.checks import check_requests
from weft.serving.engine.grammar.matcher import mask_of
from weft.serving.engine.protocol import EngineInfo
from weft.serving.engine.sampling_params import MAX_ALLOWED, NEUTRAL, SamplingParams

SIZE = 1000
INFO = EngineInfo(
    max_model_len=64,
    vocab_size=SIZE,
    hidden_size=8,
    block_size=8,
    num_blocks=8,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    memory_fraction=0.8,
    dtype="float32",
    load_seconds=0.0,
)


def test_common_settings_are_checked_once() -> None:
    encoded = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [ord(char) for char in text]

    params = SamplingParams(bad_words=("one", "two"), allowed_token_ids=tuple(range(200)))
    checked = check_requests([[i] for i in range(256)], params, NEUTRAL, INFO, lambda: 7, encode)
    assert sorted(encoded) == [" one", " two", "one", "two"]
    assert [each.prompt_token_ids for each in checked] == [[i] for i in range(256)]
    assert checked[0].banned == ((111, 110, 101), (116, 119, 111))
    assert all(each.banned is checked[0].banned for each in checked)
    assert all(each.allowed is checked[0].allowed for each in checked)


def test_stop_tokens_are_few() -> None:
    SamplingParams(stop_token_ids=(1,) * 1024)
    with pytest.raises(RequestError, match="stop_token_ids has 1025 entries; at most 1024"):
        SamplingParams(stop_token_ids=(1,) * 1025)


def test_too_many_allowed_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match="it must have 1 to 262144"):
        SamplingParams(allowed_token_ids=(1,) * (MAX_ALLOWED + 1))


def test_allowed_tokens_are_a_mask_however_many_are_listed() -> None:
    listed = tuple(i % 10 for i in range(MAX_ALLOWED))
    params = SamplingParams(allowed_token_ids=listed)
    (checked,) = check_requests([[1]], params, NEUTRAL, INFO, lambda: 7, list)
    assert len(checked.allowed) == -(-SIZE // 32) * 4
    assert np.array_equal(np.frombuffer(checked.allowed, np.int32), mask_of(range(10), SIZE))
    (free,) = check_requests([[1]], SamplingParams(), NEUTRAL, INFO, lambda: 7, list)
    assert free.allowed == b""
    assert msgspec.structs.replace(free.params, max_tokens=None) == SamplingParams(
        **msgspec.structs.asdict(NEUTRAL), seed=7
    )
