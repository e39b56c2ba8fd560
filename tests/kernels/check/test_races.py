"""The race detector's knowledge of order: small kernels, each with and without a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from support.faults import planted
from support.overlapped import findings
from support.peers import peers_of
from torch import Tensor

from weft.kernels.gpu.collectives import all_gather, chunks
from weft.kernels.gpu.matmul import decomposed
from weft.kernels.gpu.runtime.low_latency import get_ll, put_ll
from weft.kernels.gpu.runtime.signals import notify, peer_pointer, wait
from weft.kernels.symmetric.memory import Home, SymmetricTensor

SEEDS = 6


@triton.jit
def store_to(buffers, peer, at, value, dtype: tl.constexpr):
    """Store one number to a rank. Grid: any."""
    tl.store(peer_pointer(buffers, peer, dtype) + at, value)


@triton.jit
def load_from(buffers, out, peer, at):
    """Load one float32 from a rank. Grid: any."""
    tl.store(out, tl.load(peer_pointer(buffers, peer, tl.float32) + at))


@triton.jit
def load_and_tell(peers, out, rank, peer, FIRST: tl.constexpr):
    """Each program loads number 0; those from FIRST on tell a rank. Grid: (n,)."""
    tl.store(out + tl.program_id(0), tl.load(peer_pointer(peers.buffers, rank, tl.float32)))
    if tl.program_id(0) >= FIRST:
        notify(peers, peer, tl.program_id(0), 1)


@triton.jit
def tell(peers, peer, index, value):
    """Set a signal. Grid: (1,)."""
    notify(peers, peer, index, value)


@triton.jit
def wait_for(peers, rank, index, value):
    """Wait for a signal. Grid: any."""
    wait(peers, rank, index, value)


@triton.jit
def wait_and_set_back(peers, rank, index, value):
    """The first program sets back the signal that all wait for. Grid: (n,)."""
    wait(peers, rank, index, value)
    if tl.program_id(0) == 0:
        notify(peers, rank, index, 0)


@triton.jit
def add_one(signals, peer):
    """Increment a signal. Grid: any."""
    tl.atomic_add(peer_pointer(signals, peer, tl.int64), 1, sem="release", scope="sys")


@triton.jit
def put_word(buffers, peer, at, call):
    """Send a word with its flag. Grid: (1,)."""
    to = peer_pointer(buffers, peer, tl.int64) + at + tl.arange(0, 1)
    words = tl.zeros((1,), tl.int32)
    put_ll(to, words, call, words == 0)


@triton.jit
def get_word(peers, out, rank, at, call):
    """Wait for a word. Grid: (1,)."""
    place = tl.arange(0, 1)
    come = peer_pointer(peers.buffers, rank, tl.int64) + at + place
    tl.store(out + place, get_ll(come, call, place == 0, peers, rank, 0))


class Bench:
    """A buffer, signals and the kernels' other arguments, on one rank."""

    def __init__(self, home: Home, numel: int = 8, dtype: torch.dtype = torch.float32) -> None:
        self.buffer: SymmetricTensor = home.zeros("bench.buffer", (numel,), dtype)
        self.signals: SymmetricTensor = home.zeros("bench.signals", (4,), torch.int64)
        self.at = self.buffer.addresses
        self.peers = peers_of(self.signals, self.buffer)
        self.out = torch.zeros(4)


def no_order(found: list[str], *parts: str) -> bool:
    """Whether the findings include a race with these parts in its text."""
    return any("no order between" in text and all(part in text for part in parts) for text in found)


@pytest.mark.parametrize("telling", [3, 1])
def test_each_program_that_loads_must_be_known_before_a_store(telling: int) -> None:
    """Three programs on a rank load a number; the last ones signal the rank that stores over it."""

    def work(home: Home) -> None:
        bench = Bench(home)
        if home.rank == 0:
            load_and_tell[(3,)](bench.peers, bench.out, 0, 1, FIRST=3 - telling)
        else:
            for index in range(3 - telling, 3):
                wait_for[(1,)](bench.peers, 1, index, 1)
            store_to[(1,)](bench.at, 0, 0, 1.0, dtype=tl.float32)

    found = findings(work, 2, SEEDS)
    if telling == 3:
        assert found == []
    else:
        assert no_order(found, "bench.buffer[0] of rank 0", "load by rank 0", "store by rank 1")


