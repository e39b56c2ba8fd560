"""The input of a batch: JSONL files, the files of directories, and stdin.

Lines are counted from 0 through all files. They are read one at a time, and of
a line that is too long no more than the limit is in memory.

A row of a batch: a request in, an answer out, one JSON object a line.

A line of the input is OpenAI's envelope (custom_id, method, url, body), or
simply a body with a `prompt` or `messages`, and an `id` if one likes. The line
of the output has the same form: OpenAI's envelope around the API's response, or
just the text and its usage. A line that holds no request is answered with an
error, in the form that it has.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from weft.errors import ConfigError
from weft.serving.batch.database import of_file

MAX_LINE = 32 * 1024 * 1024  # bytes; a prompt of a million tokens takes about five
STDIN = Path("-")
_CHUNK = 1 << 20  # bytes read at a time


class Line(msgspec.Struct, frozen=True):
    """A line that is not blank.

    Attributes:
        index: among all lines of all files, from 0.
        place: where it is, for people: its number, and its file if there are several.
        data: the line; None if it is longer than `MAX_LINE`.
    """

    index: int
    place: str
    data: bytes | None


class Inputs:
    """Files that are read one after the other; iterate over it for their lines.

    Raises:
        ConfigError: when one of them cannot be read.
        DiskError: when that may pass.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def digests(self) -> list[str]:
        """SHA-256 of each file."""
        found = []
        for path in self.files:
            with _opened(path) as file:
                digest = hashlib.sha256()
                while data := file.read(_CHUNK):
                    digest.update(data)
                found.append(digest.hexdigest())
        return found

    def __iter__(self) -> Iterator[Line]:
        index = 0
        for path in self.files:
            name = f"{path.name} " if len(self.files) > 1 else ""
            with _opened(path) as file:
                for number, data in enumerate(_lines(file), start=1):
                    if data is None or data.strip():
                        yield Line(index, f"{name}line {number}", data)
                    index += 1


def find(sources: Sequence[Path], leave_out: Collection[Path]) -> list[Path]:
    """The files that are meant, in their order; of a directory, every *.jsonl in it, sorted.

    Args:
        sources: files, directories, `STDIN`.
        leave_out: files that are not taken for a directory's.

    Raises:
        ConfigError: one is not there, is no file, or holds none.
    """
    apart = {path.resolve() for path in leave_out}
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            within = sorted(p for p in source.glob("*.jsonl") if p.resolve() not in apart)
            if not within:
                raise ConfigError(f"{source} has no file that ends in .jsonl")
            files += within
        elif source != STDIN and source.exists() and not source.is_file():  # it is read twice
            raise ConfigError(f"{source} is not a regular file; - reads stdin")
        else:
            files.append(source)
    if files.count(STDIN) > 1:
        raise ConfigError("- is given twice; stdin can be read once")
    return files


def spool(stdin: BinaryIO, path: Path) -> None:
    """Write stdin to a file, to be read again; ConfigError when there is no room."""
    try:
        with path.open("wb") as file:
            shutil.copyfileobj(stdin, file, _CHUNK)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"stdin is kept in {path}: {error.strerror}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise of_file(path, error) from error


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    while line := file.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE:
            yield line
            continue
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE)):
            pass
        yield None


_ID = "batch_req_"
SAMPLED = ("/v1/chat/completions", "/v1/completions")
URLS = (*SAMPLED, "/v1/embeddings")


class Row(msgspec.Struct, frozen=True):
    """One line of the input.

    Attributes:
        index: of the line among all lines, from 0.
        id: the line's custom_id, or its `id` if it is a simple one.
        simple: the line is a body with a prompt or messages, not OpenAI's envelope.
        problem: why there is no request in it.
        code: a word for the problem.
    """

    index: int
    id: Any = None
    simple: bool = False
    url: str = ""
    body: dict[str, Any] = {}
    problem: str | None = None
    code: str = "invalid_line"

    @property
    def custom_id(self) -> str | None:
        """What no other row may have, too; a simple row's `id` is its own affair."""
        return self.id if not self.simple and isinstance(self.id, str) else None


