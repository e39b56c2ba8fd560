"""The files of a batch: input lines, and the output lines that answer them.

Inputs are JSONL files, directories of them, and stdin. Lines are counted from 0 through all files.
One line at a time is in memory, and at most `MAX_LINE` bytes of it.

An input line has one of two forms. OpenAI's envelope is {custom_id, method, url, body}. The simple
form is a body with `prompt` or `messages`, and optionally an `id`. The output line has the same
form: an envelope around the API's response, or the text and its usage. If a line has no valid
request, its output line has an error.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from weft.errors import ConfigError, shown
from weft.models.checkpoint.locate import HubModel, remote
from weft.serving.batch.database import file_error

MAX_LINE = 32 * 1024 * 1024  # bytes; a prompt of a million tokens takes about five
STDIN = Path("-")
_CHUNK = 1 << 20  # bytes read at a time


class Line(msgspec.Struct, frozen=True):
    """A line that is not blank.

    Attributes:
        index: number among all lines of all files, from 0.
        place: description for people: the line's number, and its file if there are several.
        data: contents; None if the line is longer than `MAX_LINE`.
    """

    index: int
    place: str
    data: bytes | None


class Inputs:
    """Files that are read in order; iterate over this object to get their lines.

    Raises:
        ConfigError: a file cannot be read.
        DiskError: a file cannot be read now, but maybe later.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def digests(self) -> list[str]:
        """Return the SHA-256 of each file."""
        found = []
        for path in self.files:
            with _open(path) as file:
                digest = hashlib.sha256()
                while data := file.read(_CHUNK):
                    digest.update(data)
                found.append(digest.hexdigest())
        return found

    def __iter__(self) -> Iterator[Line]:
        index = 0
        for path in self.files:
            name = f"{path.name} " if len(self.files) > 1 else ""
            with _open(path) as file:
                for number, data in enumerate(_lines(file), start=1):
                    if data is not None and number == 1:
                        data = data.removeprefix(codecs.BOM_UTF8)  # from Windows' editors
                    if data is None or data.strip():
                        yield Line(index, f"{name}line {number}", data)
                    index += 1


def find(sources: Sequence[Path], leave_out: Collection[Path]) -> list[Path]:
    """Return the input files, in order; a directory stands for its *.jsonl files, sorted.

    Args:
        sources: files, directories, `STDIN`.
        leave_out: files to ignore in directories, such as the output.

    Raises:
        ConfigError: a source is not a regular file, a directory has no *.jsonl file, or stdin
            occurs twice.
    """
    excluded = {path.resolve() for path in leave_out}
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            within = sorted(p for p in source.glob("*.jsonl") if p.resolve() not in excluded)
            if not within:
                raise ConfigError(f"{source} has no file that ends in .jsonl")
            files += within
        elif source != STDIN and not source.exists() and isinstance(remote(str(source)), HubModel):
            raise ConfigError(
                f"there is no file {source}; if it is the model, use --model {source}"
            )
        elif source != STDIN and source.exists() and not source.is_file():  # inputs are read twice
            raise ConfigError(f"{source} is not a regular file; - reads stdin")
        else:
            files.append(source)
    if files.count(STDIN) > 1:
        raise ConfigError("- is given twice; stdin can be read only once")
    return files


def spool(stdin: BinaryIO, path: Path) -> None:
    """Copy stdin to a file, because input is read twice; ConfigError if that fails."""
    try:
        with path.open("wb") as file:
            shutil.copyfileobj(stdin, file, _CHUNK)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"cannot copy stdin to {path}: {error.strerror}") from None


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise file_error(path, error) from error


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    while line := file.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE:
            yield line
            continue
        while not line.endswith(b"\n") and (line := file.readline(MAX_LINE)):
            pass
        yield None


_ID = "batch_req_"
SAMPLED = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
URLS = (*SAMPLED, "/v1/embeddings")


class Row(msgspec.Struct, frozen=True):
    """A parsed input line.

    Attributes:
        index: number among all lines, from 0.
        id: custom_id of an envelope, or `id` or `custom_id` of a simple line.
        id_field: the id's name in a simple line, and in its answer.
        simple: True for the simple form, False for OpenAI's envelope.
        url: route that answers the row.
        body: request body.
        problem: reason why the line has no valid request; None if it has.
        code: error code for the problem.
    """

    index: int
    id: Any = None
    id_field: str = "id"
    simple: bool = False
    url: str = ""
    body: dict[str, Any] = {}
    problem: str | None = None
    code: str = "invalid_line"

    @property
    def custom_id(self) -> str | None:
        """Id that must be unique among all rows; None without one. An `id` may repeat."""
        unique = not self.simple or self.id_field == "custom_id"
        return self.id if unique and isinstance(self.id, str) else None


