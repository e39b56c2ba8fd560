"""What the tests of kernels that work row by row share: memory that must not be touched, faults."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor

from weft.kernels.interpreter import gpu as interpreter

POISON = 77.0


class Bounds:
    """An observer that refuses accesses outside the tensors that a kernel was given."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def launched(self, tensors: object) -> None:
        pass

    def finished(self) -> None:
        pass

    def program(self, index: interpreter.Program) -> None:
        pass

    def atomics(self, atomics: object) -> None:
        pass

    def access(self, kind: str, addresses: interpreter.Array, itemsize: int) -> None:
        inside = np.zeros(len(addresses), bool)
        for begin, end in self.ranges:
            inside |= (addresses >= begin) & (addresses + np.uint64(itemsize) <= end)
        if not inside.all():
            raise IndexError(f"{kind} outside all tensors at {interpreter.where()}")


@contextmanager
def bounded() -> Iterator[None]:
    """Within, this thread's kernels run in the interpreter and may not leave their tensors."""
    bounds = Bounds()
    prepare = GridExecutor._init_args_hst

    def note(self: Any, args: Any, kwargs: Any) -> Any:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        bounds.ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        return prepare(self, args, kwargs)

    with interpreter.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "_init_args_hst", note)
        interpreter.observe(bounds)  # type: ignore[arg-type]
        try:
            yield
        finally:
            interpreter.observe(None)


class Fenced:
    """A tensor [n, ...] with a row of poison on either side of it."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        count, *rest = shape
        self._whole = torch.full((count + 2, *rest), POISON).to(dtype)
        self.inside = self._whole[1:-1]
        self.poison = self._whole[0].clone()

    def is_whole(self) -> bool:
        """Whether nothing was stored outside."""
        ends = (self._whole[0], self._whole[-1])
        return all(torch.equal(end.float(), self.poison.float()) for end in ends)


def finds(check: Callable[[ModuleType], None], module: ModuleType) -> bool:
    """Whether a check of a module fails."""
    try:
        with warnings.catch_warnings():  # faulty kernels compute anything
            warnings.simplefilter("ignore", RuntimeWarning)
            check(module)
    except AssertionError:
        return True
    except InterpreterError as error:
        if "outside all tensors" in str(error):
            return True
        raise
    return False


def same(got: Tensor, expected: Tensor) -> None:
    """Of one dtype and shape, and the same numbers."""
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
