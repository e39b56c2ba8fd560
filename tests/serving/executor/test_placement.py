"""Virtual slices, mapped to the nodes' devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.serving.config.settings import Capacity, EngineConfig
from weft.serving.config.slices import DeviceRequest, NodeSlice, Slice, parse
from weft.serving.executor.placement import (
    Device,
    Inventory,
    can_replace,
    decided,
    devices_of_ranks,
    map_slices,
    units,
)

ANY = Inventory()


def mapped(*inventories: Inventory, **settings: object) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Map slices; return for each engine its nodes and their devices."""
    slices = map_slices(EngineConfig(**settings), inventories)  # type: ignore[arg-type]
    return [[(part.node, part.devices) for part in each] for each in slices]


def gpus(count: int) -> Inventory:
    return Inventory(gpus=(2**30,) * count)


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("8", DeviceRequest(8)),
        ("2x4", DeviceRequest(8, (4, 4))),
        ("4+1", DeviceRequest(5, (4, 1))),
        ("2x4+2", DeviceRequest(10, (4, 4, 2))),
        ("nvlink:8", DeviceRequest(8, (8,), "cuda")),
        ("nvlink:2x4", DeviceRequest(8, (4, 4), "cuda")),
    ],
)
def test_a_slice_is_written_like_this(text: str, request_: DeviceRequest) -> None:
    assert parse(text) == request_


@pytest.mark.parametrize(
    "text", ["", "x4", "2x", "2x4x2", "0", "2x0", "0x2", "-1", "ib:8", "4 + 1"]
)
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(devices=text)
    assert str(caught.value).startswith(f"--devices is {text!r}; it must be such as 8, 2x4, 4+1")


def test_the_nodes_share_the_ranks_in_their_order() -> None:
    assert mapped(ANY, tp=4) == [[(0, (0, 1, 2, 3))]]
    assert mapped(ANY, ANY, tp=4) == [[(0, (0, 1)), (1, (0, 1))]]
    assert mapped(ANY, ANY, ANY, tp=4) == [[(0, (0, 1)), (1, (0,)), (2, (0,))]]


def test_nodes_of_different_sizes_get_what_they_have_room_for() -> None:
    assert mapped(Inventory(4), Inventory(1), tp=5) == [[(0, (0, 1, 2, 3)), (1, (0,))]]
    assert mapped(Inventory(1), Inventory(4), tp=5) == [[(0, (0,)), (1, (0, 1, 2, 3))]]


def test_stages_and_engines_are_whole_on_a_node() -> None:
    assert mapped(ANY, ANY, tp=2, pp=3) == [[(0, (0, 1, 2, 3)), (1, (0, 1))]]
    assert mapped(ANY, ANY, tp=2, dp=2) == [[(0, (0, 1))], [(1, (0, 1))]]
    assert mapped(ANY, ANY, tp=2, dp=3) == [[(0, (0, 1))], [(0, (2, 3))], [(1, (0, 1))]]
    assert mapped(ANY, ANY, ANY, ANY, tp=2, dp=2) == [
        [(0, (0,)), (1, (0,))],
        [(2, (0,)), (3, (0,))],
    ]


def test_copies_of_attention_are_whole_where_a_stage_cannot_be() -> None:
    assert mapped(Inventory(6), Inventory(2), tp=2, ep=8) == [[(0, tuple(range(6))), (1, (0, 1))]]


def test_a_number_takes_as_few_nodes_as_have_room() -> None:
    assert mapped(Inventory(2), Inventory(8), Inventory(4), tp=4, devices="4") == [
        [(1, (0, 1, 2, 3))]
    ]
    assert mapped(Inventory(2), Inventory(4), Inventory(4), tp=4, pp=2, devices="8") == [
        [(1, (0, 1, 2, 3)), (2, (0, 1, 2, 3))]
    ]
    assert mapped(Inventory(4), Inventory(4), tp=4, dp=2, devices="4") == [
        [(0, (0, 1, 2, 3))],
        [(1, (0, 1, 2, 3))],
    ]


def test_a_shape_says_how_many_of_each_node() -> None:
    assert mapped(ANY, ANY, ANY, tp=4, devices="2x2") == [[(0, (0, 1)), (1, (0, 1))]]
    assert mapped(Inventory(1), Inventory(4), tp=5, devices="4+1") == [
        [(1, (0, 1, 2, 3)), (0, (0,))]
    ]
    assert mapped(Inventory(4), Inventory(4), tp=4, dp=2, devices="2x2") == [
        [(0, (0, 1)), (1, (0, 1))],
        [(0, (2, 3)), (1, (2, 3))],
    ]


def test_nvlink_asks_for_gpus() -> None:
    assert mapped(ANY, gpus(8), tp=8, devices="nvlink:8") == [[(1, tuple(range(8)))]]
    assert gpus(2).devices("cuda", 3, 64) == [
        Device(3, 0),
        Device(3, 1),
    ]


