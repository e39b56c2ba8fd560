"""A server's log as requests at their times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.models.plan.arrivals import LONGEST, read_log

FIRST = {"time": "2026-11-22T07:50:49+00:00", "prompt_tokens": 5, "output_tokens": 10}


def write(folder: Path, *entries: object) -> Path:
    path = folder / "log.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def test_requests_come_by_their_arrival_and_not_by_their_end(tmp_path: Path) -> None:
    late = {"time": "2026-11-22T09:50:52.5+02:00", "seconds": 60}
    found = read_log(write(tmp_path, FIRST, FIRST | late))
    assert [each.time for each in found] == [0.0, 56.5]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "line 2 of .* is not an object"),
        (FIRST | {"prompt_tokens": -5}, "prompt_tokens is -5 in line 2"),
        (FIRST | {"prompt_tokens": 1.5}, "prompt_tokens is 1.5 in line 2"),
        (FIRST | {"output_tokens": LONGEST + 1}, "output_tokens is 1000000000 in line 2"),
        (FIRST | {"output_tokens": True}, "output_tokens is True in line 2"),
        (FIRST | {"seconds": -1}, "seconds is -1 in line 2"),
        (FIRST | {"seconds": float("nan")}, "seconds is nan in line 2"),
        (FIRST | {"time": "yesterday"}, "time is 'yesterday' in line 2"),
        (FIRST | {"time": None}, "time is None in line 2"),
        (FIRST, "a rate needs requests at two times at least, it has 2"),
    ],
)
def test_a_bad_line_is_refused_by_its_place(tmp_path: Path, entry: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_log(write(tmp_path, FIRST, entry))


def test_a_text_may_have_other_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    entries = (FIRST, FIRST | {"seconds": 1, "model": "a\u2028b\x85"})
    path.write_text("\r\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries))
    assert [each.time for each in read_log(path)] == [0.0, 1.0]


def test_a_missing_log_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none; it cannot be read: No such file or directory$"):
        read_log(tmp_path / "none")


@given(text=st.text(), binary=st.binary(max_size=20))
def test_any_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, binary: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "any"
    for content in (text.encode(errors="replace"), binary, b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="any"):
            read_log(path)
