"""Latent attention against its oracle and against attention before absorption; and its faults."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import SEEDS
from support.paged import FP8, TOLERANCE, Case, Shape
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.aot import TENSOR_CORES
from weft.kernels.gpu.attention import decode, kernel, paged, tile
from weft.kernels.gpu.attention import mla as module
from weft.kernels.gpu.attention.mla import mla_decode_attention
from weft.kernels.gpu.attention.tile import Tile, heads_of_tile
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.interpreter import gpu as interpreter


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


def latent_case(
    heads: int, width: int, requests: list[tuple[int, int]], seed: int = 0, **of_shape: Any
) -> Case:
    """Its keys are the latents; nobody may look at its values."""
    return Case(Shape(1, heads, width, **of_shape), requests, seed)


def attend(case: Case, rank: int, op: Any = mla_decode_attention, **options: Any) -> Any:
    """(result, LSE, status)."""
    batch, lse = case.batch(), case.lse()
    out = op(
        *(case.q, case.keys[0][:, 0], batch),
        kv_lora_rank=rank,
        scale=0.3,
        kv_scale=case.options.get("k_scale"),
        lse=lse,
        **options,
    )
    return out, lse, batch.status


def oracle(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    lse = case.lse()
    step = (case.query_start.tolist(), case.context_len.tolist(), case.tables[0].tolist())
    out = reference.mla_decode_attention(
        *(case.q, case.keys[0][:, 0], *step),
        kv_lora_rank=rank,
        scale=0.3,
        kv_scale=case.options.get("k_scale"),
        lse=lse,
    )
    return out, lse


def close(case: Case, rank: int, out: Tensor, lse: Tensor, status: Tensor) -> None:
    assert status.tolist() == [0] * len(case.requests)
    expected, expected_lse = oracle(case, rank)
    tolerance = TOLERANCE[case.shape.dtype]
    assert out.dtype == case.shape.dtype
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.sampled_from([(16, 8), (32, 16), (20, 6), (24, 0), (5, 3)]),
    heads=st.sampled_from([1, 2, 5, 16, 24, 34]),
    page=st.sampled_from([1, 3, 4, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    cache=st.sampled_from([None, None, FP8]),
    requests=st.lists(
        st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 0, 3])), min_size=1, max_size=3
    ),
    splits=st.integers(0, 4),
    blocks=st.sampled_from([(16, 16), (32, 16), (16, 32)]),
    seed=SEEDS,
)
def test_equals_the_reference(
    sizes: tuple[int, int],
    heads: int,
    page: int,
    dtype: torch.dtype,
    cache: torch.dtype | None,
    requests: list[tuple[int, int]],
    splits: int,
    blocks: tuple[int, int],
    seed: int,
) -> None:
    """Also of heads that no power of two divides, and more of them than a tile has rows."""
    lengths = [(old + new, new) for old, new in requests]
    shape = {"page": page, "dtype": dtype, "cache": cache}
    case = latent_case(heads, sum(sizes), lengths, seed, **shape)
    close(case, sizes[0], *attend(case, sizes[0], splits=splits, blocks=blocks))


def test_what_it_chooses_by_itself() -> None:
    case = latent_case(40, 80, [(70, 1), (300, 1)], page=16)
    close(case, 64, *attend(case, 64))


def test_equals_attention_before_absorption() -> None:
    """As DeepSeek-V2, equations 9 to 19, has it: each head with keys and values of its own."""
    heads, rank, rope, dim, length = 3, 16, 8, 12, 40
    numbers = torch.Generator().manual_seed(0)
    q, q_rope, w_uk, w_uv = (
        torch.randn(size, generator=numbers)
        for size in ((heads, dim), (heads, rope), (heads, dim, rank), (heads, dim, rank))
    )
    case = latent_case(heads, rank + rope, [(length, 1)])
    table = case.tables[0][0]
    latents = torch.stack([case.keys[0][table[j // 4], 0, j % 4] for j in range(length)])
    c, k_rope = latents.split([rank, rope], dim=1)
    k, v = (torch.einsum("hdr,jr->hjd", w, c) for w in (w_uk, w_uv))
    scores = torch.einsum("hd,hjd->hj", q, k) + q_rope @ k_rope.T
    expected = torch.einsum("hj,hjd->hd", (scores * 0.3).softmax(1), v)
    case.q = torch.cat([torch.einsum("hd,hdr->hr", q, w_uk), q_rope], dim=1)[None]
    out, _, _ = attend(case, rank, splits=2, blocks=(16, 16))
    absorbed = torch.einsum("hr,hdr->hd", out[0], w_uv)
    torch.testing.assert_close(absorbed, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("group", "block_m", "heads"), [(128, 64, 64), (16, 64, 16), (24, 16, 12), (34, 16, 2)]
)
def test_heads_of_a_tile(group: int, block_m: int, heads: int) -> None:
    assert heads_of_tile(group, Tile(block_m, 16, 4, 1)) == heads


def test_no_queries() -> None:
    case = latent_case(4, 24, [(3, 0)])
    assert attend(case, 16)[0].shape == (0, 4, 16)


def test_one_bad_request_leaves_the_others_as_they_were() -> None:
    case = latent_case(20, 24, [(40, 1), (30, 1), (20, 1)])
    expected, expected_lse, _ = attend(case, 16, splits=3, blocks=(16, 16))
    case.tables[0][1, 2] = len(case.keys[0])
    out, lse, status = attend(case, 16, splits=3, blocks=(16, 16))
    assert [bool(word) for word in status] == [False, True, False]
    assert (out[1] == 0).all()
    assert (lse[1] == torch.inf).all()
    for b in (0, 2):
        assert torch.equal(out[b], expected[b])
        assert torch.equal(lse[b], expected_lse[b])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(2, 96)}, "q's shape is [2, 96]; it must be [T, H, D]"),
    ({"q": torch.zeros(2, 4, 24).double()}, "q's dtype is torch.float64"),
    ({"q": torch.zeros(2, 4, 641)}, "D is 641; it must be from 1 to 640"),
    ({"q": torch.zeros(2, 0, 24)}, "H is 0; it must be at least 1"),
    ({"latents": torch.zeros(9, 4, 16)}, "latents's shape is [9, 4, 16]; it must be [blocks, page"),
    ({"latents": torch.zeros(9, 1, 4, 24)}, "latents's shape is [9, 1, 4, 24]"),
    ({"latents": torch.zeros(0, 4, 24)}, "latents's shape is [0, 4, 24]"),
    ({"latents": torch.zeros(9, 4, 24).half()}, "latents's dtype is torch.float16"),
    ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be from 1 to 24"),
    ({"kv_lora_rank": 25}, "kv_lora_rank is 25; it must be from 1 to 24"),
    ({"kv_lora_rank": 16.0}, "kv_lora_rank is 16.0"),
    ({"kv_scale": torch.ones(1)}, "kv_scale is given with torch.float32; it must come with torch."),
    ({"lse": torch.zeros(2, 5)}, "lse's shape is [2, 5]; it must be [2, 4]"),
    ({"blocks": (16, 24)}, "blocks is (16, 24); it must be two powers of two, at least 16"),
    ({"warps": 3}, "warps is 3"),
    ({"splits": 65}, "splits is 65; it must be from 1 to 64"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_named_and_nothing_is_launched(changes: dict[str, Any], message: str) -> None:
    case = latent_case(4, 24, [(9, 1), (30, 1)])
    batch = case.batch()
    arguments = {"q": case.q, "latents": case.keys[0][:, 0], "batch": batch}
    with pytest.raises(KernelError) as error:
        mla_decode_attention(**{**arguments, "kv_lora_rank": 16, "scale": 0.3, **changes})
    assert str(error.value).startswith("mla_decode_attention: ")
    assert message in str(error.value)


def test_more_numbers_with_positions_than_there_is_room_for_are_refused() -> None:
    q, latents = torch.zeros(1, 2, 200), torch.zeros(9, 4, 200)
    batch = latent_case(2, 200, [(9, 1)]).batch()
    with pytest.raises(KernelError, match="P = D - kv_lora_rank is 136; it must be at most 128"):
        mla_decode_attention(q, latents, batch, kv_lora_rank=64, scale=1.0)


# Planted faults.

FAULTS = {
    "keys with the values' numbers for positions": ("(keys + D, key_rows", "(keys, key_rows"),
    "queries with other numbers for positions": (
        "load_block(q + D, q_rows",
        "load_block(q, q_rows",
    ),
    "positions that do not count": ("if ROPE > 0:\n        k_rope", "if ROPE < 0:\n        k_rope"),
    "positions alone": (".T, scores, input", ".T, input"),
    "queries of other heads": ("q_head * (D + ROPE)", "q_head * D"),
    "heads that are left out": ("if group % n == 0)", "if True)"),
    "heads that are those of the first tile": (
        "tile, tl.program_id(1) * GROUP, split,",
        "tile, 0 * GROUP, split,",
    ),
    "values that are a fraction": ("k_scale=kv_scale, v_scale=kv_scale", "k_scale=kv_scale"),
}


@functools.cache
def samples() -> list[Case]:
    """Of heads in several tiles, one in fp8."""
    return [latent_case(24, 24, [(60, 1), (33, 1)], cache=cache) for cache in (None, FP8)]


def is_wrong(op: Any) -> bool:
    for case in samples():
        try:
            with warnings.catch_warnings():  # faulty kernels compute anything
                warnings.simplefilter("ignore", RuntimeWarning)
                close(case, 16, *attend(case, 16, op, splits=2, blocks=(16, 16)))
        except AssertionError:
            return True
    return False


def test_the_samples_are_right_without_a_fault() -> None:
    assert not is_wrong(mla_decode_attention)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    parts = [kernel, tile, paged, decode]
    assert is_wrong(planted(module, tmp_path, FAULTS[fault], parts=parts).mla_decode_attention)


# What the interpreter cannot show.

EVERY_TILE = """
import sys
import numpy as np, torch
from weft.kernels.check.aot import compiling, describe
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.tuning.costs import device_for
from weft.kernels.gpu.attention.mla import mla_decode_attention
target = sys.argv[1]
sizes = [(512, 64), (256, 32)]
dtypes = [(torch.bfloat16,) * 2, (torch.float32,) * 2]
dtypes += [(torch.bfloat16, torch.float8_e4m3fn)] * (target != "sm_80")
for rank, rope in sizes:
    for dtype, cache in dtypes:
        for heads, queries in ((128, 1), (16, 1), (16, 2)):
            table = np.zeros((2, 8), np.int32)
            starts, contexts = np.array([0, queries, 2 * queries]), np.array([120, 120])
            batch = PagedBatch.build(starts, contexts, table, block_size=64)
            q = torch.empty(2 * queries, heads, rank + rope, dtype=dtype)
            latents = torch.empty(9, 64, rank + rope, dtype=cache)
            lse = torch.empty(2 * queries, heads)
            with compiling(target) as launches:
                mla_decode_attention(
                    q, latents, batch, kv_lora_rank=rank, scale=0.1, lse=lse, splits=4
                )
            for launch in launches:
                row = describe("mla_decode_attention", target, launch)
                problems = row.problems
                if row.shared > device_for(target).shared:
                    problems.append(f"{row.shared} bytes of shared memory")
                if dtype == torch.float32:  # is multiplied as such
                    problems = [p for p in problems if "tensor-core" not in p]
                for problem in problems:
                    print(rank, dtype, cache, heads, queries, row.kernel, row.constants, problem)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TENSOR_CORES)
def test_no_tile_of_its_choice_spills(target: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", EVERY_TILE, target],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
