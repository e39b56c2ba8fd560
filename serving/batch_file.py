"""The files of `weft batch`: requests in, answers out, one JSON object a line.

A line of the input is OpenAI's envelope (custom_id, method, url, body), or
simply a body with a `prompt` or `messages`, and an `id` if one likes. The line
of the output has the same form: OpenAI's envelope around the API's response, or
just the text and its usage. A line that holds no request is answered with an
error, in the form that it has.

The output holds whole lines only, each written as it comes. What kills the
writer can leave one torn line at the end, which resuming cuts off.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from weft.errors import ConfigError, WeftError

_ID = "batch_req_"
URLS = ("/v1/chat/completions", "/v1/completions")


class Row(msgspec.Struct, frozen=True):
    """One line of the input.

    Attributes:
        index: of the line in the file, from 0.
        id: the line's custom_id, or its `id` if it is a simple one.
        simple: the line is a body with a prompt or messages, not OpenAI's envelope.
        problem: why there is no request in it.
    """

    index: int
    id: Any = None
    simple: bool = False
    url: str = ""
    body: dict[str, Any] = {}
    problem: str | None = None


def parse(index: int, line: bytes, model: str) -> Row:
    """Read a line; what is wrong with it is in the row's `problem`. `model` is the default."""
    try:
        content = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:  # of which msgspec's and Unicode's errors are
        return Row(index, problem=f"line {index + 1} is not JSON: {error}")
    if not isinstance(content, dict):
        return Row(index, problem=f"line {index + 1} is not a JSON object")
    if "body" not in content and ("prompt" in content or "messages" in content):
        row_id = content.pop("id", None)
        url = URLS[0] if "messages" in content else URLS[1]
        row = Row(index, row_id, simple=True, url=url, body={"model": model} | content)
    else:
        row = Row(index, content.get("custom_id"))
        if problem := _envelope_problem(content):
            return replace(row, problem=f"line {index + 1}: {problem}")
        row = replace(row, url=content["url"], body={"model": model} | content["body"])
    if row.body.get("stream"):
        problem = "stream is for HTTP; leave it out"
        return replace(row, problem=f"line {index + 1}: {problem}")
    return row


def _envelope_problem(content: dict[str, Any]) -> str | None:
    if not isinstance(content.get("custom_id"), str):
        return "custom_id is missing; a line is custom_id, method, url and body, or a prompt"
    if content.get("method", "POST") != "POST":
        return f"method is {content['method']!r}; it must be POST"
    if content.get("url") not in URLS:
        return f"url is {content.get('url')!r}; it must be {' or '.join(URLS)}"
    if not isinstance(content.get("body"), dict):
        return "body is missing; it is the request, a JSON object"
    return None


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
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
    return head | {
        "text": choice["text"] if "text" in choice else message["content"],
        **calls,
        "finish_reason": choice["finish_reason"],
        "usage": content["usage"],
    }


def refused(row: Row) -> dict[str, Any]:
    """The output line of a row that holds no request."""
    error = {"code": "invalid_line", "message": row.problem}
    if row.simple:
        return _simple_head(row) | {"error": error}
    return _envelope(row, None, error)


def _simple_head(row: Row) -> dict[str, Any]:
    return {"index": row.index} | ({} if row.id is None else {"id": row.id})


def _envelope(row: Row, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"{_ID}{row.index}", "custom_id": row.id, "response": response, "error": error}


class Output:
    """The file of answers; it is opened, and made if need be, by `with`.

    Args:
        path: of the file.
        overwrite: replace it if there is one.
        resume: keep its whole lines if there is one, and add to them.

    Attributes:
        done: indices of the rows whose answers it holds already.

    Raises:
        ConfigError: there is one and neither was asked for, or it cannot be read or written.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        if path.exists() and not overwrite and not resume:
            raise ConfigError(f"{path} exists; --resume goes on with it, --overwrite replaces it")
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"--output {path}: it must be a file in a directory that exists")
        self.path = path
        try:
            self.done = self._recover() if resume and path.exists() else set()
        except OSError as error:
            raise ConfigError(f"--resume: {path}: {error.strerror}") from None
        self._mode = "ab" if resume else "wb"
        self._failure: WeftError | None = None

    def __enter__(self) -> Self:
        try:
            # Unbuffered, so that a line is either written now or reported now.
            self._file = self.path.open(self._mode, buffering=0)
        except OSError as error:
            raise ConfigError(f"--output {self.path}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        """Have it on the disk."""
        with self._file:
            if self.path.is_file():  # what is no file, such as a pipe, has no disk
                os.fsync(self._file.fileno())

    def write(self, line: dict[str, Any]) -> None:
        """Add a line; WeftError when the disk is full. Nothing can follow a line that it tore."""
        if self._failure is not None:
            raise self._failure
        data = msgspec.json.encode(line) + b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            message = f"{self.path}: {error.strerror}; run again with --resume"
            self._failure = WeftError(message)
            raise self._failure from error

    def _recover(self) -> set[int]:
        """The rows that are done; a torn last line is cut off."""
        done, whole = set(), 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    done.add(msgspec.json.decode(line, type=_Written).row)
                except ValueError:  # of which msgspec's errors are
                    message = f"line {number} of {self.path} is not of a batch's output"
                    raise ConfigError(f"--resume: {message}") from None
                whole += len(line)
        os.truncate(self.path, whole)
        return done


class _Written(msgspec.Struct):
    """What tells whose answer a line of the output is."""

    index: int | None = None
    id: Any = None

    @property
    def row(self) -> int:
        if self.index is not None:
            return self.index
        return int(str(self.id).removeprefix(_ID))
