"""Symmetric memory between real processes, and its remains after one of them is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import shared_memory_left_alone

PRELUDE = """
import sys, torch
from datetime import timedelta
from weft.kernels.symmetric.memory import SymmetricMemoryError
from weft.kernels.symmetric.shared import SharedHome
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = torch.distributed.FileStore(path, size)
store.set_timeout(timedelta(seconds=60))
home = SharedHome(store, rank, size)
"""

WRITE_TO_PEERS = """
import ctypes
tensor = home.zeros("x", (size, 3), torch.int32)
for peer, address in enumerate(tensor.addresses.tolist()):
    for i in range(3):
        ctypes.c_int32.from_address(address + 4 * (3 * rank + i)).value = 100 * rank + i
home.barrier()
print(tensor.local.tolist())
home.close()
"""


def start(tmp_path: Path, size: int, body: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", PRELUDE + body]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    outputs = []
    for process in processes:
        out, error = process.communicate(timeout=400)
        assert process.returncode == 0, error
        outputs.append(out.strip())
    return outputs


@pytest.mark.parametrize("size", [1, 3])
def test_what_a_rank_stores_at_a_peers_address_is_there(tmp_path: Path, size: int) -> None:
    expected = str([[100 * rank + i for i in range(3)] for rank in range(size)])
    assert finish(start(tmp_path, size, WRITE_TO_PEERS)) == [expected] * size


def test_a_second_home_of_a_store_hears_nothing_of_the_first(tmp_path: Path) -> None:
    body = """
home.exchange(f"first {rank}")
home.close()
if rank == 0:
    store.set_timeout(timedelta(seconds=1))
    try:
        print(SharedHome(store, rank, size).exchange("second 0"))
    except SymmetricMemoryError as error:
        print(error)
"""
    first, _ = finish(start(tmp_path, 2, body))
    assert "rank 0 waited for rank 1" in first


def test_ranks_that_disagree_are_told_alike(tmp_path: Path) -> None:
    body = """
try:
    home.empty("x", (2,), torch.int32 if rank else torch.float32)
except SymmetricMemoryError as error:
    print(error)
"""
    first, second = finish(start(tmp_path, 2, body))
    assert first == second
    assert "float32" in first
    assert "int32" in first


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    body = """
if rank == 0:
    store.set_timeout(timedelta(seconds=1))
    try:
        home.barrier()
    except SymmetricMemoryError as error:
        print(error)
"""
    first, _ = finish(start(tmp_path, 2, body))
    assert "rank 0 waited for rank 1" in first
    assert "1 s" in first


def test_a_killed_rank_leaves_nothing_behind(tmp_path: Path) -> None:
    body = """
tensor = home.zeros("x", (1 << 20,), torch.int32)
home.barrier()
print("ready", flush=True)
import time
time.sleep(600)
"""
    with shared_memory_left_alone():
        processes = start(tmp_path, 2, body)
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            maps = Path(f"/proc/{processes[0].pid}/maps").read_text()
            assert "memfd:weft-1" in maps  # rank 0 maps what rank 1 made
        finally:
            for process in processes:
                process.kill()
                process.communicate()
