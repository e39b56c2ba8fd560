"""Tuning: the cost model, the file, and timing in lock step, with a clock of the test's own."""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu import tune, tuned
from weft.kernels.gpu.all_gather import all_gather_workspace
from weft.kernels.gpu.all_gather_matmul import all_gather_matmul_workspace
from weft.kernels.gpu.clock import Call
from weft.kernels.gpu.costs import (
    DEVICES,
    METHODS,
    PAYLOADS,
    UNKNOWN,
    Config,
    Device,
    Problem,
    cost,
    device_named,
    link_time,
    space,
)
from weft.kernels.gpu.matmul import Weights
from weft.kernels.gpu.matmul_reduce_scatter import (
    matmul_all_reduce_workspace,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.tunable import COLLECTIVES, PRODUCTS, prepare_op, tune_op
from weft.kernels.gpu.tunable import METHODS as METHODS_OF
from weft.kernels.gpu.tuned import Entry, Key, Table, TuningError
from weft.kernels.gpu.workspace import KernelError
from weft.kernels.symmetric.memory import Home

H100 = device_named("NVIDIA H100 80GB HBM3")
SIZE = 3
WORKSPACES: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": all_gather_matmul_workspace,
    "matmul_reduce_scatter": matmul_reduce_scatter_workspace,
    "matmul_all_reduce": matmul_all_reduce_workspace,
}

# The bucket of rows.


@given(st.integers(1, 1 << 20))
def test_a_bucket_holds_its_rows_and_is_less_than_twice_as_large(rows: int) -> None:
    found = tuned.bucket(rows)
    assert rows <= found
    assert found < max(2 * rows, 17)
    assert tuned.bucket(found) == found
    assert tuned.bucket(rows + 1) >= found
    assert found in tuned.buckets(rows)


@given(st.integers(1, 1 << 16))
def test_buckets_are_those_of_all_rows(rows: int) -> None:
    assert tuned.buckets(rows)[-1] == tuned.bucket(rows)
    edges = [1, *(edge + 1 for edge in tuned.buckets(rows)[:-1])]
    assert tuned.buckets(rows) == [tuned.bucket(edge) for edge in edges]


# The file.

POWERS = st.sampled_from([0, 1, 2, 16, 128, 256])
CONFIGS = st.builds(
    Config,
    method=st.sampled_from(sorted(METHODS)),
    block_m=POWERS,
    block_n=POWERS,
    block_k=POWERS,
    stages=st.integers(0, 8),
    warps=POWERS,
    senders=st.integers(0, 1000),
)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
KEYS = st.fixed_dictionaries(
    {
        "op": TEXTS,
        "device": TEXTS,
        "world_size": st.integers(1, 1024),
        "dtype": TEXTS,
        "rows": st.integers(1, 1 << 20),
        "n": st.integers(1, 1 << 20),
        "k": st.integers(0, 1 << 20),
        "triton": TEXTS,
    }
)
TIMES = st.floats(1e-3, 1e9)
TABLES = st.lists(st.tuples(KEYS, CONFIGS, TIMES), max_size=4).map(
    lambda rows: {
        Key(**key): Entry(**key, config=config, microseconds=time) for key, config, time in rows
    }
)