def parse(line: Line, model: str) -> Row:
    """Parse a line; `model` is the default model. An invalid line gives a row with a `problem`."""
    try:
        return _parse(line, model)
    except RecursionError:
        return Row(line.index, problem=f"{line.place} is nested too deeply")


_UTF_16 = (
    "looks like UTF-16, but lines are JSON in UTF-8; convert the file with "
    "`iconv -f UTF-16 -t UTF-8 FILE > NEW`"
)


def _parse(line: Line, model: str) -> Row:
    index, place, data = line.index, line.place, line.data
    if data is None:
        return Row(index, problem=f"{place} is longer than {MAX_LINE} bytes")
    try:
        content = msgspec.json.decode(data)
    except ValueError as error:  # includes msgspec's and Unicode's errors
        reason = _UTF_16 if b"\0" in data else f"is not JSON: {error}"
        return Row(index, problem=f"{place} {reason}")
    if not isinstance(content, dict):
        return Row(index, problem=f"{place} is not a JSON object")
    if "body" not in content and ("prompt" in content or "messages" in content):
        if content.get("custom_id") is None:
            content.pop("custom_id", None)
        id_field = "custom_id" if "custom_id" in content else "id"
        row_id = content.pop(id_field, None)
        url = SAMPLED[0] if "messages" in content else SAMPLED[1]
        row = Row(index, None, simple=True, url=url, body={"model": model} | content)
        if isinstance(row_id, list | dict | bool):
            return replace(row, problem=f"{place}: {id_field} must be a string or a number")
        row = replace(row, id=row_id, id_field=id_field)
    else:
        custom_id = content.get("custom_id")
        row = Row(index, custom_id if isinstance(custom_id, str) else None)
        if problem := _envelope_problem(content):
            return replace(row, problem=f"{place}: {problem}")
        row = replace(row, url=content["url"], body={"model": model} | content["body"])
    if row.body.get("stream"):
        return replace(row, problem=f"{place}: stream works only over HTTP; leave it out")
    return row


def _envelope_problem(content: dict[str, Any]) -> str | None:
    custom_id = content.get("custom_id")
    if custom_id is not None and not isinstance(custom_id, str):
        return f"custom_id is {shown(custom_id)}; it must be a string"
    if custom_id is None:
        return "custom_id is missing; a line has custom_id, method, url and body, or a prompt"
    if content.get("method", "POST") != "POST":
        return f"method is {shown(content['method'])}; it must be POST"
    if content.get("url") not in URLS:
        url = shown(content["url"]) if "url" in content else "missing"
        return f"url is {url}; it must be {' or '.join(URLS)}"
    if not isinstance(content.get("body"), dict):
        return "body is missing; it must be the request, a JSON object"
    return None


def count_answers(body: dict[str, Any]) -> int:
    """Return how many answers a request asks for: `n` times its prompts. It may be invalid."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = 1
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = len(prompt)
    return prompts * (n if isinstance(n, int) and n > 0 else 1)


_OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")
_OF_CHOICE = ("token_ids", "logprobs", *_OF_PROMPT)
"""Fields of an answer that a row must ask for. Those of a chat's prompt are beside its choices."""


def answer_line(row: Row, status: int, body: bytes) -> dict[str, Any]:
    """Make the output line for the API's response, whatever its status."""
    if not row.simple:
        response = {
            "status_code": status,
            "request_id": f"req_{row.index}",
            "body": msgspec.Raw(body),
        }
        return _envelope(row, response, None)
    content = msgspec.json.decode(body)
    start = _simple_start(row)
    if status != 200:
        return start | {"error": content["error"]}
    of_prompt = {name: content[name] for name in _OF_PROMPT if name in content}
    if len(content["choices"]) > 1:
        return start | {"choices": content["choices"], **of_prompt, "usage": content["usage"]}
    (choice,) = content["choices"]
    message = choice.get("message", {})
    more = {name: message[name] for name in ("reasoning", "tool_calls") if message.get(name)}
    more |= {name: choice[name] for name in _OF_CHOICE if choice.get(name) is not None} | of_prompt
    return start | {
        "text": choice["text"] if "text" in choice else message["content"],
        **more,
        "finish_reason": choice["finish_reason"],
        "usage": content["usage"],
    }


def error_line(row: Row) -> dict[str, Any]:
    """Make the output line for a row without a valid request."""
    error = {"code": row.code, "message": row.problem}
    if row.simple:
        return _simple_start(row) | {"error": error}
    return _envelope(row, None, error)


def _simple_start(row: Row) -> dict[str, Any]:
    return {"index": row.index} | ({} if row.id is None else {row.id_field: row.id})


def _envelope(row: Row, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"{_ID}{row.index}", "custom_id": row.id, "response": response, "error": error}
