"""Tuning in lock step, with a clock of the test's own; and what ops then choose."""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.collectives.all_gather import all_gather_workspace
from weft.kernels.gpu.experts.dispatch import moe_workspace
from weft.kernels.gpu.experts.placement import even
from weft.kernels.gpu.matmul.all_gather_matmul import all_gather_matmul_workspace
from weft.kernels.gpu.matmul.matmul_reduce_scatter import (
    matmul_all_reduce_workspace,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.tuning import search as tune
from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.clock import Call
from weft.kernels.gpu.tuning.costs import UNKNOWN, Config, Problem, space
from weft.kernels.gpu.tuning.ops import COLLECTIVES, PRODUCTS
from weft.kernels.gpu.tuning.table import Entry, TuningError
from weft.kernels.symmetric.memory import Home

SIZE = 3
WORKSPACES: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": all_gather_matmul_workspace,
    "matmul_reduce_scatter": matmul_reduce_scatter_workspace,
    "matmul_all_reduce": matmul_all_reduce_workspace,
}

# Timing in lock step.

GATHER = Problem("all_gather", SIZE, 100, 64, 0)
PRODUCT = Problem("all_gather_matmul", SIZE, 100, 64, 64)
Seconds = Callable[[int, Config], float]


def fake(seconds: Seconds) -> tuple[Callable[[Home], dict[str, object]], dict[int, list[Config]]]:
    """tune's arguments for calls that take as long as the test says, and a log of them by rank."""
    log: dict[int, list[Config]] = defaultdict(list)

    def arguments(home: Home) -> dict[str, object]:
        def prepare(config: Config) -> Call:
            if math.isnan(seconds(home.rank, config)):
                raise KernelError(f"rank {home.rank} cannot {config.method}")
            return lambda: config

        def clock(call: Call, calls: int) -> float:
            config = call()
            assert isinstance(config, Config)
            log[home.rank].append(config)
            return seconds(home.rank, config)

        return {"prepare": prepare, "clock": clock}

    return arguments, log


def tuned_on_all(
    seconds: Seconds, path: Path, methods: list[str], problem: Problem = GATHER, **options: int
) -> tuple[list[list[tune.Measured]], dict[int, list[Config]]]:
    arguments, log = fake(seconds)
    results = run(
        lambda home: tune.tune(home, problem, methods, path=path, **arguments(home), **options),  # type: ignore[arg-type]
        SIZE,
    )
    return results, log


def test_the_slowest_rank_decides_and_all_choose_the_same(tmp_path: Path) -> None:
    def seconds(rank: int, config: Config) -> float:
        time = {"push": 1.0, "pull": 2.0, "ll": 3.0}[config.method]
        if config.method == "push" and rank == 1:
            time = 10.0  # best on all others
        return time + abs(config.senders - 16) / 100

    path = tmp_path / "tuning.json"
    results, log = tuned_on_all(seconds, path, ["push", "pull", "ll"], PRODUCT, candidates=99)
    assert all(result == results[0] for result in results)
    best = results[0][0]
    assert (best.config.method, best.config.senders, best.median) == ("pull", 16, 2.0)
    assert log[0] == log[1] == log[2]
    (written,) = tuned.load(path).values()
    assert written.config == best.config
    assert written.microseconds == pytest.approx(2e6)
    assert (written.op, written.world_size, written.rows) == ("all_gather_matmul", SIZE, 128)


def test_stages_warps_and_senders_are_searched_around_the_best_tile(tmp_path: Path) -> None:
    def seconds(rank: int, config: Config) -> float:
        tile = 0.0 if (config.block_m, config.block_n) == (64, 128) else 50.0
        return 1.0 + tile + config.stages - config.warps / 10 + abs(config.senders - 8)

    results, log = tuned_on_all(
        seconds, tmp_path / "t", ["push"], PRODUCT, candidates=99, repetitions=1
    )
    best = results[0][0].config
    assert (best.block_m, best.block_n) == (64, 128)
    around = log[0][-len(results[0]) :]
    assert set(around) == {measured.config for measured in results[0]}
    assert {config.stages for config in around} >= {2, 3, 4}
    assert {config.warps for config in around} == {4, 8}
    assert {config.senders for config in around} == {8, 16, 32}


def test_candidates_take_turns(tmp_path: Path) -> None:
    _, log = tuned_on_all(lambda rank, config: 1.0, tmp_path / "t", ["push", "pull"], repetitions=3)
    first, second = log[0][:2]
    assert {first.method, second.method} == {"push", "pull"}
    assert log[0][:6] == [first, second] * 3