def test_loads_on_both_streams_must_be_known_before_a_store() -> None:
    def work(home: Home, *, joined: bool) -> None:
        bench = Bench(home)
        if home.rank == 0:
            with home.beside():
                load_from[(1,)](bench.at, bench.out, 0, 0)
            load_from[(1,)](bench.at, torch.zeros(1), 0, 0)
            if joined:
                home.rejoin()
            tell[(1,)](bench.peers, 1, 0, 1)
        else:
            wait_for[(1,)](bench.peers, 1, 0, 1)
            store_to[(1,)](bench.at, 0, 0, 1.0, dtype=tl.float32)

    assert findings(lambda home: work(home, joined=True), 2, SEEDS) == []
    assert no_order(findings(lambda home: work(home, joined=False), 2, SEEDS), "launch 0 beside")


def test_a_barrier_orders_what_was_before_and_nothing_after() -> None:
    def work(home: Home, *, apart: bool) -> None:
        bench = Bench(home)
        if home.rank == 0:
            store_to[(1,)](bench.at, 1, 0, 1.0, dtype=tl.float32)
        if apart:
            home.barrier()
        if home.rank == 1:
            store_to[(1,)](bench.at, 1, 0, 1.0, dtype=tl.float32)

    assert findings(lambda home: work(home, apart=True), 2, SEEDS) == []
    for seed in range(SEEDS):
        assert no_order(findings(lambda home: work(home, apart=False), 2, seed + 1))


def test_the_host_has_to_wait_for_what_it_has_launched() -> None:
    """An exchange of values on the host does not wait: launches may still be running."""

    def work(home: Home) -> None:
        bench = Bench(home)
        if home.rank == 0:
            store_to[(1,)](bench.at, 1, 0, 1.0, dtype=tl.float32)
        home.exchange("launched")
        if home.rank == 1:
            store_to[(1,)](bench.at, 1, 0, 1.0, dtype=tl.float32)

    assert no_order(findings(work, 2, 1))


def test_an_access_of_several_elements_is_one_of_each() -> None:
    """Rank 0 stores 8 bytes; the upper 4 overlap with rank 1's store."""

    def work(home: Home) -> None:
        bench = Bench(home)
        if home.rank == 0:
            store_to[(1,)](bench.at, 0, 0, 1, dtype=tl.int64)
        else:
            store_to[(1,)](bench.at, 0, 1, 1.0, dtype=tl.float32)

    assert no_order(findings(work, 2, 1), "bench.buffer[1] of rank 0")


@pytest.mark.parametrize("first", ["store", "poll", "set"])
def test_atomics_and_plain_stores_must_have_an_order(first: str) -> None:
    def work(home: Home) -> None:
        bench = Bench(home)
        if home.rank == 0:
            store_to[(1,)](bench.signals.addresses, 1, 0, 7, dtype=tl.int64)
        elif first == "set":
            tell[(1,)](bench.peers, 1, 0, 8)
        elif first == "poll":
            wait_for[(1,)](bench.peers, 1, 0, 7)
        else:
            store_to[(1,)](bench.signals.addresses, 1, 0, 8, dtype=tl.int64)

    assert no_order(findings(work, 2, SEEDS), "bench.signals[0] of rank 1")


def test_signals_that_begin_as_anything_are_found() -> None:
    def work(home: Home) -> None:
        peers = peers_of(home.empty("bench.garbage", (1,), torch.int64))
        tell[(1,)](peers, home.rank, 0, 1)
        wait_for[(1,)](peers, home.rank, 0, 1)

    def worse(home: Home) -> None:
        signals = home.empty("bench.garbage", (1,), torch.int64).addresses
        add_one[(1,)](signals, home.rank)

    assert findings(work, 2, 1) == []
    assert "bench.garbage[0] of rank" in findings(worse, 2, 1)[0]


# Tensors that only one rank has.


@triton.jit
def copy_number(x, out, source, to, STEP: tl.constexpr):
    """Each program copies a number, STEP after the one of the program before. Grid: (n,)."""
    at = tl.program_id(0) * STEP
    tl.store(out + to + at, tl.load(x + source + at))


@triton.jit
def sum_last(x, parts, count, out, SEM: tl.constexpr, SCOPE: tl.constexpr):
    """The program that counts last adds all programs' parts. Grid: (4,)."""
    tl.store(parts + tl.program_id(0), tl.load(x + tl.program_id(0)))
    if tl.atomic_add(count, 1, sem=SEM, scope=SCOPE) == 3:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, 4))))


