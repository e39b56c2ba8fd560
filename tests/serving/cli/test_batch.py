"""Batch files: every line has an answer or an error, and an interrupted run can go on."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from support.batches import check_output, write_rows
from support.checkpoints import make_checkpoint
from support.engine import FAST, mock_config

from weft.errors import ConfigError, EngineError, ModelError
from weft.serving.api import local
from weft.serving.api.app import row_app
from weft.serving.api.local import LocalApi
from weft.serving.api.state import ServerState
from weft.serving.batch.job import ALIKE, RowsFailAlike
from weft.serving.cli.batch import run
from weft.serving.config.settings import EngineConfig, ServerConfig

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "one two"}]
DEEP = {
    "role": "assistant",
    "content": "one",
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}],
}


def request(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    """A line in OpenAI's envelope."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


# A line, and the text that its error holds (None: it is answered).
LINES: list[tuple[dict[str, Any] | str | bytes, str | None]] = [
    (request("a", CHAT, messages=HELLO, max_tokens=4, temperature=0), None),
    (request("b", prompt="one two", max_tokens=4, model="tiny"), None),
    ({"prompt": "one two", "max_tokens": 4, "id": "mine"}, None),
    ({"messages": HELLO, "max_tokens": 4, "temperature": 0}, None),
    ({"prompt": "one", "max_tokens": 2, "n": 2}, None),
    ("not json", "line 6 is not JSON"),
    ("[" * 100_000, "line 7 is nested too deeply"),
    ("[1]", "line 8 is not a JSON object"),
    (request("a", prompt="one"), "line 9: custom_id 'a' is that of line 1"),
    (request("c", "/v1/rerank", query="one"), "line 10: url is '/v1/rerank'"),
    ({"custom_id": "d", "url": TEXT}, "line 11: body is missing"),
    ({"url": TEXT, "body": {"prompt": "one"}}, "line 12: custom_id is missing"),
    ({**request("e", prompt="one"), "method": "GET"}, "line 13: method is 'GET'"),
    (request("f", prompt="one", stream=True), "line 14: stream works only over HTTP"),
    (request("g", prompt="one", model="other"), "there is no model 'other'"),
    (request("h", prompt="one", temperature=7), "temperature is 7.0; it must be in [0.0, 2.0]"),
    ({"prompt": "one", "frobnicate": 1}, "frobnicate is not a field"),
    ({"prompt": "the weather " * 1000}, "the maximum is 512"),
    ({"prompt": "\ud800"}, "line 19 is not JSON"),
    (b'{"prompt": "\xff"}', "line 20 is not JSON"),
    ({"prompt": "one", "n": 4}, "this server has room for 3"),
    ({"messages": [*HELLO, DEEP], "max_tokens": 4, "temperature": 0}, None),
    (request("i", "/v1/embeddings", input=["one", "two three"]), None),
    (request("j", "/v1/messages", messages=HELLO, max_tokens=4, temperature=0), None),
]


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")
    return EngineConfig(model=str(path), threads=1, max_num_seqs=2, max_queue=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("batch") / "in.jsonl"
    texts = [json.dumps(line) if isinstance(line, dict) else line for line, _ in LINES]
    lines = [text.encode() if isinstance(text, str) else text for text in texts]
    file.write_bytes(b"\n".join(lines) + b"\n\n")
    return file


def place(line: dict[str, Any]) -> int:
    """Index of the row that a line of the output answers."""
    return int(line["index"] if "index" in line else line["id"].removeprefix("batch_req_"))


def error_of(line: dict[str, Any]) -> str | None:
    """The message of the error that a line of the output holds."""
    error = line.get("error")
    if error is None and "response" in line and line["response"]["status_code"] != 200:
        error = line["response"]["body"]["error"]
    return None if error is None else str(error["message"])


def read(output: Path) -> dict[int, dict[str, Any]]:
    """The lines of an output by their row, after checking that each is there once."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    by_place = {place(line): line for line in lines}
    assert len(by_place) == len(lines)
    return dict(sorted(by_place.items()))


def test_mixed_file_and_resumption(
    engine_config: EngineConfig,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out.jsonl"
    assert run(engine_config, ServerConfig(), [source], output) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"batch: {len(LINES)} rows, {len(LINES) - 8} of them errors, ")
    lines = read(output)
    assert list(lines) == list(range(len(LINES)))
    for (_, message), line in zip(LINES, lines.values(), strict=True):
        if message is None:
            assert error_of(line) is None
        else:
            assert message in str(error_of(line))
    check_shapes(lines)

    # The end of it is lost, in the middle of a line.
    output.write_bytes(output.read_bytes()[:-9])
    assert run(engine_config, ServerConfig(), [source], output, resume=True) == 0
    assert "rows are no longer in the output" in capsys.readouterr().err
    resumed = read(output)
    assert [error_of(line) for line in resumed.values()] == [error_of(x) for x in lines.values()]
    assert resumed[3] | {"usage": None} == lines[3] | {"usage": None}

    # Nothing is left to do: not even the model is loaded.
    before = output.read_bytes()
    nowhere = EngineConfig(model="nowhere")
    named = ServerConfig(served_model_name="tiny")
    assert run(nowhere, named, [source], output, resume=True) == 0
    assert output.read_bytes() == before


def check_shapes(lines: dict[int, dict[str, Any]]) -> None:
    """OpenAI's envelope for OpenAI's, and a simple line for a simple one."""
    chat = lines[0]["response"]
    assert (lines[0]["custom_id"], lines[0]["error"], chat["status_code"]) == ("a", None, 200)
    assert chat["body"]["object"] == "chat.completion"
    assert chat["body"]["model"] == "tiny"
    assert lines[1]["response"]["body"]["object"] == "text_completion"
    assert lines[2].keys() == {"index", "id", "text", "finish_reason", "usage"}
    assert lines[2]["id"] == "mine"
    assert lines[3]["text"] == chat["body"]["choices"][0]["message"]["content"]
    assert len(lines[4]["choices"]) == 2
    assert lines[5]["response"] is None
    assert lines[14]["response"]["status_code"] == 404
    assert lines[16].keys() == {"index", "error"}
    embeddings = lines[22]["response"]["body"]
    assert [len(each["embedding"]) for each in embeddings["data"]] == [64, 64]


def test_status_1_if_every_row_failed(
    engine_config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": 3}\nno JSON\n')
    assert run(engine_config, ServerConfig(), [source], output) == 1
    assert capsys.readouterr().err.endswith(f"batch: every row failed; {output} says why\n")
    assert len(read(output)) == 2
    source.write_text('{"prompt": 3}\n{"prompt": 4}\n')
    assert run(engine_config, ServerConfig(), [source], output, overwrite=True) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("batch: every row failed with this error: prompt must be a text")
    source.write_text('{"prompt": 3}\n{"prompt": "a", "max_tokens": 1}\n')
    assert run(engine_config, ServerConfig(), [source], output, overwrite=True) == 0


def test_a_run_ends_if_its_first_rows_all_fail_alike(
    engine_config: EngineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = json.dumps({"prompt": "one", "max_tokens": 1})
    bad = [json.dumps({"prompt": "one", "max_tokens": -1 - row}) for row in range(ALIKE)]
    later = ["not json"] * 10 * ALIKE
    source.write_text("\n".join([*bad, good, *later]))
    with pytest.raises(RowsFailAlike, match="100 rows all failed alike: max_tokens is -"):
        run(engine_config, ServerConfig(), [source], output)
    assert "rows are done; to continue, run the same command with --resume" in (
        capsys.readouterr().err
    )
    done = read(output)
    assert set(range(ALIKE)) <= set(done) < set(range(len(bad) + 1 + len(later)))
    # To resume is to accept the errors.
    assert run(engine_config, ServerConfig(), [source], output, resume=True) == 0
    lines = read(output)
    assert len(lines) == len(bad) + 1 + len(later)
    assert [row for row, line in lines.items() if error_of(line) is None] == [ALIKE]


@pytest.mark.parametrize("place", [0, 57, ALIKE - 1])
@pytest.mark.parametrize("odd", [{"prompt": "one", "max_tokens": 1}, {"prompt": "one", "n": -1}])
def test_a_run_goes_on_if_one_of_its_first_rows_differs(
    engine_config: EngineConfig, tmp_path: Path, place: int, odd: dict[str, Any]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = ["not json"] * 2 * ALIKE
    lines[place] = json.dumps(odd)
    lines[-1] = json.dumps({"prompt": "one", "max_tokens": 1})
    source.write_text("\n".join(lines))
    assert run(engine_config, ServerConfig(), [source], output) == 0
    assert len(read(output)) == len(lines)


def test_an_output_is_not_overwritten_by_accident(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    config = EngineConfig(model="nowhere")
    for options, message in (
        ({}, "exists; --resume continues it, --overwrite replaces it"),
        ({"resume": True}, "but .*out.jsonl.state does not record its rows"),
        ({"resume": True, "overwrite": True}, "contradict"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(config, ServerConfig(), [source], output, **options)
    with pytest.raises(ConfigError, match="is the input"):
        run(config, ServerConfig(), [output], output, overwrite=True)
    assert output.read_text() == "precious\n"


def test_files_that_cannot_be_used(source: Path, tmp_path: Path) -> None:
    config = EngineConfig(model="nowhere")
    with pytest.raises(ConfigError, match="No such file or directory"):
        run(config, ServerConfig(), [tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(ConfigError, match="if it is the model, use --model owner/name"):
        run(config, ServerConfig(), [Path("owner/name"), source], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--output .*it must be a file"):
        run(config, ServerConfig(), [source], tmp_path, overwrite=True)
    output = tmp_path / "out"
    output.write_text("")
    with pytest.raises(ConfigError, match="No such file or directory"):
        run(config, ServerConfig(), [tmp_path / "nowhere"], output, overwrite=True)
    with pytest.raises(ConfigError, match="/dev/null is not a regular file"):
        run(config, ServerConfig(), [Path("/dev/null")], output, overwrite=True)
    with pytest.raises(ConfigError, match="--output /dev/null: it must be a file"):
        run(config, ServerConfig(), [source], Path("/dev/null"), resume=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no file that ends in \.jsonl"):
        run(config, ServerConfig(), [tmp_path / "empty"], output, overwrite=True)
    with pytest.raises(ConfigError, match="must be different files"):
        run(config, ServerConfig(), [source], output, errors=output, overwrite=True)
    state = tmp_path / "notes"
    state.write_text("These are my notes, which are older than SQLite.\n" * 99)
    with pytest.raises(ConfigError, match=r"the state .*notes: file is not a database"):
        run(config, ServerConfig(), [source], output, state=state, overwrite=True)
    assert output.read_text() == ""


def test_an_empty_file_has_an_empty_answer(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n")
    output.write_text("old\n")
    assert run(EngineConfig(model="nowhere"), ServerConfig(), [source], output, overwrite=True) == 0
    assert output.read_text() == ""


def test_a_model_that_cannot_be_loaded_leaves_no_empty_output(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(ModelError, match="no checkpoint"):
        run(EngineConfig(model="nowhere"), ServerConfig(), [source], output)
    assert not output.exists(), "it would stop the next try"


async def test_an_engine_that_is_gone_ends_the_run() -> None:
    api = LocalApi(row_app(ServerState(model="tiny")))
    with pytest.raises(EngineError, match="not ready"):
        await api.post(TEXT, b'{"model": "tiny", "prompt": "one"}')


def test_a_row_samples_the_same_in_every_run(engine_config: EngineConfig, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text((json.dumps({"prompt": "one two", "max_tokens": 16}) + "\n") * 4)
    run(engine_config, ServerConfig(), [source], output)
    lines = read(output)
    assert len({line["text"] for line in lines.values()}) == 4
    run(engine_config, ServerConfig(), [source], output, overwrite=True)
    assert [x["text"] for x in read(output).values()] == [x["text"] for x in lines.values()]


async def test_an_unexpected_fault_is_that_rows_alone(caplog: pytest.LogCaptureFixture) -> None:
    """As with a server, which answers with a 500, logs the fault and goes on."""
    app = row_app(ServerState(model="m"))

    @app.post("/faulty")
    async def faulty() -> None:
        raise ZeroDivisionError("planted")

    status, body = await LocalApi(app).post("/faulty", b"{}")
    assert status == 500
    assert json.loads(body)["error"]["message"]
    assert "planted" in caplog.text


def mock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`run` on a mock model."""
    config = replace(mock_config(folder, monkeypatch), prefix_caching=False)
    return partial(run, config, ServerConfig(), runner_factory=FAST)


def test_a_row_of_many_answers_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs all three places that there are, which others want, too."""
    config = replace(mock_config(tmp_path, monkeypatch), max_num_seqs=2, max_queue=1)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": [1, row], "max_tokens": 5, "n": 3 if row == 5 else 1} for row in range(50)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(config, ServerConfig(), [source], output, runner_factory=FAST) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(50))
    (turn,) = (turn for turn, line in enumerate(lines) if line["index"] == 5)
    assert len(lines[turn]["choices"]) == 3
    assert turn < 15


async def test_a_row_that_is_refused_for_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Less and less often."""
    app = FastAPI()
    times: list[float] = []

    @app.post("/busy")
    async def busy() -> JSONResponse:
        times.append(time.monotonic())
        return JSONResponse({}, 200 if len(times) == 8 else 429)

    monkeypatch.setattr(local, "WAITS", (0.01, 0.04))
    assert await LocalApi(app).post("/busy", b"{}") == (200, b"{}")
    waits = [after - before for before, after in pairwise(times)]
    assert all(
        wait > 0.9 * least for wait, least in zip(waits, (0.01, 0.02, *[0.04] * 5), strict=True)
    )


def test_many_files_a_directory_and_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of all rows, the failed ones in a file of their own; and once more, resumed."""
    batch = mock(tmp_path, monkeypatch)
    folder = tmp_path / "questions"
    folder.mkdir()
    write_rows(tmp_path / "all.jsonl", 9)
    lines = (tmp_path / "all.jsonl").read_bytes().splitlines(keepends=True)
    first, output, errors = tmp_path / "a.jsonl", folder / "out.jsonl", folder / "failed.jsonl"
    first.write_bytes(b"".join(lines[:2]))
    (folder / "c.jsonl").write_bytes(b"".join(lines[4:]) + b"nonsense\n")
    (folder / "b.jsonl").write_bytes(b"".join(lines[2:4]))
    sources = [first, folder, Path("-")]
    last = b'{"prompt": []}\n'
    options = {"errors": errors, "ordered": True, "resume": True}
    for times in (1, 2):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(last)))
        assert batch(sources, output, **options) == 0
        log = capsys.readouterr().err
        assert f"batch: reads {first}, {folder}/b.jsonl, {folder}/c.jsonl, -" in log
        assert ("11 rows, 2 of them errors" in log) == (times == 1)
        assert ("0 rows, 0 of them errors" in log) == (times == 2)
        assert check_output(output, 9) == list(range(9))
        bad, empty = (json.loads(line) for line in errors.read_text().splitlines())
        assert "c.jsonl line 6 is not JSON" in bad["error"]["message"]
        assert empty["error"]["message"] == "prompt is empty"
    assert sorted(path.name for path in folder.iterdir()) == [
        "b.jsonl",
        "c.jsonl",
        "failed.jsonl",
        "out.jsonl",
        "out.jsonl.state",
    ]


def test_another_input_or_other_settings_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = mock(tmp_path, monkeypatch)
    source, output = write_rows(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    assert batch([source], output) == 0
    before = output.read_bytes()
    for options, message in (
        ({"ordered": True}, "was begun with ordered = False, which is now True"),
        ({"errors": tmp_path / "errors"}, "was begun with errors = False"),
    ):
        with pytest.raises(ConfigError, match=message):
            batch([source], output, resume=True, **options)
    with pytest.raises(ConfigError, match="begun with 1 input files, and now there are 2"):
        batch([source, source], output, resume=True)
    text = source.read_bytes()
    source.write_bytes(text.replace(b"1", b"2"))
    with pytest.raises(ConfigError, match=r"in\.jsonl has changed since .*out\.jsonl was begun"):
        batch([source], output, resume=True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    with pytest.raises(ConfigError, match="stdin has changed since"):
        batch([Path("-")], output, resume=True)
    assert output.read_bytes() == before
    assert {path.name for path in tmp_path.glob("*.stdin*")} == set()
    source.write_bytes(text)  # what it was, at another time
    moved = source.rename(tmp_path / "moved.jsonl")
    assert batch([moved], output, resume=True) == 0
    assert output.read_bytes() == before
