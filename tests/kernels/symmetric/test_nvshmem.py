"""NVSHMEM: versions, errors about mismatches, and kernels that link its bitcode.

The library itself needs GPUs. A stand-in plays its Python interface here. It shows that the home
calls the library in the right order and passes addresses on unchanged. The real library, where
NVIDIA's wheel is installed, shows that the bitcode links and compiles.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from weft.kernels.symmetric import nvshmem
from weft.kernels.symmetric.memory import SymmetricMemoryError

HEADER = """
#define NVSHMEM_VENDOR_MAJOR_VERSION 3
#define NVSHMEM_VENDOR_MINOR_VERSION 8
#define NVSHMEM_VENDOR_PATCH_VERSION 0
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NVIDIA's wheel, as on disk."""
    folder = tmp_path / "nvidia" / "nvshmem"
    (folder / "include" / "non_abi").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "include" / "non_abi" / "nvshmem_version.h").write_text(HEADER)
    for arch in (75, 90, 100):
        (folder / "lib" / f"libnvshmem_device_sm_{arch}.bc").touch()
    monkeypatch.setattr(nvshmem, "library_folder", lambda: folder)
    return folder


class Library:
    """Stands in for nvshmem4py on one rank: records all calls.

    Memory is the CPU's; ranks on other nodes, two to a node, have no address.
    """

    def __init__(self, version: str = "3.8.0") -> None:
        self.version = version
        self.asked: list[str] = []
        self.unique = b""

    def modules(self) -> dict[str, ModuleType]:
        names = ("nvshmem", "nvshmem.core", "nvshmem.bindings", "cuda.core")
        package, core, bindings, device = map(ModuleType, names)
        core.get_version = lambda: SimpleNamespace(libnvshmem_version=self.version)  # type: ignore[attr-defined]
        core.get_unique_id = self.get_unique_id  # type: ignore[attr-defined]
        core.init = self.init  # type: ignore[attr-defined]
        core.buffer = self.buffer  # type: ignore[attr-defined]
        core.free = lambda buffer: self.asked.append(f"free {len(buffer)}")  # type: ignore[attr-defined]
        core.finalize = lambda: self.asked.append("finalize")  # type: ignore[attr-defined]
        core.Teams = SimpleNamespace(TEAM_WORLD=0)  # type: ignore[attr-defined]
        bindings.ptr = lambda address, rank: address + rank if rank // 2 == self.node else 0  # type: ignore[attr-defined]
        bindings.mc_ptr = lambda team, address: 0  # type: ignore[attr-defined]
        device.Device = lambda index: SimpleNamespace(  # type: ignore[attr-defined]
            index=index, set_current=lambda: self.asked.append(f"device {index}")
        )
        package.core, package.bindings = core, bindings  # type: ignore[attr-defined]
        return {
            "nvshmem": package,
            "nvshmem.core": core,
            "nvshmem.bindings": bindings,
            "cuda": ModuleType("cuda"),
            "cuda.core": device,
        }

    def get_unique_id(self, empty: bool = False) -> Any:
        kind = np.dtype([("version", np.int32), ("internal", np.int8, (124,))])
        data = np.zeros(1, kind).view(np.recarray)
        if not empty:
            data.view(np.uint8)[...] = np.arange(128) + 100
        return SimpleNamespace(_data=data)

    def init(self, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str) -> None:
        self.node = rank // 2
        self.unique = uid._data.tobytes()
        self.asked.append(f"init {device.index} {rank}/{nranks} {initializer_method}")

    def buffer(self, nbytes: int) -> torch.Tensor:
        self.asked.append(f"buffer {nbytes}")
        return torch.zeros(nbytes, dtype=torch.int8)  # torch takes it through DLPack


def install(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    for name, module in library.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(nvshmem, "find_spec", lambda name: object())


def store() -> torch.distributed.Store:
    shared = torch.distributed.HashStore()
    shared.set_timeout(timedelta(seconds=20))
    return shared


# Versions.


def test_the_same_version_is_accepted(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library("3.8.0"))
    assert nvshmem.check_versions() == "3.8.0"


@pytest.mark.parametrize("host", ["3.8.1", "3.4.5", "2.8.0"])
def test_another_host_library_is_refused(
    host: str, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Library(host))
    with pytest.raises(SymmetricMemoryError) as error:
        nvshmem.check_versions()
    message = str(error.value)
    assert f"host library is {host} and its device code is 3.8.0" in message
    assert str(wheel) in message


def test_a_header_that_says_no_version_is_named(wheel: Path) -> None:
    header = wheel / "include" / "non_abi" / "nvshmem_version.h"
    header.write_text(HEADER.replace("VENDOR_MINOR", "VENDOR_MINIMAL"))
    with pytest.raises(SymmetricMemoryError, match="does not say NVSHMEM_VENDOR_MINOR_VERSION"):
        nvshmem.device_version()
    header.unlink()
    with pytest.raises(SymmetricMemoryError, match=r"nvshmem_version\.h: No such file"):
        nvshmem.device_version()


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "find_spec", lambda name: None)
    with pytest.raises(SymmetricMemoryError, match=r"nvshmem4py is not installed; pip install"):
        nvshmem.check_versions()
    with pytest.raises(SymmetricMemoryError, match="NVSHMEM wheel is not installed"):
        nvshmem.library_folder()


def test_the_bitcode_is_the_devices(wheel: Path) -> None:
    assert nvshmem.bitcode(9, 0) == wheel / "lib" / "libnvshmem_device_sm_90.bc"
    with pytest.raises(SymmetricMemoryError, match="sm_120; it supports sm_75, sm_90, sm_100"):
        nvshmem.bitcode(12, 0)
    (wheel / "lib" / "libnvshmem_device.bc").touch()
    assert nvshmem.bitcode(12, 0) == wheel / "lib" / "libnvshmem_device.bc"