@pytest.mark.parametrize(
    ("source", "to", "step", "kinds"),
    [
        (0, 4, 1, ()),
        (0, 4, 0, ("store", "store")),  # all to one place
        (1, 0, 1, ("load", "store")),  # each to the place that the one before reads
    ],
)
def test_programs_of_a_launch_have_no_order(
    source: int, to: int, step: int, kinds: tuple[str, ...]
) -> None:
    """Whatever order the seed draws for them; other launches come after all of them."""

    def work(home: Home) -> None:
        x = torch.arange(8.0)
        for _ in range(2):
            copy_number[(4,)](x=x, out=x, source=source, to=to, STEP=step)

    found = findings(work, 1, SEEDS)
    if kinds:
        assert no_order(found, "copy_number.x[", "of rank 0", *kinds, "(launch 0, program (")
    else:
        assert found == []


@pytest.mark.parametrize(
    ("sem", "scope", "ordered"),
    [
        ("acq_rel", "gpu", True),
        ("acq_rel", "sys", True),
        ("acq_rel", "cta", False),
        ("release", "gpu", False),
        ("acquire", "gpu", False),
        ("relaxed", "gpu", False),
    ],
)
def test_an_atomic_orders_programs_of_one_gpu(sem: str, scope: str, ordered: bool) -> None:
    def work(home: Home) -> None:
        parts, count = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
        given = {"x": torch.ones(4), "parts": parts, "count": count, "out": torch.zeros(1)}
        sum_last[(4,)](**given, SEM=sem, SCOPE=scope)
        assert given["out"].item() == 4

    found = findings(work, 1, SEEDS)
    if ordered:
        assert found == []
    else:
        assert no_order(found, "sum_last.parts[", "store by", "load by")


@pytest.mark.parametrize("how", ["rejoin", "event", "neither", "event before"])
@pytest.mark.parametrize("reads", ["kernel", "torch"])
def test_a_stream_waits_for_tensors_of_the_other(how: str, reads: str) -> None:
    def work(home: Home) -> None:
        x, out = torch.arange(8.0), torch.zeros(8)
        with home.beside():
            early = home.record_event()
            copy_number[(8,)](x=x, out=out, source=0, to=0, STEP=1)
            event = home.record_event()
        if how == "rejoin":
            home.rejoin()
        elif how != "neither":
            home.wait_event(event if how == "event" else early)
        if reads == "torch":
            assert out.sum() == 28
        else:
            copy_number[(8,)](x=out, out=torch.zeros(8), source=0, to=0, STEP=1)

    found = findings(work, 1, SEEDS)
    if how in ("rejoin", "event"):
        assert found == []
    else:
        assert no_order(found, "copy_number.out[", "(launch 0 beside", "load by rank 0")


def test_the_second_stream_begins_after_what_was_launched_before() -> None:
    def work(home: Home) -> None:
        x, out = torch.arange(8.0), torch.zeros(8)
        for _ in range(2):
            copy_number[(8,)](x=x, out=out, source=0, to=0, STEP=1)
            with home.beside():
                copy_number[(8,)](x=out, out=x, source=0, to=0, STEP=1)
            home.rejoin()

    assert findings(work, 1, SEEDS) == []


# Words that carry their own signal.


@pytest.mark.parametrize("joined", [True, False])
def test_all_who_take_a_word_must_be_known_before_it_is_stored_over(joined: bool) -> None:
    """Rank 1 takes a word on both its streams, and answers for one or both."""

    def work(home: Home) -> None:
        bench = Bench(home, dtype=torch.int64)
        out = torch.zeros(1, dtype=torch.int32)
        if home.rank == 0:
            put_word[(1,)](bench.at, 1, 0, 1)
            get_word[(1,)](bench.peers, out, 0, 1, 1)
            put_word[(1,)](bench.at, 1, 0, 2)
        else:
            get_word[(1,)](bench.peers, out, 1, 0, 1)
            with home.beside():
                get_word[(1,)](bench.peers, torch.zeros(1, dtype=torch.int32), 1, 0, 1)
            if joined:
                home.rejoin()
            put_word[(1,)](bench.at, 0, 1, 1)

    found = findings(work, 2, SEEDS)
    if joined:
        assert found == []
    else:
        assert no_order(found, "bench.buffer[0] of rank 1", "take by rank 1", "beside")


def test_a_word_that_is_polled_in_vain_may_be_stored_over() -> None:
    """Rank 1 waits for the second word while the first, already taken, is still there."""

    def work(home: Home) -> None:
        bench = Bench(home, dtype=torch.int64)
        out = torch.zeros(1, dtype=torch.int32)
        for call in (1, 2, 3):
            if home.rank == 0:
                put_word[(1,)](bench.at, 1, 0, call)
                get_word[(1,)](bench.peers, out, 0, 1, call)
            else:
                get_word[(1,)](bench.peers, out, 1, 0, call)
                put_word[(1,)](bench.at, 0, 1, call)

    for slowness in ([1.0, 1.0], [20.0, 1.0], [1.0, 20.0]):
        assert findings(work, 2, SEEDS, slowness) == []


