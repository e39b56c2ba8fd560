"""Two hosts on one machine: network namespaces that are joined by a cable (a veth pair)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one interface, `weft0`, beside its own loopback."""

    name: str
    address: str

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What this thread connects, and the processes that it starts, are of the host."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(Path("/run/netns") / self.name, os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(here)
            os.close(here)
            os.close(there)

    def cut(self) -> None:
        """Take the cable out: nothing is told to anybody."""
        _ip("-n", self.name, "link", "set", "weft0", "down")


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts on one machine need the command `ip`")
    hosts = [Host(f"weft-{os.getpid()}-{n}", f"10.77.0.{n}") for n in (1, 2)]
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
            first, second = hosts
            peer = ("peer", "name", "weft0", "netns", second.name)
            _ip("-n", first.name, "link", "add", "weft0", "type", "veth", *peer)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "weft0")
            _ip("-n", host.name, "link", "set", "weft0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in hosts:
            if (Path("/run/netns") / host.name).exists():
                _ip("netns", "delete", host.name)