def test_the_median_forgives_one_slow_repetition(tmp_path: Path) -> None:
    counts: dict[tuple[int, Config], int] = defaultdict(int)

    def seconds(rank: int, config: Config) -> float:
        counts[rank, config] += 1
        base = 1.0 if config.method == "push" else 2.0
        return 100.0 if counts[rank, config] % 5 == 3 else base

    results, _ = tuned_on_all(seconds, tmp_path / "t", ["push", "pull"], repetitions=5)
    assert results[0][0].config.method == "push"
    assert results[0][0].median == 1.0
    assert max(results[0][0].times) == 100.0


def test_what_one_rank_cannot_run_no_rank_runs(tmp_path: Path) -> None:
    def seconds(rank: int, config: Config) -> float:
        return math.nan if config.method == "push" and rank == 2 else 1.0

    results, log = tuned_on_all(seconds, tmp_path / "t", ["push", "pull"])
    assert results[0][0].config.method == "pull"
    assert all(config.method == "pull" for config in log[0])


def test_nothing_runs_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    arguments, _ = fake(lambda rank, config: math.nan if rank == 1 else 1.0)
    messages = []

    def work(home: Home) -> None:
        with pytest.raises(TuningError) as error:
            tune.tune(home, GATHER, ["push"], path=tmp_path / "t", **arguments(home))  # type: ignore[arg-type]
        messages.append(str(error.value))

    run(work, SIZE)
    assert len(messages) == SIZE
    assert len(set(messages)) == 1
    assert "on rank 1: KernelError: rank 1 cannot push" in messages[0]


def test_a_bug_is_not_taken_for_a_refusal(tmp_path: Path) -> None:
    def prepare(config: Config) -> Call:
        raise ZeroDivisionError("a bug")

    with pytest.raises(RankError) as error:
        run(lambda home: tune.tune(home, GATHER, ["push"], prepare, path=tmp_path / "t"), SIZE)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_the_world_must_be_the_homes(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="world size is 3; it must be the home's, 2"):
        run(lambda home: tune.tune(home, GATHER, ["push"], lambda config: list), 2)


# Choosing.


def chosen(home: Home, path: Path, methods: tuple[str, ...], rows: int = 100) -> Config:
    choice = tune.Choice(home, "all_gather", path=path)
    return choice(torch.bfloat16, rows, 64, methods=methods)


def test_the_first_ranks_file_counts_for_all(tmp_path: Path) -> None:
    tuned_on_all(lambda rank, config: 1.0 + config.senders, tmp_path / "0", ["pull"])

    def work(home: Home) -> list[Config]:
        path = tmp_path / str(home.rank)
        return [chosen(home, path, ("push", "pull"), rows) for rows in (128, 65, 64, 129)]

    by_rank = run(work, SIZE)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    modelled = space(Problem("all_gather", SIZE, 64, 64, 0), UNKNOWN, ["push", "pull"])[0]
    assert modelled.method == "push"
    assert by_rank[0] == [Config(method="pull"), Config(method="pull"), modelled, modelled]


def test_what_another_triton_tuned_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tuned_on_all(lambda rank, config: 1.0, path, ["pull"])
    content = json.loads(path.read_text())
    content["entries"][0]["triton"] = "0.1"
    path.write_text(json.dumps(content))
    assert run(lambda home: chosen(home, path, ("push", "pull")), SIZE)[0].method == "push"
    tuned_on_all(lambda rank, config: 1.0, path, ["pull"])
    assert len(tuned.load(path)) == 2
    assert run(lambda home: chosen(home, path, ("push", "pull")), SIZE)[0].method == "pull"


def test_a_method_that_the_call_cannot_take_is_not_used(tmp_path: Path) -> None:
    tuned_on_all(lambda rank, config: 1.0, tmp_path / "t", ["pull"])
    assert run(lambda home: chosen(home, tmp_path / "t", ("push",)), SIZE)[0].method == "push"


def test_a_damaged_file_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("no")
    messages = []

    def work(home: Home) -> None:
        with pytest.raises(TuningError) as error:
            chosen(home, tmp_path / "t", ("push",))
        messages.append(str(error.value))

    run(work, SIZE)
    assert len(messages) == SIZE
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 0: ")


def test_it_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(problem: Problem, *arguments: object) -> list[Config]:
        calls.append(problem.rows)
        return space(problem, *arguments)  # type: ignore[arg-type]

    def work(home: Home) -> None:
        choice = tune.Choice(home, "all_reduce")
        for rows in (3, 1, 16, 17, 16, 17):
            choice(torch.float32, rows, 64, methods=("one_shot", "two_shot"))

    monkeypatch.setattr(tune, "space", counted)
    run(work, 1)
    assert calls == [16, 32]


