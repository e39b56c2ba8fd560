"""The join port: accepted and rejected connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.clock import Clock
from support.nodes import TOKEN, agent

from weft.errors import ConfigError
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.nodes import join_listener as listener_module
from weft.serving.executor.nodes.join_listener import MAX_PENDING, JoinListener
from weft.serving.executor.nodes.link import (
    HANDSHAKE_TIMEOUT,
    MAGIC,
    check_address,
    check_token,
    prove_token,
)
from weft.serving.executor.nodes.messages import (
    versions,
)


@pytest.fixture
def listener() -> Iterator[JoinListener]:
    with JoinListener(EngineConfig(node_port=0, node_token=TOKEN)) as listener:
        yield listener


def wait_until_rejected(
    listener: JoinListener, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    deadline = time.monotonic() + 60
    while caplog.text.count("rejected ") < count:
        assert listener.wait_for(1, timeout=0.05) == []
        assert time.monotonic() < deadline


def test_a_node_without_the_token_is_rejected(
    listener: JoinListener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with agent(listener.port, tmp_path / "bad", token="another token, guessed") as bad:
        wait_until_rejected(listener, 1, caplog)
        assert bad.wait(60) == 1
    with agent(listener.port, tmp_path / "good", name="good"):
        (joined,) = listener.wait_for(1)
        assert joined.hello.name == "good"
        joined.link.close()
    assert "--node-token is not the token of that server" in (tmp_path / "bad").read_text()
    assert "rejected 127.0.0.1: it does not know --node-token" in caplog.text


def test_a_listener_that_does_not_know_the_token_is_not_obeyed(tmp_path: Path) -> None:
    """A joining node runs nothing for an unknown listener."""
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
    assert "--node-token is not the token" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64)])
def test_strangers_are_not_let_in(
    words: bytes, listener: JoinListener, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        wait_until_rejected(listener, 1, caplog)
        answer = stranger.makefile("rb").read()
    assert len(answer) == len(MAGIC) + 32 + 32 * (len(words) == 64)
    assert answer[44:] in (b"", bytes(32))


def test_strangers_keep_no_node_from_joining(
    listener: JoinListener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some are silent, some incomplete. Each has the same time, or less if there are too many."""
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            for _ in range(MAX_PENDING)
        ]
        silent[1].sendall(bytes(40))
        stack.enter_context(agent(listener.port, tmp_path / "log"))
        (joined,) = listener.wait_for(1)
        joined.link.close()
        assert "rejected 127.0.0.1: too many others have connected" in caplog.text
        assert caplog.text.count("rejected") == 1, "the others are not waited for"
        clock = Clock()
        clock.paused = HANDSHAKE_TIMEOUT
        monkeypatch.setattr(listener_module, "time", clock)
        assert listener.accept() is None
    late = "rejected 127.0.0.1: it did not prove in time that it knows --node-token"
    assert caplog.text.count(late) == MAX_PENDING - 1


@pytest.mark.parametrize(
    ("magic", "why"),
    [
        (b"weft-join-1\n", "weft there speaks weft-join-1, and here weft-join-3: install the same"),
        (b"SSH-2.0-Open", "the server there is not `weft` waiting for nodes"),
    ],
)
def test_a_listener_of_another_protocol_is_not_joined(
    magic: bytes, why: str, tmp_path: Path
) -> None:
    """For example an older weft."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(magic + bytes(32))
        with pytest.raises(ConfigError, match=why):
            prove_token(ours, TOKEN)


def test_a_node_with_other_versions_is_refused(
    listener: JoinListener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener_module, "versions", lambda: versions() | {"torch": "1.0"})
    with agent(listener.port, tmp_path / "log", name="old") as joining:
        wait_until_rejected(listener, 1, caplog)
        assert joining.wait(60) == 1
    log = (tmp_path / "log").read_text()
    assert "this node cannot join: torch is 1.0 there and " in log


def test_a_node_that_leaves_before_all_are_there_is_forgotten(
    listener: JoinListener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def wait_until(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        waiting = pool.submit(listener.wait_for, 2)
        with agent(listener.port, tmp_path / "log1", name="node1"):
            wait_until("node1 at 127.0.0.1 has joined")
        wait_until("node1 at 127.0.0.1 has left")
        for name in ("node2", "node3"):
            stack.enter_context(agent(listener.port, tmp_path / name, name=name))
        joined = waiting.result(60)
    assert sorted(each.hello.name for each in joined) == ["node2", "node3"]
    for each in joined:
        each.link.close()


def test_a_listener_makes_a_token_and_says_what_to_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with JoinListener(EngineConfig(node_port=0)) as made:
        made.log_join_command(2)
        assert len(made.token) >= 32
        assert f"2 other nodes to run: WEFT_NODE_TOKEN={made.token} weft join " in caplog.text
        assert f":{made.port}" in caplog.text
    caplog.clear()
    with JoinListener(EngineConfig(node_port=0, node_token=TOKEN)) as given:
        given.log_join_command(1)
    assert "another node to run: weft join " in caplog.text
    assert TOKEN not in caplog.text


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="--node-token has 6 characters; it must have at least"):
        check_token("secret")
    with pytest.raises(ConfigError, match="--node-token has 6 characters"):
        JoinListener(EngineConfig(node_token="secret"))
    check_token(None)
    check_address("::1")


def test_a_port_or_an_address_that_is_not_to_be_had_is_named(listener: JoinListener) -> None:
    with pytest.raises(ConfigError, match=f"--node-port {listener.port}: Address already in use"):
        JoinListener(EngineConfig(node_port=listener.port))
    elsewhere = EngineConfig(node_port=0, node_address="192.0.2.1")  # RFC 5737: nobody's
    with pytest.raises(ConfigError, match=r"--node-address 192.0.2.1 .*: Cannot assign requested"):
        JoinListener(elsewhere)
