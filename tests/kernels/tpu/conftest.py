"""One worker interprets, and one compiles, for all of a process's tests in this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is first used


from weft.kernels.check.tpu.process import Workers


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


@pytest.fixture(scope="session")
def compiler() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers
