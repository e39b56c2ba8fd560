"""Several hosts on one machine: network namespaces that are joined by a switch (a bridge)."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


class Network:
    """Hosts at 10.77.0.1 and so on, each with a cable to a switch.

    Attributes:
        switch: a host, too, at 10.77.0.254.
    """

    def __init__(self) -> None:
        self._hosts: list[Host] = []
        self._name = f"weft-{secrets.token_hex(4)}"
        self.switch = Host(f"{self._name}-switch", "10.77.0.254")

    def open(self) -> None:
        """Make the switch, a bridge."""
        _ip("netns", "add", self.switch.name)
        _ip("-n", self.switch.name, "link", "add", "weft0", "type", "bridge")
        _set_up(self.switch)

    def add(self) -> Host:
        """Another host."""
        number = len(self._hosts) + 1
        host, port = Host(f"{self._name}-{number}", f"10.77.0.{number}"), f"port{number}"
        self._hosts.append(host)
        _ip("netns", "add", host.name)
        peer = ("peer", "name", port, "netns", self.switch.name)
        _ip("-n", host.name, "link", "add", "weft0", "type", "veth", *peer)
        _ip("-n", self.switch.name, "link", "set", port, "master", "weft0", "up")
        _set_up(host)
        return host

    def close(self) -> None:
        """Undo it."""
        with ExitStack() as stack:  # all of them, whatever one of them says
            for host in (self.switch, *self._hosts):
                if (Path("/run/netns") / host.name).exists():
                    stack.callback(_ip, "netns", "delete", host.name)


def _set_up(host: Host) -> None:
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "weft0")
    _ip("-n", host.name, "link", "set", "weft0", "up")
    _ip("-n", host.name, "link", "set", "lo", "up")


@contextmanager
def network() -> Iterator[Network]:
    """Skips the test where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("several hosts on one machine need the command `ip`")
    made = Network()
    try:
        try:
            made.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made
    finally:
        made.close()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where namespaces cannot be made."""
    with network() as made:
        yield made.add(), made.add()