@settings(max_examples=60, deadline=None)
@given(tables=st.lists(TABLES, min_size=1, max_size=3))
def test_what_was_recorded_is_loaded(
    tables: list[Table], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tuning") / "deeper" / "tuning.json"
    expected: Table = {}
    for table in tables:
        tuned.record(path, table)
        expected |= table
        assert tuned.load(path) == expected
    assert sorted(file.name for file in path.parent.iterdir()) == ["tuning.json", "tuning.lock"]


def entry(**changes: object) -> dict[str, object]:
    fields: dict[str, object] = {
        "op": "all_gather",
        "device": "CPU",
        "world_size": 2,
        "dtype": "bfloat16",
        "rows": 16,
        "n": 64,
        "k": 0,
        "triton": "3.6.0",
        "config": {"method": "push"},
        "microseconds": 1.5,
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def write(path: Path, *entries: dict[str, object], form: object = 1) -> None:
    path.write_text(json.dumps({"format": form, "entries": entries}))


def test_the_file_reads_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, entry(n=2), entry(n=1))
    tuned.record(path, {})
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(line.rstrip(","))["n"] for line in lines[1:3]] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"entries": []}', "missing required field `format`"),
        ('{"format": 1}', "missing required field `entries`"),
        ('{"format": 1, "entries": [], "more": 1}', "unknown field `more`"),
        ([entry(more=1)], r"unknown field `more` - at `\$.entries\[0\]`"),
        ([entry(), entry(config={"method": "push", "more": 1})], r"`more` - at `\$.entries\[1\]"),
        ([entry(config={"method": "fax"})], "method is 'fax'; it must be one of copy_engine,"),
        ([entry(config={"method": "push", "block_m": 48})], "block_m is 48; it must be a power"),
        ([entry(config={"method": "push", "senders": -1})], "senders is -1"),
        ([entry(world_size=0)], "world_size"),
        ([entry(microseconds=0)], "microseconds"),
        ([entry(rows="many")], "rows"),
        ([entry(triton=None)], "missing required field `triton`"),
        ([entry(), entry(microseconds=7)], "two entries for op all_gather, device CPU"),
    ],
)
def test_a_damaged_file_is_refused_and_kept(
    text: str | list[dict[str, object]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "tuning.json"
    if isinstance(text, str):
        path.write_text(text)
    else:
        write(path, *text)
    before = path.read_bytes()
    with pytest.raises(TuningError, match=message) as error:
        tuned.load(path)
    assert str(path) in str(error.value)
    with pytest.raises(TuningError, match=message):
        tuned.record(path, {})
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="Is a directory"):
        tuned.load(tmp_path)


def test_another_format_is_not_read_and_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text('{"format": 2, "new": true}')
    assert tuned.load(path) == {}
    with pytest.raises(TuningError, match="format 2, and this weft writes format 1"):
        tuned.record(path, {})
    assert path.read_text() == '{"format": 2, "new": true}'


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    write(path, entry())
    before = path.read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(tuned.os, "replace", fail)
    with pytest.raises(TuningError, match="No space left on device"):
        tuned.record(path, {})
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tuning.json", "tuning.lock"]


def test_those_who_write_at_once_keep_each_others_entries(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"

    def add(n: int) -> None:
        fields = entry(n=n)
        config = Config(method="push")
        one = Entry(**{**fields, "config": config})  # type: ignore[arg-type]
        key = Key(**{name: fields[name] for name in Key.__struct_fields__})  # type: ignore[arg-type]
        tuned.record(path, {key: one})

    threads = [threading.Thread(target=add, args=(n,)) for n in range(1, 13)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.n for key in tuned.load(path)) == list(range(1, 13))


def test_the_file_is_in_the_users_cache(tmp_path: Path) -> None:
    home = Path.home() / ".cache"
    assert tuned.default_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/weft/tuning.json")
    assert tuned.default_path({"XDG_CACHE_HOME": "relative"}) == home / "weft" / "tuning.json"
    assert tuned.default_path({}) == home / "weft" / "tuning.json"


# The cost model.

PROBLEMS = st.builds(
    Problem,
    op=st.sampled_from(sorted(PAYLOADS)),
    world_size=st.integers(1, 8),
    rows=st.integers(1, 16384),
    n=st.integers(1, 16384),
    k=st.integers(1, 16384),
    dtype=st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]),
)
SOME_METHODS = ["push", "copy_engine", "one_shot"]


@settings(max_examples=40, deadline=None)
@given(problem=PROBLEMS, device=st.sampled_from(DEVICES))
def test_candidates_fit_and_come_in_one_order(problem: Problem, device: Device) -> None:
    configs = space(problem, device, SOME_METHODS)
    costs = [cost(problem, config, device) for config in configs]
    assert all(0 < each < math.inf for each in costs)
    assert costs == sorted(costs)
    assert len(set(configs)) == len(configs)
    assert space(problem, device, SOME_METHODS[::-1]) == configs
    for config in configs:
        loaded = (config.block_m + config.block_n) * config.block_k * problem.itemsize
        assert loaded * config.stages <= device.shared
        assert (config.block_m > 0) == problem.multiplies


