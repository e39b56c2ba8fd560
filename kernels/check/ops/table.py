"""The overlapped ops as the checks call them: one entry of OPS each.

`weft check kernels` (suite.py) runs each entry against its oracle, `weft check
aot` (aot.py) compiles every kernel that it launches, and `weft check timeline`
(timeline.py) draws it. A new op, or another method of one, is a new entry in the
file of its family.
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
from weft.kernels.check.ops.rows import ROWS

OPS = (*COLLECTIVES, *PRODUCTS, *EXPERT_PRODUCTS, *ROWS, *ATTENTION, *EXCHANGES)


def named(names: Sequence[str]) -> tuple[Op, ...]:
    """The ops of these names, all for none.

    Raises:
        ConfigError: there is none of that name.
    """
    known = [op.name for op in OPS]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"op is {name!r}{meant}; it must be one of {', '.join(known)}")
    return tuple(op for op in OPS if not names or op.name in names)