def parse(line: Line, model: str) -> Row:
    """Read a line; what is wrong with it is in the row's `problem`. `model` is the default."""
    try:
        return _parse(line, model)
    except RecursionError:
        return Row(line.index, problem=f"{line.place} is nested too deeply")


def _parse(line: Line, model: str) -> Row:
    index, place, data = line.index, line.place, line.data
    if data is None:
        return Row(index, problem=f"{place} is longer than {MAX_LINE} bytes")
    try:
        content = msgspec.json.decode(data)
    except ValueError as error:  # of which msgspec's and Unicode's errors are
        return Row(index, problem=f"{place} is not JSON: {error}")
    if not isinstance(content, dict):
        return Row(index, problem=f"{place} is not a JSON object")
    if "body" not in content and ("prompt" in content or "messages" in content):
        row_id = content.pop("id", None)
        url = SAMPLED[0] if "messages" in content else SAMPLED[1]
        row = Row(index, None, simple=True, url=url, body={"model": model} | content)
        if isinstance(row_id, list | dict):
            return replace(row, problem=f"{place}: id must be a string or a number")
        row = replace(row, id=row_id)
    else:
        custom_id = content.get("custom_id")
        row = Row(index, custom_id if isinstance(custom_id, str) else None)
        if problem := _envelope_problem(content):
            return replace(row, problem=f"{place}: {problem}")
        row = replace(row, url=content["url"], body={"model": model} | content["body"])
    if row.body.get("stream"):
        return replace(row, problem=f"{place}: stream is for HTTP; leave it out")
    return row


def _envelope_problem(content: dict[str, Any]) -> str | None:
    if not isinstance(content.get("custom_id"), str):
        return "custom_id is missing; a line is custom_id, method, url and body, or a prompt"
    if content.get("method", "POST") != "POST":
        return f"method is {_shown(content['method'])}; it must be POST"
    if content.get("url") not in URLS:
        return f"url is {_shown(content.get('url'))}; it must be {' or '.join(URLS)}"
    if not isinstance(content.get("body"), dict):
        return "body is missing; it is the request, a JSON object"
    return None


def _shown(value: Any) -> str:
    """A value of a line, which may be of any length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def answers(body: dict[str, Any]) -> int:
    """How many answers a request asks for, if it is one, of which each waits for room."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = len(prompt)
    return prompts * (n if isinstance(n, int) and n > 0 else 1)


def answered(row: Row, status: int, body: bytes) -> dict[str, Any]:
    """The output line of a row that the API has answered, with 200 or with an error."""
    if not row.simple:
        response = {
            "status_code": status,
            "request_id": f"req_{row.index}",
            "body": msgspec.Raw(body),
        }
        return _envelope(row, response, None)
    content = msgspec.json.decode(body)
    head = _simple_head(row)
    if status != 200:
        return head | {"error": content["error"]}
    if len(content["choices"]) > 1:
        return head | {"choices": content["choices"], "usage": content["usage"]}
    (choice,) = content["choices"]
    message = choice.get("message", {})
    more = {name: message[name] for name in ("reasoning", "tool_calls") if message.get(name)}
    return head | {
        "text": choice["text"] if "text" in choice else message["content"],
        **more,
        "finish_reason": choice["finish_reason"],
        "usage": content["usage"],
    }


def refused(row: Row) -> dict[str, Any]:
    """The output line of a row that holds no request."""
    error = {"code": row.code, "message": row.problem}
    if row.simple:
        return _simple_head(row) | {"error": error}
    return _envelope(row, None, error)


def _simple_head(row: Row) -> dict[str, Any]:
    return {"index": row.index} | ({} if row.id is None else {"id": row.id})


def _envelope(row: Row, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"{_ID}{row.index}", "custom_id": row.id, "response": response, "error": error}
