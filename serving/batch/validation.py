"""The input of a server's batch is read before any of it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weft.serving.batch.inputs import Inputs
from weft.serving.batch.job import LeftOut
from weft.serving.batch.journal import Journal
from weft.serving.batch.objects import BatchError, BatchObject
from weft.serving.batch.rows import parse

MAX_ERRORS = 50  # of an input file that are shown


def validate(
    batch: BatchObject,
    inputs: Inputs,
    journal: Journal,
    *,
    model: str,
    stopped: Callable[[], bool],
) -> tuple[int, list[BatchError]]:
    """Begin the journal of a batch.

    Args:
        batch: says the endpoint.
        inputs: its file.
        journal: to begin.
        model: that rows are for which name none.
        stopped: asked before each row.

    Returns:
        How many rows there are, and the first of what is wrong with them.

    Raises:
        LeftOut: it was stopped.
        ConfigError, DiskError: the file cannot be read, or the journal not be written.
    """
    errors: list[BatchError] = []

    def rows() -> Iterator[tuple[int, str, str | None]]:
        for line in inputs:
            if stopped():
                raise LeftOut
            row = parse(line, model)
            problem = row.problem
            if row.simple:
                problem = f"{line.place}: custom_id is missing"
            elif problem is None and row.url != batch.endpoint:
                problem = f"{line.place}: url is {row.url!r}; the endpoint is {batch.endpoint}"
            if problem is not None:
                errors.append(BatchError("invalid_request", problem, line.index + 1))
            if len(errors) == MAX_ERRORS:
                return
            yield line.index, line.place, row.custom_id

    journal.begin({"inputs": inputs.digests()}, rows())
    for index, first in journal.duplicates(0, 2**62, most=MAX_ERRORS).items():
        problem = f"line {index + 1}: its custom_id is that of {first}"
        errors.append(BatchError("duplicate_custom_id", problem, index + 1, "custom_id"))
    if not errors and journal.total == 0:
        errors.append(BatchError("empty_file", "the input file has no requests"))
    return journal.total, sorted(errors, key=lambda error: error.line or 0)[:MAX_ERRORS]