def test_engines_on_a_node_are_counted() -> None:
    (one, two) = map_slices(EngineConfig(tp=3, dp=2), [Inventory(4), Inventory(2)])
    assert one == (NodeSlice(0, (0, 1, 2), 2),)
    assert two == (NodeSlice(0, (3,), 2), NodeSlice(1, (0, 1), 1))


@pytest.mark.parametrize(
    ("inventories", "settings", "message"),
    [
        (
            (Inventory(4), Inventory(1, where="node2 at 10.0.0.2")),
            {"tp": 6},
            "no room for 6 ranks. Available: this node: 4 CPU ranks; node2 at 10.0.0.2: 1 CPU "
            "rank. No --devices would fit: 6 are needed",
        ),
        (
            (Inventory(4), Inventory(4)),
            {"tp": 4, "devices": "2x4"},
            "--devices is 2x4, 8 for each engine; an engine has 4 ranks. Available: this node: 4 "
            "CPU ranks; this node: 4 CPU ranks. These --devices would fit: 4, 1x4, 2x2",
        ),
        (
            (Inventory(4), Inventory(4)),
            {"tp": 8, "devices": "1x8"},
            "--devices is 1x8; that is not available. Available: this node: 4 CPU ranks; this "
            "node: 4 CPU ranks. These --devices would fit: 8, 2x4",
        ),
        (
            (ANY, gpus(4)),
            {"tp": 4, "dp": 2, "devices": "nvlink:4"},
            "--devices is nvlink:4; that is not available for each of 2 engines. Available: "
            "this node: 0 GPUs; this node: 4 GPUs. No --devices would fit: 8 are needed",
        ),
        (
            (ANY, ANY, ANY),
            {"tp": 2},
            "--nodes is 3; there are only 2 ranks in all. Available: this node: any number of "
            "CPU ranks; this node: any number of CPU ranks; this node: any number of CPU ranks. "
            "These --devices would fit: 2, 1x2, 2x1",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    inventories: tuple[Inventory, ...], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        map_slices(EngineConfig(**settings), inventories)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_node_is_replaced_by_one_with_the_devices_that_are_used() -> None:
    config = EngineConfig(tp=5)
    slices = map_slices(config, [Inventory(4), Inventory(1)])
    assert not can_replace(config, slices, 0, Inventory(3))
    assert can_replace(config, slices, 0, Inventory(4))
    assert can_replace(config, slices, 0, ANY)
    assert can_replace(config, slices, 1, Inventory(1))
    assert can_replace(config, [], 1, Inventory(1)), "any, before slices are dealt"


layouts = st.fixed_dictionaries(
    {name: st.sampled_from([1, 1, 2, 3, 4]) for name in ("tp", "cp", "pp", "dp")}
    | {"ep": st.sampled_from([1, 1, 2, 4, 8])}
)
nodes = st.lists(st.builds(Inventory, st.none() | st.integers(1, 16)), min_size=1, max_size=5)


def check(config: EngineConfig, inventories: list[Inventory], slices: list[Slice]) -> None:
    """Check that every rank has an existing device, and that no two share one."""
    assert len(slices) == config.dp
    taken = [(part.node, i) for each in slices for part in each for i in part.devices]
    assert len(set(taken)) == len(taken) == config.dp * config.world_size
    for each in slices:
        assert sum(len(part.devices) for part in each) == config.world_size
        for part in each:
            there = inventories[part.node].max_ranks
            assert there is None or max(part.devices) < there
            assert part.engines == sum(
                any(other.node == part.node for other in theirs) for theirs in slices
            )


@given(layouts, nodes)
def test_every_rank_gets_a_device_of_its_own(
    layout: dict[str, int], inventories: list[Inventory]
) -> None:
    split = layout["tp"] * layout["cp"]
    assume(not (split % layout["ep"] and layout["ep"] % split))
    try:
        config = EngineConfig(**layout)  # type: ignore[arg-type]
    except ConfigError:
        assume(False)
    ranks = config.dp * config.world_size
    rooms = [
        ranks if inventory.max_ranks is None else inventory.max_ranks for inventory in inventories
    ]
    try:
        slices = map_slices(config, inventories)
    except ConfigError:
        assert ranks < len(inventories) or sum(rooms) < ranks
        return
    check(config, inventories, slices)
    counts = [
        sum(len(s.devices) for each in slices for s in each if s.node == number)
        for number in range(len(inventories))
    ]
    assert all(counts), "each node takes part"
    # The largest kind of unit that can be whole on nodes everywhere is whole.
    for unit in units(config):
        fit = [room // unit for room in rooms]
        if all(fit) and sum(fit) >= ranks // unit >= len(inventories):
            assert not any(count % unit for count in counts)
            break


@given(layouts, nodes, st.data())
def test_a_slice_that_is_asked_for_is_given_or_refused_rightly(
    layout: dict[str, int], inventories: list[Inventory], data: st.DataObject
) -> None:
    split = layout["tp"] * layout["cp"]
    assume(not (split % layout["ep"] and layout["ep"] % split))
    size = max(split, layout["ep"]) * layout["pp"]
    assume(size <= 64)
    islands = data.draw(st.sampled_from([n for n in range(1, size + 1) if not size % n]))
    shape = data.draw(st.sampled_from([str(size), f"{islands}x{size // islands}"]))
    config = EngineConfig(**layout, devices=shape)  # type: ignore[arg-type]
    ranks = config.dp * size
    rooms = [
        ranks if inventory.max_ranks is None else inventory.max_ranks for inventory in inventories
    ]
    try:
        slices = map_slices(config, inventories)
    except ConfigError:
        if shape == str(size):
            assert sum(rooms) < ranks
        else:  # each engine takes one part of an island at most
            parts = sum(min(config.dp, room // (size // islands)) for room in rooms)
            assert parts < config.dp * islands
        return
    check(config, inventories, slices)
    if shape != str(size):
        for each in slices:
            assert [len(part.devices) for part in each] == [size // islands] * islands
            assert len({part.node for part in each}) == islands


def test_auto_is_gpus_where_there_is_one_for_each_rank() -> None:
    def kind(*inventories: Inventory, **settings: object) -> str:
        return decided(EngineConfig(**settings), inventories).device  # type: ignore[arg-type]

    assert kind(gpus(4), tp=4) == "cuda"
    assert kind(gpus(4), tp=2, dp=2) == "cuda"
    assert kind(gpus(3), tp=4) == "cpu"
    assert kind(gpus(4), tp=4, device="cpu") == "cpu"
    assert kind(gpus(2), gpus(2), tp=4, nodes=2) == "cuda"
    assert kind(gpus(2), Inventory(), tp=4, nodes=2) == "cpu"
    assert kind(gpus(2), tp=4, devices="nvlink:4") == "cuda"  # which is then refused
    with pytest.raises(ConfigError, match=r"--device is cuda: .* 0 GPUs"):
        map_slices(EngineConfig(device="cuda"), [Inventory()])
    with pytest.raises(ConfigError, match="--device is cpu; with --devices nvlink:4 it must be"):
        EngineConfig(tp=4, devices="nvlink:4", device="cpu")


def tpus(count: int) -> Inventory:
    return Inventory(tpus=(2**30,) * count)


def test_auto_is_jax_where_all_nodes_have_tpus() -> None:
    def chosen(*inventories: Inventory, **settings: object) -> tuple[str, str]:
        config = decided(EngineConfig(**settings), inventories)  # type: ignore[arg-type]
        return config.backend, config.device

    assert chosen(tpus(4), tpus(4), tp=8, nodes=2) == ("jax", "tpu")
    assert chosen(tpus(4), tp=8) == ("jax", "tpu"), "which is then refused"
    assert chosen(tpus(4), ANY, tp=4, nodes=2) == ("torch", "cpu")
    assert chosen(tpus(4), device="cpu") == ("torch", "cpu")
    assert chosen(ANY, device="tpu") == ("jax", "tpu")
    assert chosen(tpus(4), backend="torch") == ("torch", "cpu")
    assert chosen(tpus(4), backend="jax") == ("jax", "tpu")
    assert chosen(tpus(4), backend="jax", device="cpu") == ("jax", "cpu")
    assert chosen(gpus(4), backend="jax") == ("jax", "cpu")
    with pytest.raises(ConfigError, match=r"--device is tpu: no room for 8 ranks.*: 4 TPUs"):
        map_slices(EngineConfig(tp=8, device="tpu"), [tpus(4)])
    with pytest.raises(ConfigError, match="--device is tpu; with --backend torch it must be auto"):
        EngineConfig(device="tpu", backend="torch")
    with pytest.raises(ConfigError, match="--devices is nvlink:4; with --backend jax it must be"):
        EngineConfig(tp=4, backend="jax", devices="nvlink:4")


def test_capacity_follows_the_device_and_set_values_win() -> None:
    def capacity(inventory: Inventory, **settings: object) -> Capacity:
        return decided(EngineConfig(tp=1, **settings), [inventory]).capacity  # type: ignore[arg-type]

    assert capacity(gpus(1)) == capacity(gpus(1), device="cuda") == Capacity(512, 8192, 0.9)
    assert capacity(gpus(1), device="cpu") == capacity(ANY) == Capacity(128, 2048, 0.8)
    assert capacity(tpus(1)) == Capacity(128, 2048, 0.8)
    for inventory in (gpus(1), tpus(1), ANY):
        own = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "memory_fraction": 0.5}
        assert capacity(inventory, **own) == Capacity(3, 64, 0.5)
    assert capacity(gpus(1), max_num_seqs=128) == Capacity(128, 8192, 0.9)


def test_a_rank_has_one_device_or_with_jax_all_of_its_node() -> None:
    config = EngineConfig(tp=4, dp=2, nodes=2, backend="jax")
    slices = map_slices(config, [tpus(8), tpus(8)])
    (part,) = slices[1]
    assert devices_of_ranks(config, part) == [(0, 1, 2, 3)]
    on_torch = replace(config, backend="torch")
    assert devices_of_ranks(on_torch, part) == [(0,), (1,), (2,), (3,)]