# Just outside.


@pytest.mark.parametrize(
    ("at", "where"), [(8, "0 bytes after its end"), (-1, "4 bytes before its beginning")]
)
def test_an_access_just_outside_a_tensor_is_found(at: int, where: str) -> None:
    def storing(home: Home) -> None:
        bench = Bench(home)
        if home.rank == 0:
            store_to[(1,)](bench.at, 1, at, 1.0, dtype=tl.float32)

    def loading(home: Home) -> None:
        bench = Bench(home)
        if home.rank == 0:
            load_from[(1,)](bench.at, bench.out, 1, at)

    for work, kind in ((storing, "store"), (loading, "load")):
        (found,) = findings(work, 2, 1)
        assert found.startswith("bench.buffer of rank 1: access outside, at 0x")
        assert f"{where}: {kind} by rank 0 (launch" in found
        assert f"{Path(__file__).name}:" in found


def test_a_signal_that_is_none_is_found() -> None:
    def work(home: Home) -> None:
        tell[(1,)](Bench(home).peers, 0, 4, 1)

    (found,) = findings(work, 1, 1)
    assert found.startswith("bench.signals of rank 0: access outside, at 0x")
    assert "0 bytes after its end: atomic by rank 0" in found
    assert "signals.py:" in found


def gather(numels: list[int], home: Home, module: object = all_gather, chunk: int = 8) -> None:
    """Run an all_gather of each size."""
    workspace = module.all_gather_workspace(home, 40, torch.float32, chunk=chunk)  # type: ignore[attr-defined]
    for numel in numels:
        module.all_gather(torch.full((numel,), 1.0), workspace)  # type: ignore[attr-defined]


def test_a_copy_that_is_one_number_too_long_is_found(tmp_path: Path) -> None:
    long = planted(
        all_gather,
        tmp_path,
        (
            "tl.store(to + at, tl.load(x + at, mask=at < end), mask=at < end)",
            "tl.store(to + at, tl.load(x + at, mask=at < end), mask=at <= end)",
        ),
        parts=[chunks],
    )
    assert findings(lambda home: gather([40, 40], home), seeds=1) == []
    found = findings(lambda home: gather([40, 40], home, long), seeds=1)
    assert any(
        text.startswith("all_gather.buffer of rank")
        and "0 bytes after its end: store by rank 2" in text
        and "planted_chunks" in text
        for text in found
    )


# Signals that are set again.


def test_signals_whose_place_depends_on_the_shape_are_found(tmp_path: Path) -> None:
    """One call's signal from a rank is the next call's from another, which may come first."""
    packed = planted(
        all_gather,
        tmp_path,
        ("index * WORLD + rank", "rank * tl.num_programs(1) + index"),
        ("index * WORLD + source", "source * tl.num_programs(1) + index"),
        parts=[chunks],
    )
    numels = [40, 16, 8, 24, 40]
    assert findings(lambda home: gather(numels, home), seeds=SEEDS) == []
    found = findings(lambda home: gather(numels, home, packed), seeds=SEEDS)
    assert any(
        "all_gather.signals[" in text
        and "is reused" in text
        and "with no order after it was" in text
        for text in found
    )


@pytest.mark.parametrize("waiting", [1, 2])
def test_a_signal_that_is_set_back_before_the_last_wait_is_found(waiting: int) -> None:
    """Two programs wait for a signal, and the first one resets it to zero."""

    def work(home: Home) -> None:
        bench = Bench(home)
        if home.rank == 0:
            if waiting == 1:
                wait_and_set_back[(1,)](bench.peers, 0, 0, 1)
            else:
                with home.beside():  # or the interpreter would end the first one before it
                    wait_for[(1,)](bench.peers, 0, 0, 1)
                wait_and_set_back[(1,)](bench.peers, 0, 0, 1)
        else:
            tell[(1,)](bench.peers, 0, 0, 1)

    found = findings(work, 2, SEEDS)
    if waiting == 1:
        assert found == []
    else:
        assert "bench.signals[0] of rank 0 is reused: a signal that is set from 1 to 0" in found[0]
        assert "with no order after the last wait" in found[0]


