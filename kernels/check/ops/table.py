"""OPS, the table of checked ops.

`weft check kernels` (suite.py) runs each entry against its oracle, `weft check aot` (aot.py)
compiles every kernel that it launches, and `weft check timeline` (timeline.py) draws it. Add a new
op, or another method of one, as an entry in its family's file.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from weft.errors import ConfigError
from weft.kernels.check.ops.attention import ATTENTION
from weft.kernels.check.ops.collectives import COLLECTIVES
from weft.kernels.check.ops.exchange import EXCHANGES
from weft.kernels.check.ops.experts import EXPERT_PRODUCTS
from weft.kernels.check.ops.op import Op
from weft.kernels.check.ops.products import PRODUCTS
from weft.kernels.check.ops.quantized import PACKED
from weft.kernels.check.ops.rows import ROWS

OPS = (*COLLECTIVES, *PRODUCTS, *EXPERT_PRODUCTS, *PACKED, *ROWS, *ATTENTION, *EXCHANGES)


def named(names: Sequence[str]) -> tuple[Op, ...]:
    """Return the named ops; all ops for no names.

    Raises:
        ConfigError: an op does not exist.
    """
    known = [op.name for op in OPS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"op is {name!r}{meant}; it must be one of {', '.join(known)}")
    return tuple(op for op in OPS if not names or op.name in names)
