"""A rank's device and kernels by the settings, and the size of its buffers."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint
from torch.distributed import HashStore

os.environ["TRITON_INTERPRET"] = "1"

from weft.errors import ConfigError
from weft.kernels.check.ranks import run
from weft.kernels.symmetric import nvshmem
from weft.kernels.symmetric.counting import CountingHome
from weft.kernels.symmetric.memory import Home, SymmetricMemoryError
from weft.kernels.symmetric.virtual import VirtualHome
from weft.models.checkpoint.locate import read_spec
from weft.models.spec.layout import Layout
from weft.models.torch.group import ALONE
from weft.models.torch.overlapped import Overlapped
from weft.serving.config.settings import EngineConfig, Replica
from weft.serving.config.slices import NodeSlice
from weft.serving.executor import backend
from weft.serving.executor.backend import (
    check_target,
    choose_kernels,
    has_native_atomics,
    homes,
    ranks_per_node,
    require_same,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_overlaps_on_gpus_of_one_node_where_the_layout_can() -> None:
    config = EngineConfig(tp=2)
    assert choose_kernels(config, Layout(tp=2), CPU) == "plain"
    assert choose_kernels(config, Layout(tp=2), GPU) == "overlapped"
    assert choose_kernels(replace(config, kernels="plain"), Layout(tp=2), GPU) == "plain"
    assert choose_kernels(replace(config, kernels="overlapped"), Layout(tp=2), CPU) == "overlapped"
    apart = Replica(slice=(NodeSlice(0, (0,)), NodeSlice(1, (0,))))
    assert choose_kernels(replace(config, replica=apart), Layout(tp=2), GPU) == "plain"
    assert choose_kernels(replace(config, ep=4), Layout(tp=2, ep=4), GPU) == "plain"
    # Stages may be on separate nodes.
    stages, layout = replace(config, tp=1, pp=2, replica=apart), Layout(rank=1, pp=2)
    assert choose_kernels(stages, layout, GPU) == "overlapped"
    assert choose_kernels(stages, layout, CPU) == "plain"


def on_nodes(*ranks: int) -> Replica:
    """An engine with this number of ranks on each node."""
    return Replica(slice=tuple(NodeSlice(node, (*range(n),)) for node, n in enumerate(ranks)))


@pytest.mark.usefixtures("nvlink")
def test_experts_may_be_on_several_nodes_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: not asked.append((a, b)))
    config, layout = EngineConfig(ep=4, kernels="overlapped"), Layout(ep=4, rank=2)
    even = replace(config, replica=on_nodes(2, 2))
    assert choose_kernels(even, layout, GPU) == "overlapped"
    assert asked == [(0, 1), (1, 0)]
    assert choose_kernels(replace(even, redundant_experts=4), layout, GPU) == "overlapped"
    assert choose_kernels(replace(even, kernels="auto"), layout, GPU) == "plain"
    with pytest.raises(ConfigError, match="each node must have as many of a stage's ranks; they"):
        choose_kernels(replace(config, replica=on_nodes(3, 1)), layout, GPU)
    for wide in (Layout(tp=4, ep=4), Layout(tp=2, ep=4), Layout(cp=4)):
        sizes = {"tp": wide.tp, "ep": wide.ep, "cp": wide.cp}
        with pytest.raises(ConfigError, match="one node, unless --tp and --cp are 1 and you set"):
            choose_kernels(replace(even, **sizes), wide, GPU)  # type: ignore[arg-type]
    assert ranks_per_node(on_nodes(2, 2).slice, Layout(ep=2, pp=2)) == 2
    assert ranks_per_node(on_nodes(4, 2, 2).slice, Layout(ep=4, pp=2)) == 0
    assert ranks_per_node((), Layout(ep=4)) == 4


def test_ranks_on_several_nodes_share_memory_through_nvshmem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it, each rank of a stage learns what to install; the other stage is not involved."""
    monkeypatch.setattr(nvshmem, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: None)
    store, errors = HashStore(), list[str]()

    def rank(number: int) -> None:
        layout = Layout(ep=2, pp=2, rank=2 + number)
        slice = on_nodes(1, 1, 1, 1).slice
        try:
            homes(layout, GPU, "overlapped", ALONE, store, slice)
        except SymmetricMemoryError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    for error in errors:
        assert "rank 0: error: nvshmem4py is not installed; pip install" in error


def test_copies_of_experts_need_overlapped_kernels() -> None:
    config, layout = EngineConfig(ep=2, redundant_experts=4), Layout(ep=2)
    assert choose_kernels(replace(config, kernels="overlapped"), layout, CPU) == "overlapped"
    assert choose_kernels(config, layout, GPU) == "overlapped"
    with pytest.raises(ConfigError, match="--redundant-experts is 4; it needs --kernels overlapp"):
        choose_kernels(config, layout, CPU)
    apart = Replica(slice=(NodeSlice(0, (0,)), NodeSlice(1, (0,))))
    with pytest.raises(ConfigError, match="and --kernels auto is plain here"):
        choose_kernels(replace(config, replica=apart), layout, GPU)


