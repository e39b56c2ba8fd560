"""Fetches a model from the hub or from object storage, in a child process.

A transfer may wait for a slow network in many threads; a process can be ended at any time. The
next one continues where it ended. The child exits when this process does.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace

import msgspec

from weft.errors import EngineError
from weft.models.checkpoint.locate import Bucket, HubModel, is_complete, locate, remote
from weft.serving.config.progress import ByteProgress
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.child_process import Failed, begin, how_it_ended, python_module

REPORT_EVERY = 0.1  # seconds between two messages


class FetchOrders(msgspec.Struct, frozen=True):
    """Parent -> child: the model to fetch, and whether the weights are needed."""

    config: EngineConfig
    model: str
    revision: str | None
    weights: bool


class Transferred(msgspec.Struct, frozen=True, tag=True):
    """Child -> parent: received bytes, and all bytes."""

    done: int
    total: int


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """Child -> parent: the model is here; `revision` is a hub id's commit."""

    revision: str | None


_reports = msgspec.json.Decoder(Transferred | Fetched | Failed)


def is_here(config: EngineConfig, *, weights: bool = True) -> bool:
    """Return whether the model and the tokenizer are on this machine.

    Raises:
        ConfigError: `model` and `revision` do not fit together.
        ModelError: a directory holds no checkpoint.
    """
    if remote(config.model, config.revision) is None:
        locate(config.model)
    return not _missing(config, weights)


async def fetch(config: EngineConfig, *, weights: bool = True) -> EngineConfig:
    """Fetch the model and the tokenizer if they are not on this machine.

    Args:
        config: the settings.
        weights: fetch the weights, too; otherwise only the small files.

    Returns:
        The settings with a hub model's id and commit, so that every process loads
        the same files.

    Raises:
        ConfigError: `model` and `revision` do not fit together.
        ModelError: the model cannot be fetched, or weft cannot load it.
    """
    for model, revision, with_weights in _missing(config, weights):
        await _run_child(FetchOrders(config, model, revision, with_weights))
    source = remote(config.model, config.revision)
    if isinstance(source, HubModel):
        return replace(config, model=source.id, revision=source.commit)
    return config


def _missing(config: EngineConfig, weights: bool) -> list[tuple[str, str | None, bool]]:
    """Return name, revision and the need for weights, for each missing model or tokenizer."""
    wanted: list[tuple[str, str | None, bool]] = [(config.model, config.revision, weights)]
    if config.tokenizer is not None:
        wanted.append((config.tokenizer, None, False))
    return [each for each in wanted if not _is_here(*each)]


def _is_here(model: str, revision: str | None, weights: bool) -> bool:
    match source := remote(model, revision):
        case HubModel():
            path = source.snapshot
            return path is not None and (is_complete(path) if weights else True)
        case Bucket():
            return source.is_complete
        case None:
            return True


async def _run_child(orders: FetchOrders) -> None:
    command, environment = python_module(__name__)
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(orders) + b"\n")
    try:
        with ByteProgress(f"download {orders.model}") as shown:
            async for line in process.stdout:
                match _reports.decode(line):
                    case Transferred(done, total):
                        shown.set(done, total)
                    case Fetched():
                        return
                    case Failed() as failed:
                        raise failed.error
        ended = how_it_ended(await process.wait()) or "ended"
        raise EngineError(f"the download of {orders.model} {ended}")
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
        await process.wait()


def main() -> None:
    """Run the child: orders from stdin, messages to stdout."""
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library's prints
    orders = begin(FetchOrders)
    from weft.models.checkpoint.download import download

    latest = 0.0

    def report(done: int, total: int) -> None:
        nonlocal latest
        if done == total or time.monotonic() - latest >= REPORT_EVERY:
            latest = time.monotonic()
            messages.write(msgspec.json.encode(Transferred(done, total)) + b"\n")

    try:
        source = remote(orders.model, orders.revision)
        assert source is not None
        message: Fetched | Failed = Fetched(download(source, report, weights=orders.weights))
    except Exception as error:  # noqa: BLE001  # the parent raises it
        message = Failed.of(error)
    messages.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.flush()
    os._exit(0)  # a failed download's other files may still be on their way


if __name__ == "__main__":
    main()