@settings(max_examples=30, deadline=None)
@given(
    op=st.sampled_from(sorted(tune.PRODUCT_METHODS)),
    rows=st.integers(1, 20000),
    least=st.sampled_from([(0, 0), (16, 64), (64, 0), (128, 128)]),
)
def test_a_tile_has_its_signals(op: str, rows: int, least: tuple[int, int]) -> None:
    """As large as the workspace was made for, or as all that there is."""

    def work(home: Home) -> Config:
        choice = tune.Choice(home, op, *least)
        return choice(torch.bfloat16, rows, 1024, 1024, methods=tune.PRODUCT_METHODS[op])

    (config, *_) = run(work, 2)
    part = tuned.bucket(rows) // (1 if op == "matmul_all_reduce" else 2)
    assert config.block_m >= min(least[0], part)
    assert config.block_n >= least[1]


def recorded(path: Path, problem: Problem, config: Config) -> None:
    key = tuned.key_of(problem, "CPU")
    fields = {field: getattr(key, field) for field in key.__struct_fields__}
    tuned.record(path, {key: Entry(**fields, config=config, microseconds=1.0)})


def launches(work: Callable[[Home], object]) -> list[tuple[str, dict[str, object]]]:
    """What the first rank launches: names, and the keyword arguments."""
    seen = []
    original = InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if threading.current_thread() is first[0]:
            form = kwargs["FORM"]._asdict() if "FORM" in kwargs else {}
            seen.append((self.fn.__name__, kwargs | form | {"grid": grid}))
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    first: list[threading.Thread] = []

    def on_rank(home: Home) -> object:
        if home.rank == 0:
            first.append(threading.current_thread())
        return work(home)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", noted)
        run(on_rank, 2)
    return seen


