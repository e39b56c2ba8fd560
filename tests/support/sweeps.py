"""The sample of a sweep's cases that the default run takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SAMPLE = 4


def sample(cases: Sequence[Mapping[str, int]]) -> list[bool]:
    """Say of each case whether the default run takes it: every fourth in a row of a table.

    The columns are the values of the parameter with the most values, and the rows are combinations
    of the others. Each row begins one case earlier than the row before. With four rows, the sample
    therefore has all columns, and no parameter's value is left out because 4 divides their number.

    Args:
        cases: each case's parameters, by the position of their value.
    """
    # Parameters of one decorator have the same positions, and count once.
    parameters = dict.fromkeys(zip(*(case.values() for case in cases), strict=True))
    *others, columns = sorted(parameters, key=max)
    rows = [0] * len(cases)
    for positions in others:
        size = max(positions) + 1
        rows = [row * size + at for row, at in zip(rows, positions, strict=True)]
    return [(row + column) % SAMPLE == 0 for row, column in zip(rows, columns, strict=True)]
