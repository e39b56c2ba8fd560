"""What the machine can do, measured beside the contestants: read bandwidth and bf16 GEMM rate.

Bandwidth is the best of several ways to read a gigabyte once with all threads
(a sum of floats; a dot product of two halves; a bfloat16 matrix times a
vector, packed as oneDNN wants it), each far larger than any cache. The GEMM
rate is that of a square bfloat16 product. Each is the median of its tries, as
the figures are that are held to it.

    python -m peers.limits THREADS      prints one JSON object
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

_SECONDS = 0.5  # that each is tried, for some times at least
_TRIES = 3
_BYTES = 1 << 30  # of the memory that is read
_GEMM = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """Attributes: bytes per second read from memory; bf16 floating-point operations per second."""

    bandwidth: float
    gemm: float


def measure(threads: int) -> Limits:
    """Measure both with so many threads; takes a few seconds and 1.5 GiB."""
    gemm = products(threads, "bfloat16")
    return Limits(max(_read_floats(), _read_packed()), gemm)


def products(threads: int, dtype: str) -> float:
    """Operations per second in a square product, with `threads` threads."""
    import torch

    torch.set_num_threads(threads)
    square = torch.ones(_GEMM, _GEMM, dtype=getattr(torch, dtype))
    return 2 * _GEMM**3 / _middle(lambda: square @ square)


def _read_floats() -> float:
    """Bytes per second of a sum and of a dot product, whichever is faster."""
    import torch

    data = torch.ones(_BYTES // 4)
    low, high = data.chunk(2)
    return _BYTES / min(_middle(data.sum), _middle(lambda: torch.dot(low, high)))


def _read_packed() -> float:
    """Bytes per second of a matrix-vector product with packed bfloat16 weights, if there is one."""
    import torch

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0.0
    rows, columns = 1 << 15, _BYTES >> 16
    matrix = torch.ones(rows, columns, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, 1)
    del matrix
    vector = torch.ones(1, columns, dtype=torch.bfloat16)
    multiply = torch.ops.mkldnn._linear_pointwise
    return _BYTES / _middle(lambda: multiply(vector, packed, None, "none", [], ""))


def parse(output: str | bytes) -> Limits:
    """Read what running this module prints."""
    return Limits(**json.loads(output))


def _middle(run: Callable[[], object]) -> float:
    """Seconds of a call, the median of many."""
    seconds: list[float] = []
    while len(seconds) < _TRIES or sum(seconds) < _SECONDS:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1])))))
