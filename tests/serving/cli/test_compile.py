"""What `weft compile` prints; what it compiles is in tests/models/jax/test_aot.py."""

from __future__ import annotations

import pytest

from weft.models.jax.aot import Compiled
from weft.models.jax.overlap import Collective
from weft.serving.cli import compile


def test_the_report_tells_traffic_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    rings = [Collective("all_gather_matmul", 2**20, 1), Collective("all_gather_matmul", 2**20, 1)]
    step = Compiled(
        *("512 tokens, 64 pages each", 2**30, 2**20, 3.0),
        collectives=[*rings, Collective("all-reduce", 2**20, 0)],
        kernels={"write_pages": 2, "all_gather_matmul": 2},
    )
    plain = Compiled("8 decodes, 64 pages each", 2**30, 2**10, 1.0, [], {})
    compile._print_report({"weights": 2**30, "left": 2**29}, [step, plain], 4096, 2**34)
    lines = capsys.readouterr().out.splitlines()
    assert lines[5].split()[-3:] == ["3.0", "MiB", "67%"]
    assert lines[6].split()[-1] == "-"
    assert lines[8:] == [
        "512 tokens, 64 pages each",
        "  2 x all_gather_matmul, 2.0 MiB, 2 of them beside a product",
        "  1 x all-reduce, 1.0 MiB, 0 of them beside a product",
        "  kernels: 2 x all_gather_matmul, 2 x write_pages",
        "",
        "compiled in 4.0 s",
    ]
