"""One rank of several, and virtual ranks that serve together on one device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness.ranks import prepare, receive_all, run
from harness.report import Case, Figure, LeftOut
from harness.timing import Times, ratio

from model.group import Table, virtual_groups
from model.model import STD_OF_CACHE, Scale, decodes, fill_cache, make_runner
from model.steps import alone, part_of_bandwidth, steps_of, time_of
from weft.kernels.symmetric.memory import Home
from weft.models.spec.layout import Layout
from weft.models.torch.overlapped import Overlapped
from weft.models.torch.runner import TorchRunner

CHAIN = 6
"""Steps whose tokens are compared."""


def shard(scale: Scale, repetitions: int) -> Iterator[Case]:
    """One of several ranks, without the others."""
    for world in scale.worlds:
        for users in scale.users:
            made = partial(_shard, scale, world, users, repetitions)
            yield Case(f"{users} users, rank 0 of {world}", made)


def _shard(scale: Scale, world: int, users: int, repetitions: int) -> Figure:
    _check_divides(scale, world)
    layout = Layout(tp=world)

    def on_rank(home: Home) -> list[Figure]:
        found = []
        if home.rank:  # its buffers only
            dtype = getattr(torch, scale.dtype)
            other = Layout(tp=world, rank=home.rank)
            Overlapped(home, None, scale.spec, other, dtype, max_tokens=users)
            home.barrier()
        else:
            runner, exchange = make_runner(scale, home, layout, users)
            home.barrier()
            assert isinstance(exchange, Overlapped)
            for workspace in exchange.workspaces:
                receive_all(workspace, _processors(scale))
            runner.warm_up()
            found.append(part_of_bandwidth(scale, runner, layout, users, repetitions))
            runner.close()
        home.exchange("measured")
        return found

    return run(on_rank, world, tiny=scale.tiny)[0][0]


def together(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Virtual ranks that serve on one device; one rank's time over theirs."""
    for world in scale.worlds:
        for users in scale.users:
            made = partial(_together, scale, world, users, repetitions)
            yield Case(f"{users} users, {world} ranks", made)


def _together(scale: Scale, world: int, users: int, repetitions: int) -> Figure:
    _check_divides(scale, world)
    one = alone(scale, users, graph_sizes=())
    expected = _tokens(scale, one, users)
    of_one = time_of(scale, repetitions, steps_of(scale, one, users))
    one.close()
    del one
    table: Table = {}

    def on_rank(home: Home) -> tuple[list[int], Times]:
        layout = Layout(tp=world, rank=home.rank)
        groups = virtual_groups(home, table)
        runner, _ = make_runner(scale, home, layout, users, groups=groups, graph_sizes=())
        prepare(home, [lambda: runner.step(decodes(scale, users, 0))])
        tokens = _tokens(scale, runner, users)
        times = time_of(scale, repetitions, steps_of(scale, runner, users))
        home.barrier()
        runner.close()
        return tokens, times

    tokens, times = zip(*run(on_rank, world, tiny=scale.tiny), strict=True)
    same = sum(a == b for a, b in zip(tokens[0], expected, strict=True)) / len(expected)
    return Figure(
        *ratio(of_one, times[0]),
        goal="all ranks sample the same tokens",
        good=all(of_rank == tokens[0] for of_rank in tokens),
        details={"ms": 1e3 * times[0].median, "of one": 1e3 * of_one.median, "its tokens": same},
    )


def _tokens(scale: Scale, runner: TorchRunner, users: int) -> list[int]:
    """What is sampled after an empty context, which is the same on any number of ranks."""
    fill_cache(runner, 0.0)
    tokens: list[int] = []
    for number in range(CHAIN):  # each decodes what the last has sampled, of any rank's vocabulary
        tokens += runner.step(decodes(scale, users, number)).token_ids.tolist()
    fill_cache(runner, STD_OF_CACHE)
    return tokens


def _check_divides(scale: Scale, world: int) -> None:
    if scale.spec.num_kv_heads % world:
        raise LeftOut(f"{scale.spec.num_kv_heads} KV heads do not divide by {world} ranks")


def _processors(scale: Scale) -> int:
    """That one rank may fill."""
    if scale.tiny:
        return 2
    return torch.cuda.get_device_properties(0).multi_processor_count
