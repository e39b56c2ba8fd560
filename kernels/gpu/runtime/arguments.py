"""What an op refuses before anything is launched, and how it says so: op, argument, value, allowed.

Checks take a function `check` that raises; the ops of several ranks have one from
`workspace.agreed`, so that what one rank refuses is an error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.errors import WeftError

Require = Callable[[str, object, bool, str], None]
"""(argument, value, whether it is allowed, what it must do): raises if it is not."""


class KernelError(WeftError):
    """An op was called with what it cannot take, or a wait inside one ran out."""


def require(op: str, argument: str, value: object, allowed: bool, must: str) -> None:
    """Refuse an argument before anything is launched.

    Raises:
        KernelError: naming op, argument, value and what is allowed.
    """
    if not allowed:
        raise KernelError(f"{op}: {argument} is {value}; it must {must}")


def require_counts(check: Require, least: int, **counts: object) -> None:
    """Refuse what is not a whole number of at least so much."""
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
    """Refuse what is no tensor of that shape, if given, and of one of the dtypes, contiguous and
    on the device.
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