@settings(max_examples=60, deadline=None)
@given(problem=PROBLEMS, pick=st.integers(0, 1 << 20))
def test_more_rows_or_slower_links_are_never_cheaper(problem: Problem, pick: int) -> None:
    from dataclasses import replace

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


def test_devices_are_known_by_the_drivers_name() -> None:
    assert device_named("NVIDIA H200").name == "H200"
    assert device_named("AMD Instinct MI300X").name == "MI300X"
    assert device_named("a new one") is UNKNOWN


def test_what_cannot_be_modelled_is_refused() -> None:
    problem = Problem("all_gather", 2, 16, 16, 0)
    with pytest.raises(KernelError, match="method is 'fax'; it must be one of push,"):
        space(problem, H100, ["push", "fax"])
    with pytest.raises(KernelError, match="op is 'gossip'; it must be one of all_gather,"):
        Problem("gossip", 2, 16, 16, 0)
    with pytest.raises(KernelError, match="dtype is 'int3'; it must be one of float32,"):
        Problem("all_gather", 2, 16, 16, 0, "int3")
    tight = Device("tight", "sm_90", 1e12, 1e12, 1e12, 1e9, 4, shared=1000)
    with pytest.raises(KernelError, match="no tile fits 1000 bytes"):
        space(Problem("all_gather_matmul", 2, 16, 16, 16), tight, ["push"])


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
    assert {config.senders for config in around} == {0, 8, 16, 32}


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
            seen.append((self.fn.__name__, kwargs | {"grid": grid}))
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


@pytest.mark.parametrize("op", sorted(tune.PRODUCT_METHODS))
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
        names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps")
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


# A real op, in the interpreter.


@pytest.mark.parametrize("op", sorted(PAYLOADS))
def test_an_op_is_tuned_as_a_whole(op: str, tmp_path: Path) -> None:
    problem = Problem(op, 2, 24, 20, 16 if "matmul" in op else 0, "float32")
    size = {"candidates": 8 if "all_" in op and "matmul" not in op else 2}

    def work(home: Home) -> list[tune.Measured]:
        return tune_op(home, problem, path=tmp_path / "t", repetitions=1, calls=1, **size)

    first, second = run(work, 2)
    assert first == second
    assert all(0 < time < math.inf for one in first for time in one.times)
    (written,) = tuned.load(tmp_path / "t").values()
    assert written.config == first[0].config
    assert written.config.method in METHODS_OF[op]


@pytest.mark.parametrize("op", sorted(PAYLOADS))
def test_what_is_timed_is_the_op(op: str) -> None:
    """Every method's call, on one rank, computes it: with one rank, what it has or x w."""
    problem = Problem(op, 1, 8, 12, 16 if "matmul" in op else 0, "float32")

    def work(home: Home) -> list[tuple[str, tuple[int, ...]]]:
        methods, prepare = prepare_op(home, problem)
        blocks = {"block_m": 16, "block_n": 16, "block_k": 16, "warps": 4, "stages": 2}
        configs = [Config(m, **(blocks if problem.multiplies else {})) for m in methods]
        calls = [(config.method, prepare(config)) for config in configs]
        results = []
        for method, call in calls:
            assert isinstance(call, partial)
            x, *rest = call.args
            expected = x @ rest[0] if problem.multiplies else x
            result = call()
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
            results.append((method, tuple(result.shape)))
        return results

    (results,) = run(work, 1)
    assert {method for method, _ in results} <= set(METHODS_OF[op])
    assert {shape for _, shape in results} == {(8, 12)}


def test_rows_that_do_not_divide_are_refused() -> None:
    problem = Problem("all_gather", 2, 7, 4, 0)
    with pytest.raises(RankError, match="all_gather: rows is 7; it must be a multiple of 2 ranks"):
        run(lambda home: prepare_op(home, problem), 2)
