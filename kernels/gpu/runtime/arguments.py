"""Checks of an op's arguments before anything is launched.

Messages name the op, the argument, its value and the limit.

A check takes a function `check` that raises. Ops of several ranks get theirs from
`workspace.agreed`, so that an argument refused on one rank is an error on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.errors import WeftError

Require = Callable[[str, object, bool, str], None]
"""(argument, value, whether it is allowed, what it must do): raises if it is not allowed."""


class KernelError(WeftError):
    """An op was called with arguments it does not take, or one of its waits timed out."""


def require(op: str, argument: str, value: object, allowed: bool, must: str) -> None:
    """Refuse an argument before anything is launched.

    Raises:
        KernelError: names the op, the argument, its value and the limit.
    """
    if not allowed:
        raise KernelError(f"{op}: {argument} is {value}; it must {must}")


def require_counts(check: Require, least: int, **counts: object) -> None:
    """Refuse values other than whole numbers of at least `least`."""
    for argument, count in counts.items():
        whole = isinstance(count, int) and not isinstance(count, bool)
        fits = whole and count >= least  # type: ignore[operator]
        check(argument, count, fits, f"be a whole number of at least {least}")


def require_tensor(
    check: Require,
    name: str,
    tensor: Tensor,
    shape: Sequence[int] | None,
    device: torch.device,
    *dtypes: torch.dtype,
) -> None:
    """Refuse a tensor with the wrong shape (if given), dtype, device or strides (it must be
    contiguous).
    """
    kind = f"a {type(tensor).__name__}"
    check(name, kind, isinstance(tensor, Tensor), "be a tensor")
    if shape is not None:
        given, must = list(tensor.shape), f"be {list(shape)}"
        check(f"{name}'s shape", given, given == list(shape), must)
    allowed = " or ".join(map(str, dtypes))
    check(f"{name}'s dtype", tensor.dtype, tensor.dtype in dtypes, f"be {allowed}")
    check(f"{name}'s device", tensor.device, tensor.device == device, f"be {device}")
    check(f"{name}'s stride", tensor.stride(), tensor.is_contiguous(), "be contiguous")
