"""The jax oracles equal the torch oracles, which check kernels on other devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from weft.kernels import reference
from weft.kernels.check.tpu import oracles
from weft.kernels.check.tpu.batch import Batch

BATCH = Batch(queries=[3, 1, 0, 2], contexts=[20, 33, 5, 2], padding=2, heads=4, depth=64)
SINKS = np.array([-1.0, 0.0, 1.0, 2.0], np.float32)


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 7}, {"softcap": 3.0}, {"sinks": SINKS, "sliding_window": 18}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_attention(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(11)
    pool, table = BATCH.pool(rng, 1), BATCH.table(1)[0]
    q = rng.standard_normal((BATCH.tokens, BATCH.heads, BATCH.depth)).astype(np.float32)
    start = np.concatenate([[0], np.cumsum(BATCH.queries)])
    contexts = np.array(BATCH.contexts)
    arguments = map(jnp.asarray, (q, pool, start, contexts, table))
    out, lse = jax.jit(partial(oracles.paged_attention, scale=0.2, **options))(*arguments)
    if "sinks" in options:
        options = options | {"sinks": torch.from_numpy(SINKS)}
    keys, values = torch.from_numpy(pool).split(BATCH.depth, dim=-1)
    tokens = int(start[-1])
    want_lse = torch.empty(tokens, BATCH.heads)
    want = reference.paged_attention(
        *(torch.from_numpy(q)[:tokens], keys, values, start.tolist(), contexts.tolist()),
        table.tolist(),
        scale=0.2,
        lse=want_lse,
        **options,
    )
    np.testing.assert_allclose(out[:tokens], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:tokens], want_lse, rtol=1e-5, atol=1e-6)
    assert not np.any(out[tokens:])


def test_products_of_experts() -> None:
    rng = np.random.default_rng(12)
    x = rng.standard_normal((9, 16)).astype(np.float32)
    gate, up = rng.standard_normal((2, 3, 16, 8)).astype(np.float32)
    offsets = np.array([0, 4, 4, 7])
    gates, ups = (
        reference.grouped_matmul(*map(torch.from_numpy, (x, w, offsets))) for w in (gate, up)
    )
    np.testing.assert_allclose(
        oracles.grouped_matmul(*map(jnp.asarray, (x, gate, offsets))),
        gates,
        rtol=1e-5,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        oracles.grouped_gate_up(*map(jnp.asarray, (x, gate, up, offsets))),
        torch.nn.functional.silu(gates) * ups,
        rtol=1e-5,
        atol=1e-5,
    )