@pytest.mark.parametrize("answered", [True, False])
def test_a_signal_that_is_set_back_must_be_known_to_be_free(answered: bool) -> None:
    """A flag of 0 and 1: rank 1 sets it, rank 0 resets it, and rank 1 sets it once more."""

    def work(home: Home) -> None:
        bench = Bench(home)
        for call in (1, 2):
            if home.rank == 0:
                wait_and_set_back[(1,)](bench.peers, 0, 0, 1)
                tell[(1,)](bench.peers, 1, 1, call)
            else:
                tell[(1,)](bench.peers, 0, 0, 1)
                if answered:
                    wait_for[(1,)](bench.peers, 1, 1, call)

    found = findings(work, 2, SEEDS)
    assert (found == []) if answered else any("is reused" in text for text in found)


def test_a_signal_may_be_set_again_before_a_wait_for_less() -> None:
    """The next call's number also ends this call's wait, and implies all earlier numbers."""

    def work(home: Home) -> None:
        bench = Bench(home)
        for call in (1, 2, 3):
            if home.rank == 0:
                tell[(1,)](bench.peers, 1, 0, call)
            else:
                wait_for[(2,)](bench.peers, 1, 0, call)

    assert findings(work, 2, SEEDS, [1.0, 20.0]) == []


def test_a_signal_may_count_what_several_ranks_add() -> None:
    def work(home: Home) -> None:
        bench = Bench(home)
        for call in (1, 2):
            store_to[(1,)](bench.at, 0, home.rank, 1.0, dtype=tl.float32)
            add_one[(1,)](bench.signals.addresses, 0)
            if home.rank == 0:
                wait_for[(1,)](bench.peers, 0, 0, 3 * call)
                for rank in range(3):
                    load_from[(1,)](bench.at, bench.out, 0, rank)
            home.barrier()

    assert findings(work, 3, SEEDS) == []


# torch operators.


OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "load": lambda x: x.T @ x,
    "load of a part": lambda x: torch.cat([x[1:], torch.ones(1, 3)]).sum(),
    "store": lambda x: x[:, 0].fill_(1),
    "load and store": lambda x: x.add_(1),
    "store by out=": lambda x: torch.mm(torch.ones(4, 2), torch.ones(2, 3), out=x),
    "copy": lambda x: torch.ones(4, 3).copy_(x),
}
NO_OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "view": lambda x: x.view(12)[3:].unsqueeze(0).expand(2, -1).view(torch.int32),
    "template": lambda x: (x.new_zeros(3), torch.empty_like(x), torch.zeros_like(x)),
    "other column": lambda x: x.T[1].fill_(1),
    "other memory": lambda x: torch.ones(3) + 1,
}


@pytest.mark.parametrize("name", [*OPERATORS, *NO_OPERATORS])
def test_operators_of_torch_on_symmetric_memory_are_seen(name: str) -> None:
    """Rank 1 stores to number 9 on rank 0, in row 3 and column 0, without any order."""

    def work(home: Home) -> None:
        bench = Bench(home, 12)
        if home.rank == 0:
            (OPERATORS | NO_OPERATORS)[name](bench.buffer.local.view(4, 3))
        else:
            store_to[(1,)](bench.at, 0, 9, 1.0, dtype=tl.float32)

    found = findings(work, 2, 2)
    if name in NO_OPERATORS:
        assert found == []
    else:
        assert no_order(found, "bench.buffer[9] of rank 0", "store by rank 1", Path(__file__).name)


def test_what_nobody_has_stored_is_not_multiplied() -> None:
    def work(home: Home) -> None:
        buffer = home.empty("bench.buffer", (4, 4), torch.float32)
        buffer.local[1:].zero_()
        torch.mm(torch.ones(1, 4), buffer.local)

    assert (
        "bench.buffer[0] of rank 0 is loaded, and nothing was ever stored"
        in (findings(work, 1, 1)[0])
    )


@pytest.mark.parametrize("method", ["chunks", "ring"])
def test_a_product_that_does_not_wait_for_its_rows_is_found(method: str, tmp_path: Path) -> None:
    faulty = planted(decomposed, tmp_path, ("wait_for[(1,)](", "(lambda *_, **__: None)("))

    def work(home: Home, module: object) -> None:
        workspace = module.all_gather_matmul_workspace(home, 4, 8, torch.float32)  # type: ignore[attr-defined]
        for _ in range(3):
            module.all_gather_matmul(  # type: ignore[attr-defined]
                torch.ones(4, 8), torch.ones(8, 4), workspace, method=method
            )

    assert findings(lambda home: work(home, decomposed), seeds=2) == []
    found = findings(lambda home: work(home, faulty), seeds=2)
    assert no_order(
        found, "decomposed all_gather_matmul.buffer", "planted_decomposed", "load by rank"
    )