@pytest.mark.parametrize("op", sorted(WORKSPACES))
def test_products_take_what_was_tuned(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = Problem(op, 2, 64, 48, 32, "float16")
    (method,) = tune.PRODUCT_METHODS[op]
    senders = 1 if op == "all_gather_matmul" else 0
    config = Config(method, 32, 16, 16, stages=4, warps=2, senders=senders)
    function = PRODUCTS[op]
    make = WORKSPACES[op]
    gathers = op == "all_gather_matmul"

    def work(home: Home) -> None:
        width, wide = (32, {}) if gathers else (48, {"block_n": 16})
        rows = 64 if op == "matmul_all_reduce" else 32
        workspace = make(home, rows, width, torch.float16, 16, **wide)
        x = torch.randn(32 if gathers else 64, 32).half()
        function(x, torch.randn(32, 48).half(), workspace)
        function(x, torch.randn(32, 48).half(), workspace, blocks=(16, 16, 32))

    def tiles() -> list[tuple[object, ...]]:
        names = ("block_m", "block_n", "block_k", "num_stages", "num_warps")
        return [
            tuple(kwargs[name] for name in names)
            for name, kwargs in launches(work)
            if name.startswith("multiply")
        ]

    modelled = space(problem, UNKNOWN, [method])[0]
    model = (modelled.block_m, modelled.block_n, modelled.block_k, modelled.stages, modelled.warps)
    named = (16, 16, 32, 3, 4)
    assert tiles() == [model, named]
    recorded(tmp_path / "weft" / "tuning.json", problem, config)
    assert tiles() == [(32, 16, 16, 4, 2), named]
    if gathers:
        pushed = [kwargs["grid"] for name, kwargs in launches(work) if name == "push_rows"]
        assert pushed[0] == (1,)


def test_gate_and_up_share_the_columns_of_a_tile() -> None:
    def work(home: Home) -> list[Config | None]:
        choice = tune.Choice(home, "all_gather_matmul")
        x = torch.empty(1024, 1024, dtype=torch.bfloat16)
        w = torch.empty(1024, 512, dtype=torch.bfloat16)
        odd = torch.empty(1024, 500, dtype=torch.bfloat16)
        return [
            choice.of_product(x, Weights(ws, [one.shape[1] for one in ws], False), 8192, silu)
            for ws, silu in (((w, w), False), ((w, w), True), ((odd, w), True))
        ]

    side_by_side, paired, odd = run(work, 1)[0]
    assert side_by_side is not None
    assert paired is not None
    assert (side_by_side.block_n, paired.block_n) == (256, 64)
    assert odd is None


COLLECTIVE_KERNELS = {
    "push": "push_chunks",
    "pull": "publish_chunks",
    "ll": "gather_ll",
    "one_shot": "reduce_chunks",
    "two_shot": "reduce_and_send",
}


@pytest.mark.parametrize(
    ("op", "methods"),
    [("all_gather", ("push", "pull", "ll")), ("all_reduce", ("one_shot", "ll", "two_shot"))],
)
def test_collectives_take_what_was_tuned(
    op: str, methods: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    function, make = COLLECTIVES[op]
    rows = 20 if op == "all_gather" else 10

    def work(home: Home) -> Tensor:
        return function(torch.ones(10, 8), make(home, 80, torch.float32, methods))

    def kernels() -> set[str]:
        return {name for name, _ in launches(work)}

    for method in methods:
        recorded(
            tmp_path / "weft" / "tuning.json", Problem(op, 2, rows, 8, 0, "float32"), Config(method)
        )
        expected = COLLECTIVE_KERNELS[method]
        if op == "all_reduce" and method == "ll":
            expected = "reduce_ll"
        assert expected in kernels()


def test_attention_takes_what_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many decodes; of a prefill for as many queries; and no higher than there are rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "weft" / "tuning.json"

    def decoded(home: Home) -> None:
        choice = tune.Choice(home, "decode_attention")
        for queries in ([1, 1, 1], [1, 2]):  # the latter are no decodes
            q, *cache = attended(queries)
            decode_attention(q, *cache, scale=1.0, choice=choice)
        decode_attention(q, *cache, scale=1.0, choice=choice, blocks=(64, 32))

    def prefilled(home: Home) -> None:
        choice = tune.Choice(home, "paged_attention")
        for queries in ([30, 1], [3, 3, 3]):
            q, *cache = attended(queries)
            paged_attention(q, *cache, scale=1.0, choice=choice)

    def tiles(work: Callable[[Home], None]) -> list[tuple[object, ...]]:
        names = ("block_m", "block_n", "SPLITS", "num_stages", "num_warps")
        found = [kwargs for name, kwargs in launches(work) if name == "attend"]
        return [tuple(kwargs[name] for name in names) for kwargs in found]

    rule = [(16, 64, 1, 3, 4), (16, 64, 1, 3, 4), (64, 32, 1, 3, 4)]
    assert tiles(decoded) == rule
    problem = Problem("decode_attention", 2, 3, 40, 16, "float32", groups=2, top_k=2)
    recorded(path, problem, Config("local", 64, 32, stages=2, warps=8, splits=2))
    assert tiles(decoded) == [(16, 32, 2, 2, 8), *rule[1:]]
    assert tiles(prefilled) == [(64, 64, 1, 3, 4), (16, 64, 1, 3, 4)]
    problem = Problem("paged_attention", 2, 30, 40, 16, "float32", groups=2, top_k=2)
    recorded(path, problem, Config("local", 128, 16, stages=1, warps=2))
    assert tiles(prefilled) == [(64, 16, 1, 1, 2), (16, 64, 1, 3, 4)]


def attended(queries: list[int]) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """q, keys, values and a batch of requests of 40 tokens, of which so many are queries."""
    requests = len(queries)
    table = np.arange(3 * requests, dtype=np.int32).reshape(requests, 3)
    starts = np.cumsum([0, *queries], dtype=np.int32)
    batch = PagedBatch.build(starts, np.full(requests, 40, np.int32), table, block_size=16)
    keys, values = torch.randn(2, table.size, 2, 16, 16)
    return torch.randn(sum(queries), 4, 16), keys, values, batch


def test_an_exchange_takes_the_chunk_that_was_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = Problem("moe_dispatch", 2, 2 * 40 * 3, 24, 0, "float16", groups=4, top_k=3)

    def chunks(home: Home) -> list[int]:
        made = (home, 40, 24, 3, torch.float16, even(4, 2))
        return [moe_workspace(*made).chunk, moe_workspace(*made, chunk=2).chunk]

    modelled = space(problem, UNKNOWN, ["push"])[0].block_m
    assert run(chunks, 2) == [[modelled, 2]] * 2
    recorded(tmp_path / "weft" / "tuning.json", problem, Config("push", block_m=32))
    assert modelled != 32
    assert run(chunks, 2) == [[32, 2]] * 2


def test_a_method_is_chosen_that_takes_the_data(tmp_path: Path) -> None:
    """ll carries at most so much; and there is none to choose where there is one."""

    def work(home: Home) -> list[str]:
        several = all_gather_workspace(home, 1 << 20, torch.float32, ("ll", "push"))
        one = all_gather_workspace(home, 8, torch.float32, ("pull",))
        nodes = all_gather_workspace(
            home, 8, torch.float32, ("push", "two_level"), ranks_per_node=1
        )
        small, large = torch.empty(1, 8), torch.empty(1 << 10, 1 << 9)
        return [
            several.choose_method(small, 2),
            several.choose_method(large, 2 << 10),
            one.choose_method(small, 2),
            nodes.choose_method(small, 2),
        ]

    assert run(work, 2) == [["ll", "push", "pull", "two_level"]] * 2