# The home.


def home(shared: torch.distributed.Store, rank: int, size: int) -> nvshmem.NvshmemHome:
    return nvshmem.NvshmemHome(shared, rank, size, torch.device("cpu"))


def test_a_home_of_one_rank(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    install(monkeypatch, library)
    with home(store(), 0, 1) as alone:
        x = alone.zeros("x", (3, 5), torch.int32)
        assert x.local.tolist() == [[0] * 5] * 3
        assert x.addresses.tolist() == [x.local.data_ptr()]
        assert x.multicast == 0
    assert library.asked == [
        "device None",
        "init None 0/1 uid",
        "buffer 256",
        "free 256",
        "finalize",
    ]


def test_memory_is_left_to_the_process_after_an_error(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    install(monkeypatch, library)
    alone = home(store(), 0, 1)

    def work() -> None:
        with alone:
            alone.empty("x", (1,), torch.int32)
            raise ValueError("work")

    with pytest.raises(ValueError, match="work"):
        work()
    assert library.asked == ["device None", "init None 0/1 uid", "buffer 256"]
    with pytest.raises(SymmetricMemoryError, match="after its release"):
        alone.barrier()


def test_all_ranks_get_the_first_ones_id_and_far_peers_have_no_address(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, two to a node; they are threads, so that one library stands in for all."""
    lock = threading.local()
    libraries = [Library() for _ in range(4)]

    class Dispatch(Library):
        def get_unique_id(self, empty: bool = False) -> Any:
            return libraries[lock.rank].get_unique_id(empty)

        def init(self, *args: Any, **options: Any) -> None:
            libraries[lock.rank].init(*args, **options)

        @property
        def node(self) -> int:
            return lock.rank // 2

    install(monkeypatch, Dispatch())
    shared, tables = store(), {}

    def work(rank: int) -> None:
        lock.rank = rank
        with home(shared, rank, 4) as mine:
            x = mine.empty("x", (2,), torch.float32)
            tables[rank] = (x.local.data_ptr(), x.addresses.tolist())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {library.unique for library in libraries} == {bytes(range(100, 228))}
    for rank, (own, table) in tables.items():
        near = [peer // 2 == rank // 2 for peer in range(4)]
        assert table == [own + peer if is_near else 0 for peer, is_near in enumerate(near)]


def test_versions_that_differ_between_ranks_are_an_error_on_all(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Library())
    rank = threading.local()
    versions = ["3.8.0", "3.7.0", ""]

    def check() -> str:
        if not versions[rank.number]:
            raise SymmetricMemoryError("nvshmem4py is not installed")
        return versions[rank.number]

    monkeypatch.setattr(nvshmem, "check_versions", check)
    shared, messages = store(), []

    def work(number: int) -> None:
        rank.number = number
        with pytest.raises(SymmetricMemoryError) as error:
            home(shared, number, 3)
        messages.append(str(error.value))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert "rank 0: 3.8.0; rank 1: 3.7.0; rank 2: error: nvshmem4py is not" in messages[0]


# The bitcode.

COMPILE = """
import json, re
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weft.kernels.gpu.runtime import nvshmem

@triton.jit
def send_and_wait(x, signal, fault, numel, rank, world, call):
    address = signal.to(tl.int64)
    nvshmem.put_signal(
        x.to(tl.int64), x.to(tl.int64), numel.to(tl.int64) * 4, address, call.to(tl.int64),
        (rank + 1) % world,
    )
    nvshmem.wait(address, call.to(tl.int64), rank, 0, fault, 1000)

@triton.jit
def send(x, numel, rank):
    nvshmem.put(x.to(tl.int64), x.to(tl.int64), numel.to(tl.int64) * 4, rank)

pointers = {"x": "*fp32", "signal": "*i64", "fault": "*i32"}
for kernel in (send, send_and_wait):
    types = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    binary = triton.compile(
        ASTSource(fn=kernel, signature=types, constexprs={}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "extern_libs": nvshmem.extern_libs(9, 0)},
    )
    ptx = binary.asm["ptx"]
    body = ptx[ptx.index(".entry " + kernel.__name__):]
    print(json.dumps({
        "name": kernel.__name__,
        "state": nvshmem.STATE.decode() in ptx,
        "missing": re.findall(r"\\.extern \\.func[^;]*?(\\w+)\\s*\\(\\s*(?:\\.param|\\))", ptx),
        "barrier": "bar.sync" in body,
        "reads_signals": "ld.volatile" in body,
        "faults": body.count("st.global.b32"),
        "machine_code": len(binary.asm["cubin"]) > 0,
    }))
"""


DRIVER_HAS = {"__assertfail", "vprintf"}
"""Functions in every GPU driver."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_link_the_bitcode_for_sm_90(tmp_path: Path) -> None:
    """No NVSHMEM function is left to be found when the kernel is loaded."""
    try:
        nvshmem.bitcode(9, 0)
    except SymmetricMemoryError as error:
        pytest.skip(str(error))
    path = tmp_path / "compile.py"
    path.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["send", "send_and_wait"]
    for row in rows:
        assert set(row["missing"]) <= DRIVER_HAS, row
        assert row["state"], row
        assert row["barrier"], row
        assert row["reads_signals"], row
        assert row["machine_code"], row
    assert rows[1]["faults"] == 4  # what `wait` writes when it gives up: it is not folded away
