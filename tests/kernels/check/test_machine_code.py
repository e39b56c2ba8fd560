"""Reading machine code: spills in loops that multiply, and spills elsewhere."""

from __future__ import annotations

import pytest

from weft.kernels.check.machine_code import count_in_loops

LINES = {
    "tile": ".L_x_1:",
    "step": ".L_x_2:",
    "rest": ".L_x_3:",
    "mma": "        /*14d0*/                   HMMA.16816.F32.BF16 R12, R12, R16, R28 ;",
    "store": "        /*06e0*/                   STL [R1], R3 ;",
    "load": "        /*1960*/                   LDL.LU R3, [R1] ;",
    "next step": "        /*1910*/              @!P2 BRA `(.L_x_2) ;",
    "next tile": "        /*2970*/              @!P2 BRA P4, `(.L_x_1) ;",
    "to rest": "        /*1340*/                   BRA.U !UP2, `(.L_x_3) ;",
    "other": "        /*1960*/                   LDG.E R3, desc[UR4][R2.64] ;",
}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("store, tile, step, mma, next step, load, next tile", 0),
        ("tile, store, step, mma, other, next step, load, next tile", 0),
        ("tile, step, store, mma, next step, load, next tile", 1),
        ("tile, step, mma, load, next step, next tile", 1),
        ("tile, step, load, mma, store, next step, next tile", 2),
        ("tile, step, mma, next step, mma, load, next tile", 0),  # what is left of K
        ("tile, to rest, step, mma, next step, rest, load, next tile", 0),
        ("tile, mma, load, next tile", 1),  # one step does all of K
        ("tile, step, load, next step, mma, next tile", 1),
        ("store, load", 0),
    ],
)
def test_spills_are_counted_where_it_multiplies(body: str, count: int) -> None:
    listing = "\n".join(LINES[name] for name in body.split(", "))
    assert count_in_loops(listing) == count
