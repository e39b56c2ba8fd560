"""What the machine can do, measured beside the contestants: read bandwidth and bf16 GEMM rate.

Bandwidth is the best of several ways to read a gigabyte once with all threads
(a sum of floats; a dot product of two halves; a bfloat16 matrix times a
vector, packed as oneDNN wants it), each far larger than any cache. The GEMM
rate is that of a square bfloat16 product. Each is the best of some tries: a
limit is what the machine can do when nothing disturbs it.

    python -m peers.limits THREADS      prints one JSON object
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

_TRIES = 5
_BYTES = 1 << 30  # of the memory that is read
_GEMM = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """Attributes: bytes per second read from memory; bf16 floating-point operations per second."""

    bandwidth: float
    gemm: float


def measure(threads: int) -> Limits:
    """Measure both with so many threads; takes a few seconds and 1.5 GiB."""
    import torch

    torch.set_num_threads(threads)
    square = torch.ones(_GEMM, _GEMM, dtype=torch.bfloat16)
    gemm = 2 * _GEMM**3 / _best(lambda: square @ square)
    return Limits(max(_read_floats(), _read_packed()), gemm)


def _read_floats() -> float:
    """Bytes per second of a sum and of a dot product, whichever is faster."""
    import torch

    data = torch.ones(_BYTES // 4)
    low, high = data.chunk(2)
    return _BYTES / min(_best(data.sum), _best(lambda: torch.dot(low, high)))


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
    return _BYTES / _best(lambda: multiply(vector, packed, None, "none", [], ""))


def parse(output: str | bytes) -> Limits:
    """Read what running this module prints."""
    return Limits(**json.loads(output))


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1])))))
