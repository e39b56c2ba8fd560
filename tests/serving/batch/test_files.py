"""What a batch reads: files, directories and stdin, line by line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.serving.batch import files
from weft.serving.batch.files import STDIN, Inputs, answer_line, find, parse, spool


def test_a_directory_is_its_jsonl_files_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "out.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "c.jsonl").write_text("{}\n")
    single = tmp_path / "notes.txt"
    found = find([single, tmp_path, STDIN], leave_out=[tmp_path / "out.jsonl"])
    assert found == [single, tmp_path / "a.jsonl", tmp_path / "b.jsonl", STDIN]
    with pytest.raises(ConfigError, match="- is given twice"):
        find([STDIN, STDIN], leave_out=[])


def test_lines_are_counted_through_all_files(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(b"one\n\n  \ntwo")
    second.write_bytes(b"three\r\n")
    lines = list(Inputs([first, second]))
    assert [(line.index, line.place) for line in lines] == [
        (0, "a.jsonl line 1"),
        (3, "a.jsonl line 4"),
        (4, "b.jsonl line 1"),
    ]
    assert [line.place for line in Inputs([first])] == ["line 1", "line 4"]


@pytest.mark.parametrize("size", [10, 11, 12, 20, 21, 22, 23, 33])
def test_of_a_line_that_is_too_long_the_rest_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A line of `size` bytes with its end, where 11 are the most."""
    monkeypatch.setattr(files, "MAX_LINE", 11)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * (size - 1) + b"\nnext\n" + b"y" * size)
    long = None if size > 11 else b"x" * (size - 1) + b"\n"
    last = None if size > 11 else b"y" * size
    assert [line.data for line in Inputs([path])] == [long, b"next\n", last]


def test_stdin_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    spool(io.BytesIO(b"one\ntwo\n"), path)
    assert path.read_bytes() == b"one\ntwo\n"
    with pytest.raises(ConfigError, match="cannot copy stdin to"):
        spool(io.BytesIO(b"one\n"), tmp_path / "nowhere" / "kept")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"prompt": "a", "id": 7}', {"index": 0, "id": 7}),
        ('{"prompt": "a", "custom_id": "x"}', {"index": 0, "custom_id": "x"}),
        ('{"prompt": "a", "custom_id": 7}', {"index": 0, "custom_id": 7}),
        ('{"prompt": "a", "custom_id": null, "id": 3}', {"index": 0, "id": 3}),
        ('\ufeff{"prompt": "a"}', {"index": 0}),
    ],
)
def test_a_simple_line_keeps_its_id(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    """Also behind the byte order mark that editors on Windows write."""
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    (line,) = Inputs([path])
    row = parse(line, "m")
    assert (row.problem, row.body) == (None, {"model": "m", "prompt": "a"})
    body = b'{"choices": [{"text": "b", "finish_reason": "stop"}], "usage": {}}'
    answer = answer_line(row, 200, body)
    assert answer == expected | {"text": "b", "finish_reason": "stop", "usage": {}}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "é"}', encoding=encoding)
    for line in Inputs([path]):
        problem = parse(line, "m").problem or ""
        assert problem.startswith(f"{line.place} looks like UTF-16, but lines are JSON in UTF-8; ")
        assert "iconv -f UTF-16 -t UTF-8" in problem


def test_a_simple_line_keeps_what_it_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}')
    prompt, chat = [parse(line, "m") for line in Inputs([path])]
    asked = {
        "token_ids": [1],
        "logprobs": {"tokens": ["b"]},
        "prompt_token_ids": [2],
        "prompt_logprobs": [None],
    }
    choice = {"text": "b", "finish_reason": "stop"}
    body = {"choices": [choice | asked], "usage": {}}
    assert answer_line(prompt, 200, json.dumps(body).encode()) == {
        "index": 0,
        "text": "b",
        "finish_reason": "stop",
        **asked,
        "usage": {},
    }
    body = {"choices": [choice | {"logprobs": None}], "usage": {}}
    assert "logprobs" not in answer_line(prompt, 200, json.dumps(body).encode())

    of_prompt = {name: asked.pop(name) for name in ("prompt_token_ids", "prompt_logprobs")}
    choice = {"message": {"content": "b"}, "finish_reason": "stop"} | asked
    body = {"choices": [choice], "usage": {}} | of_prompt
    assert answer_line(chat, 200, json.dumps(body).encode()) == {
        "index": 1,
        "text": "b",
        "finish_reason": "stop",
        **asked,
        **of_prompt,
        "usage": {},
    }
    body = {"choices": [choice, choice], "usage": {}} | of_prompt
    assert answer_line(chat, 200, json.dumps(body).encode()) == {"index": 1, **body}


def test_the_custom_id_of_a_simple_line_must_be_unique(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "custom_id": "x"}\n{"prompt": "a", "id": "x"}')
    assert [parse(line, "m").custom_id for line in Inputs([path])] == ["x", None]


def test_a_custom_id_that_is_a_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {}}')
    (line,) = Inputs([path])
    assert parse(line, "m").problem == "line 1: custom_id is 7; it must be a string"