@pytest.fixture
def nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs that reach each other have atomics there."""
    monkeypatch.setattr(backend, "has_native_atomics", lambda a, b: True)


@pytest.mark.usefixtures("nvlink")
def test_overlapped_kernels_are_refused_where_gpus_do_not_reach_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = {(2, 0)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in missing)
    here = EngineConfig(tp=2, pp=2, replica=Replica(slice=(NodeSlice(0, (1, 3, 0, 2)),)))
    first, last = Layout(tp=2, pp=2), Layout(tp=2, pp=2, rank=3)
    assert choose_kernels(here, first, GPU) == "overlapped"
    assert choose_kernels(here, last, GPU) == "plain"
    asked = replace(here, kernels="overlapped")
    assert choose_kernels(asked, first, GPU) == "overlapped"
    with pytest.raises(
        ConfigError, match=r"overlapped; GPU 2 cannot read .* memory of GPU 0.*plain"
    ):
        choose_kernels(asked, last, GPU)
    apart = replace(
        asked, tp=2, pp=1, replica=Replica(slice=(NodeSlice(0, (1,)), NodeSlice(3, (0,))))
    )
    with pytest.raises(ConfigError, match="they are on GPU 1 of node 0, GPU 0 of node 3"):
        choose_kernels(apart, Layout(tp=2), GPU)


def test_gpus_without_atomics_over_their_link_exchange_through_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As over PCIe: signals are atomic operations in a peer's memory."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(backend, "has_native_atomics", lambda a, b: (a, b) != (1, 0))
    config = EngineConfig(tp=2, replica=Replica(slice=(NodeSlice(0, (0, 1)),)))
    with caplog.at_level("INFO", "weft.serving.executor.backend"):
        assert choose_kernels(config, Layout(tp=2), GPU) == "plain"
    assert "NCCL (--kernels plain): GPU 1 has no atomic operations in the memory of GPU 0" in (
        caplog.text
    )
    with pytest.raises(ConfigError, match="overlapped; GPU 1 has no atomic operations in the mem"):
        choose_kernels(replace(config, kernels="overlapped"), Layout(tp=2), GPU)


DRIVER = """
int cuDeviceGet(int *device, int ordinal) { *device = 10 + ordinal; return ordinal > 2 ? 101 : 0; }
int cuDeviceGetP2PAttribute(int *value, int attribute, int from, int to) {
    *value = attribute == 3 && from == 10 && to == 11;
    return from == 12 ? 1 : 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="nothing to build the library with")
def test_the_driver_is_asked_for_atomics(tmp_path: Path) -> None:
    """A library with the driver's two functions; GPU 2 is an error, and there is no GPU 3."""
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    pairs = [(0, 1), (1, 0), (2, 0), (0, 3)]
    found = [has_native_atomics(*pair, driver=str(library)) for pair in pairs]
    assert found == [True, False, False, False]


@pytest.mark.usefixtures("nvlink")
def test_auto_overlaps_only_gpus_that_all_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 0, 1 and 2, 3 are joined; 1 reads 2, which does not read 1."""
    reached = {(0, 1), (1, 0), (2, 3), (3, 2), (1, 2)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in reached)

    def chosen(*gpus: int) -> str:
        config = EngineConfig(tp=len(gpus), replica=Replica(slice=(NodeSlice(0, gpus),)))
        return choose_kernels(config, Layout(tp=len(gpus)), GPU)

    assert [chosen(0, 1), chosen(3, 2)] == ["overlapped"] * 2
    assert [chosen(1, 2), chosen(0, 3), chosen(0, 1, 2)] == ["plain"] * 3


def test_what_gpus_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="--quantization is 'int8'; on GPUs it must be none"):
        choose_kernels(EngineConfig(quantization="int8"), Layout(), GPU)
    with pytest.raises(
        ConfigError, match=r"in --dtype\. Rounded weights need --device cpu --kernels plain"
    ):
        choose_kernels(EngineConfig(quantization="int8", kernels="overlapped"), Layout(), CPU)


def test_an_fp8_cache_needs_gpus_with_fp8() -> None:
    config = EngineConfig(kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="--kv-cache-dtype is fp8; on CPUs it must be auto"):
        choose_kernels(config, Layout(), CPU)
    assert choose_kernels(replace(config, kernels="overlapped"), Layout(), CPU) == "overlapped"
    with pytest.raises(ConfigError, match="--kv-cache-dtype is fp8; sm_80 has no fp8 numbers"):
        check_target(config, "sm_80")
    check_target(EngineConfig(), "sm_80")
    for target in ("sm_89", "sm_90", "sm_100", "gfx942"):
        check_target(config, target)


def test_ranks_of_different_kinds_are_told() -> None:
    store, errors = HashStore(), list[str]()

    def rank(number: int, kind: str) -> None:
        try:
            require_same(store, number, 2, kind)
        except ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=each) for each in enumerate(("cuda", "cpu"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(errors)) == 1
    assert len(errors) == 2
    assert errors[0].endswith("rank 0: cuda; rank 1: cpu")


@pytest.mark.parametrize(
    ("layout", "near"), [(Layout(tp=2), 2), (Layout(ep=2), 2), (Layout(ep=2), 1)]
)
def test_buffers_are_counted_before_they_are_made(
    layout: Layout, near: int, tmp_path: Path
) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "qwen3_moe"))

    def made(home: Home) -> int:
        assert isinstance(home, VirtualHome)
        of_rank = replace(layout, rank=home.rank)
        Overlapped(home, None, spec, of_rank, torch.float32, 100)
        return sum(home._world.memory[address].nbytes for address in home._addresses)

    counting = CountingHome(2, ranks_per_node=near)
    Overlapped(counting, None, spec, layout, torch.float32, 100)
    assert run(made, 2, ranks_per_node=near) == [counting.nbytes] * 2
    assert counting.nbytes > 0


def test_a_buffer_takes_a_segment_on_a_gpu() -> None:
    counting = CountingHome(2)
    for nbytes in (256, 1 << 20, 3 << 20, 10 << 20, (10 << 20) + 1):
        counting._allocate(nbytes)
    assert counting.segments == (2 + 2 + 20 + 10 + 12) << 20
