"""The cost model: candidates fit, come in one order, and follow what is known of the links."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.tuning.costs import (
    GPUS,
    PAYLOADS,
    UNKNOWN,
    Config,
    Gpu,
    Problem,
    best_splits,
    cost,
    device_named,
    link_time,
    space,
)

H100 = device_named("NVIDIA H100 80GB HBM3")

SIZES = {
    "world_size": st.integers(1, 8),
    "rows": st.integers(1, 16384),
    "n": st.integers(1, 16384),
    "dtype": st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]),
}
ATTENTION = {op for op in PAYLOADS if "attention" in op}
PROBLEMS = st.builds(
    Problem, op=st.sampled_from(sorted(set(PAYLOADS) - ATTENTION)), k=st.integers(1, 16384), **SIZES
) | st.builds(
    Problem,
    op=st.sampled_from(sorted(ATTENTION)),
    k=st.integers(1, 256),
    groups=st.integers(1, 16),
    top_k=st.integers(1, 128),
    **SIZES,
)
SOME_METHODS = ["push", "copy_engine", "one_shot"]


@settings(max_examples=40, deadline=None)
@given(problem=PROBLEMS, device=st.sampled_from(GPUS))
def test_candidates_fit_and_come_in_one_order(problem: Problem, device: Gpu) -> None:
    configs = space(problem, device, SOME_METHODS)
    costs = [cost(problem, config, device) for config in configs]
    assert all(0 < each < math.inf for each in costs)
    assert costs == sorted(costs)
    assert len(set(configs)) == len(configs)
    assert space(problem, device, SOME_METHODS[::-1]) == configs
    for config in configs:
        loaded = (config.block_m + config.block_n) * config.block_k * problem.itemsize
        assert loaded * config.stages <= device.shared
        assert (config.block_k > 0) == problem.multiplies
        if problem.attends and problem.op != "mla_decode_attention":  # which splits its heads
            assert config.block_m >= problem.top_k


@settings(max_examples=60, deadline=None)
@given(problem=PROBLEMS, pick=st.integers(0, 1 << 20))
def test_more_rows_or_slower_links_are_never_cheaper(problem: Problem, pick: int) -> None:
    configs = space(problem, H100, SOME_METHODS)
    config = configs[pick % len(configs)]
    doubled = replace(problem, rows=2 * problem.rows)
    assert cost(problem, config, H100) <= cost(doubled, config, H100)
    slower = replace(H100, link=H100.link / 2)
    assert cost(problem, config, H100) <= cost(problem, config, slower)


def test_one_rank_has_no_link() -> None:
    assert link_time(Problem("all_gather", 1, 512, 64, 0), Config(method="push"), H100) == 0


@pytest.mark.parametrize(
    ("op", "methods", "small", "large"),
    [
        ("all_gather", ["push", "ll"], "ll", "push"),
        ("all_gather", ["ll", "ll128"], "ll", "ll128"),
        ("all_reduce", ["one_shot", "two_shot"], "one_shot", "two_shot"),
        ("all_reduce", ["two_shot", "multimem"], "multimem", "multimem"),
    ],
)
def test_methods_are_chosen_by_size(op: str, methods: list[str], small: str, large: str) -> None:
    def best(rows: int) -> str:
        return space(Problem(op, 8, rows, 4096, 0), H100, methods)[0].method

    if (small, large) != ("ll", "ll128"):  # those two have the same latency
        assert best(1) == small
    assert best(16384) == large


def test_the_scaling_books_costs() -> None:
    """An all-gather moves the array once over the link, an all-reduce twice, at any size."""
    config = Config(method="push")
    two_shot = Config(method="two_shot")
    for size in (64, 128):
        gather = Problem("all_gather", size, 1 << 20, 8192, 0)
        reduce = Problem("all_reduce", size, 1 << 20, 8192, 0)
        once = gather.payload / H100.link
        assert link_time(gather, config, H100) == pytest.approx(once, rel=0.02)
        assert link_time(reduce, two_shot, H100) == pytest.approx(2 * once, rel=0.02)


def test_a_large_product_hides_its_gather() -> None:
    problem = Problem("all_gather_matmul", 8, 8192, 8192, 8192)
    best = space(problem, H100, ["push"])[0]
    alone = cost(Problem("all_gather_matmul", 1, 8192, 8192, 8192), best, H100)
    assert cost(problem, best, H100) == pytest.approx(alone, rel=0.05)
    assert best.block_m * best.block_n >= 128 * 128


def test_few_decodes_share_their_keys() -> None:
    """Of one request as many programs as there are processors, of many each has one."""

    def splits(requests: int) -> int:
        problem = Problem("decode_attention", 1, requests, 32768, 128, groups=8, top_k=4)
        return space(problem, H100, ["local"])[0].splits

    assert 8 * splits(1) in range(H100.processors // 2, 4 * H100.processors)
    assert splits(256) == 1


TILE = Config("local", 16, 64, stages=3, warps=4)


@pytest.mark.parametrize(
    ("requests", "keys", "splits"),
    [
        (1, 131_072, 16),  # 8 KV heads: 128 programs for 132 processors
        (1, 1024, 16),
        (1, 192, 1),  # the merge is a launch more
        (17, 8192, 2),  # 136 programs: the second round would have 4
        (16, 8192, 1),
        (64, 8192, 1),
    ],
)
def test_splits_of_known_batches(requests: int, keys: int, splits: int) -> None:
    problem = Problem("decode_attention", 1, requests, keys, 128, groups=8, top_k=4)
    assert best_splits(problem, TILE, H100) == splits


@given(
    op=st.sampled_from(["decode_attention", "mla_decode_attention"]),
    requests=st.integers(1, 600),
    keys=st.integers(0, 1 << 20),
    groups=st.integers(1, 16),
    device=st.sampled_from(GPUS),
)
def test_splits_are_worth_their_merge(
    op: str, requests: int, keys: int, groups: int, device: Gpu
) -> None:
    """A full device needs none, and a dearer merge never makes more of them."""
    problem = Problem(op, 1, requests, keys, 128, groups=groups, top_k=4)
    splits = best_splits(problem, TILE, device)
    assert splits == 1 or splits * 64 <= keys
    if requests * groups % device.processors == 0:
        assert splits == 1
    assert best_splits(replace(problem, top_k=16), TILE, device) <= splits


def test_a_prefill_over_ranks_hides_its_keys() -> None:
    """All but what one rank attends to while the first keys travel."""

    def time(ranks: int, link: float) -> float:
        op, tokens = "sequence_parallel_attention", 65536
        problem = Problem(op, ranks, tokens, tokens, 128, groups=8, top_k=4)
        device = replace(H100, link=link)
        return cost(problem, space(problem, device, ["push"])[0], device)

    assert time(8, H100.link) < 1.2 * time(1, H100.link) / 8
    assert time(8, H100.link / 100) > 1.5 * time(8, H100.link)


def test_latents_are_read_by_few_heads_at_a_time() -> None:
    problem = Problem("mla_decode_attention", 1, 64, 8192, 576, groups=1, top_k=128)
    tiles = {(c.block_m, c.block_n) for c in space(problem, H100, ["local"])}
    assert tiles == {(16, 16), (16, 32), (64, 16)}
    fp8 = replace(problem, dtype="float8_e4m3fn")
    assert max(config.block_m for config in space(fp8, H100, ["local"])) == 32


def test_a_prefill_fills_its_tiles() -> None:
    best = space(Problem("paged_attention", 1, 4096, 4096, 128, groups=8, top_k=4), H100, ["local"])
    assert best[0].block_m == 128
    few = space(Problem("paged_attention", 1, 1, 4096, 128, groups=8, top_k=4), H100, ["local"])
    assert {config.block_m for config in few} == {16}


def test_chunks_grow_with_the_tokens() -> None:
    """Few tokens are spread over the processors; many small chunks would count each other."""

    def chunk(tokens: int) -> int:
        problem = Problem("moe_dispatch", 8, 8 * 8 * tokens, 7168, 0, groups=256, top_k=8)
        return space(problem, H100, ["push"])[0].block_m

    found = [chunk(tokens) for tokens in (1, 16, 128, 512)]
    assert found == sorted(found)
    assert found[0] == 4 < found[-1]


def test_devices_are_known_by_the_drivers_name() -> None:
    assert device_named("NVIDIA H200").name == "H200"
    assert device_named("AMD Instinct MI300X").name == "MI300X"
    assert device_named("a new one") is UNKNOWN
    small = ("NVIDIA L40S", "NVIDIA L4", "NVIDIA A10G", "NVIDIA RTX A6000", "NVIDIA A40")
    small += ("NVIDIA GeForce RTX 4090", "NVIDIA RTX PRO 6000 Blackwell Server Edition")
    assert {device_named(name).name for name in small} == {"L40S"}
    assert device_named("NVIDIA A100-SXM4-80GB").name == "A100"


def test_all_tiles_of_a_small_gpu_fit_its_shared_memory() -> None:
    """99 KB is less than half of what the H100 has."""
    gpu = device_named("NVIDIA L4")
    assert gpu.shared == 99 << 10
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        problem = Problem(op, 2, 4096, 4096, 4096)
        for config in space(problem, gpu, ["push"]):
            tile = (config.block_m + config.block_n) * config.block_k * config.stages
            assert tile * problem.itemsize <= gpu.shared


def test_what_cannot_be_modelled_is_refused() -> None:
    problem = Problem("all_gather", 2, 16, 16, 0)
    with pytest.raises(KernelError, match="method is 'fax'; it must be one of push,"):
        space(problem, H100, ["push", "fax"])
    with pytest.raises(KernelError, match="op is 'gossip'; it must be one of all_gather,"):
        Problem("gossip", 2, 16, 16, 0)
    with pytest.raises(KernelError, match="dtype is 'int3'; it must be one of float32,"):
        Problem("all_gather", 2, 16, 16, 0, "int3")
    tight = Gpu("tight", "sm_90", 1e12, 1e12, 1e12, 1e9, 4, shared=1000)
    with pytest.raises(KernelError, match="no tile fits 1000 bytes"):
        space(Problem("all_gather_matmul", 2, 16, 16, 16), tight, ["push"])


def test_a_product_of_one_rank_has_no_senders() -> None:
    alone, of_eight = (
        space(Problem("all_gather_matmul", ranks, 512, 1024, 1024, "bfloat16"), UNKNOWN, ["push"])
        for ranks in (1, 8)
    )
    assert {config.senders for config in alone} == {0}
    assert {config.senders for config in of_eight} == {8, 16, 32}
