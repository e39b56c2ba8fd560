"""The port at which machines join: who is let in, and who is not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.clock import Clock
from support.machines import TOKEN, agent

from weft.errors import ConfigError
from weft.serving.config import EngineConfig
from weft.serving.executor import head as head_module
from weft.serving.executor.head import MOST_STRANGERS, Head
from weft.serving.executor.link import (
    HANDSHAKE,
    MAGIC,
    check_address,
    check_token,
    present,
)
from weft.serving.executor.machine_wire import (
    versions,
)


@pytest.fixture
def head() -> Iterator[Head]:
    with Head(EngineConfig(node_port=0, node_token=TOKEN)) as head:
        yield head


def wait_until_turned_away(head: Head, count: int, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 60
    while caplog.text.count("was turned away") < count:
        assert head.wait_for(1, timeout=0.05) == []
        assert time.monotonic() < deadline


def test_who_does_not_know_the_token_is_turned_away(
    head: Head, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with agent(head.port, tmp_path / "bad", token="another token, guessed") as bad:
        wait_until_turned_away(head, 1, caplog)
        assert bad.wait(60) == 1
    with agent(head.port, tmp_path / "good", name="good"):
        (joined,) = head.wait_for(1)
        assert joined.hello.name == "good"
        joined.link.close()
    assert "--node-token is not the one that is in force there" in (tmp_path / "bad").read_text()
    assert "127.0.0.1 was turned away: it does not know --node-token" in caplog.text


def test_a_head_that_does_not_know_the_token_is_not_obeyed(tmp_path: Path) -> None:
    """Whoever listens there: a machine runs nothing for it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        agent(listener.getsockname()[1], tmp_path / "log") as joining,
    ):
        peer, _ = listener.accept()
        with peer:
            peer.sendall(MAGIC + bytes(32))
            assert len(peer.recv(64, socket.MSG_WAITALL)) == 64
            peer.sendall(bytes(32))
            assert joining.wait(60) == 1
    assert "--node-token is not the one" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64)])
def test_strangers_are_not_let_in(
    words: bytes, head: Head, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", head.port)) as stranger:
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        wait_until_turned_away(head, 1, caplog)
        answer = stranger.makefile("rb").read()
    assert len(answer) == len(MAGIC) + 32 + 32 * (len(words) == 64)
    assert answer[44:] in (b"", bytes(32))


def test_strangers_keep_no_machine_from_joining(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some are silent, some have said a part; all have the same time, and too many have less."""
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", head.port)))
            for _ in range(MOST_STRANGERS)
        ]
        silent[1].sendall(bytes(40))
        stack.enter_context(agent(head.port, tmp_path / "log"))
        (joined,) = head.wait_for(1)
        joined.link.close()
        assert "127.0.0.1 was turned away: too many others have connected" in caplog.text
        assert caplog.text.count("turned away") == 1, "the others are not waited for"
        clock = Clock()
        clock.paused = HANDSHAKE
        monkeypatch.setattr(head_module, "time", clock)
        assert head.admit() is None
    late = "127.0.0.1 was turned away: it has not proved in time that it knows --node-token"
    assert caplog.text.count(late) == MOST_STRANGERS - 1


@pytest.mark.parametrize(
    ("magic", "why"),
    [
        (b"weft-join-1\n", "weft there speaks weft-join-1, and here weft-join-2: install the same"),
        (b"SSH-2.0-Open", "what listens there is not `weft` that waits for machines"),
    ],
)
def test_a_head_that_speaks_otherwise_is_not_joined(magic: bytes, why: str, tmp_path: Path) -> None:
    """Such as that of a weft before this one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(magic + bytes(32))
        with pytest.raises(ConfigError, match=why):
            present(ours, TOKEN)


def test_a_machine_with_other_versions_is_refused(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head_module, "versions", lambda: versions() | {"torch": "1.0"})
    with agent(head.port, tmp_path / "log", name="old") as joining:
        wait_until_turned_away(head, 1, caplog)
        assert joining.wait(60) == 1
    log = (tmp_path / "log").read_text()
    assert "this machine cannot take part: torch is 1.0 there and " in log


def test_a_machine_that_leaves_before_all_are_there_is_forgotten(
    head: Head, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def wait_until(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        waiting = pool.submit(head.wait_for, 2)
        with agent(head.port, tmp_path / "log1", name="machine1"):
            wait_until("machine1 at 127.0.0.1 has joined")
        wait_until("machine1 at 127.0.0.1 has left")
        for name in ("machine2", "machine3"):
            stack.enter_context(agent(head.port, tmp_path / name, name=name))
        joined = waiting.result(60)
    assert sorted(each.hello.name for each in joined) == ["machine2", "machine3"]
    for each in joined:
        each.link.close()


def test_a_head_makes_a_token_and_says_what_to_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Head(EngineConfig(node_port=0)) as made:
        made.invite(2)
        assert len(made.token) >= 32
        assert f"2 other machines to run: WEFT_NODE_TOKEN={made.token} weft join " in caplog.text
        assert f":{made.port}" in caplog.text
    caplog.clear()
    with Head(EngineConfig(node_port=0, node_token=TOKEN)) as given:
        given.invite(1)
    assert "another machine to run: weft join " in caplog.text
    assert TOKEN not in caplog.text


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="--node-token has 6 characters; it must have at least"):
        check_token("secret")
    with pytest.raises(ConfigError, match="--node-token has 6 characters"):
        Head(EngineConfig(node_token="secret"))
    check_token(None)
    check_address("::1")


def test_a_port_or_an_address_that_is_not_to_be_had_is_named(head: Head) -> None:
    with pytest.raises(ConfigError, match=f"--node-port {head.port}: Address already in use"):
        Head(EngineConfig(node_port=head.port))
    elsewhere = EngineConfig(node_port=0, node_address="192.0.2.1")  # RFC 5737: nobody's
    with pytest.raises(ConfigError, match=r"--node-address 192.0.2.1 .*: Cannot assign requested"):
        Head(elsewhere)
