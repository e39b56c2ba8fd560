"""Kernels are run, loaded or left out, as the launching thread says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from weft.kernels.gpu.runtime import launches
from weft.kernels.gpu.runtime.launches import Action, decided, loaded


@triton.jit
def add_one(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 1)


@triton.jit
def add_ten(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 10)


def added(context: Any = None) -> float:
    x = torch.zeros(1)
    if context is None:
        add_one[(1,)](x)
        add_ten[(1,)](x)
    else:
        with context:
            add_one[(1,)](x)
            add_ten[(1,)](x)
    return x.item()


def test_only_what_is_decided_runs() -> None:
    def decide(name: str) -> Action:
        return "run" if name == "add_ten" else "skip"

    assert added() == 11
    assert added(decided(decide)) == 10
    assert added(loaded()) == 0
    assert added() == 11


def test_the_inner_decision_counts_and_the_outer_comes_back() -> None:
    with decided(lambda name: "skip"):
        assert added(decided(lambda name: "run")) == 11
        assert added() == 0


def test_other_threads_are_left_alone() -> None:
    results: list[float] = []
    with loaded():
        thread = threading.Thread(target=lambda: results.append(added()))
        thread.start()
        thread.join()
        assert added() == 0
    assert results == [11]


def test_triton_is_as_before_after_an_error() -> None:
    before = [function.run for function in launches._originals]
    with pytest.raises(ValueError, match="inside"), loaded():
        raise ValueError("inside")
    assert [function.run for function in launches._originals] == before


class FakeCompiled:
    """What a compiled kernel does of itself when it is loaded."""

    loads = 0

    @property
    def run(self) -> None:
        FakeCompiled.loads += 1


def test_loading_compiles_and_loads_and_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton's JITFunction, which needs a GPU."""
    launched: list[tuple[Any, bool]] = []

    class FakeKernel:
        __name__ = "fake"

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> FakeCompiled:
            launched.append((grid, warmup))
            return FakeCompiled()

    originals: dict[Any, Callable[..., Any]] = {FakeKernel: FakeKernel.run}
    monkeypatch.setattr(launches, "_originals", originals)
    kernel = FakeKernel()
    with loaded():
        kernel.run(1, grid=(2,), warmup=False)
    assert launched == [((2,), True)]
    assert FakeCompiled.loads == 1
    kernel.run(1, grid=(3,), warmup=False)
    assert launched[1:] == [((3,), False)]
    assert FakeCompiled.loads == 1
