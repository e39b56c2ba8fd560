"""The join port: accepted and rejected connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq
from support.nodes import TOKEN, agent, listening, pretended

from weft.errors import ConfigError
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.nodes import curve
from weft.serving.executor.nodes import join_listener as listener_module
from weft.serving.executor.nodes.curve import Context, check_curve
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.link import LINGER, Link, check_address
from weft.serving.executor.nodes.messages import Hello, Knock, Refused, Welcome, versions
from weft.serving.executor.placement import Inventory


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(LINGER)


@pytest.fixture
def listener() -> Iterator[JoinListener]:
    with listening(EngineConfig()) as listener:
        yield listener


def wait_until_rejected(
    listener: JoinListener, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Listen until `count` connections have been rejected."""
    deadline = time.monotonic() + 60
    while caplog.text.count("rejected ") < count:
        assert listener.wait_for(1, timeout=0.05) == []
        assert time.monotonic() < deadline


def test_a_node_with_another_token_is_rejected(
    listener: JoinListener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with agent(listener.port, tmp_path / "bad", token="another token, guessed") as bad:
        wait_until_rejected(listener, 2, caplog)
        assert bad.wait(60) == 1
    with agent(listener.port, tmp_path / "good", name="good"):
        (joined,) = listener.wait_for(1)
        assert joined.hello.name == "good"
        joined.link.close()
    refused = f"127.0.0.1:{listener.port}: --node-token is not the token of that server"
    assert (tmp_path / "bad").read_text().splitlines()[-1] == f"weft: error: {refused}"
    assert caplog.text.count("rejected a connection: it does not know --node-token") == 2


def test_a_listener_with_another_token_is_not_obeyed(tmp_path: Path) -> None:
    """A joining node sends nothing to an unknown listener, not even its name."""
    config = EngineConfig(node_port=0, node_token="the token of a stranger")
    context: Context = zmq.Context()
    try:
        with (
            JoinListener(context, config) as stranger,
            agent(stranger.port, tmp_path / "log") as joining,
        ):
            while joining.poll() is None:
                assert stranger.wait_for(1, 0.05) == []
    finally:
        context.destroy(LINGER)
    assert joining.returncode == 1
    assert "--node-token is not the token" in (tmp_path / "log").read_text()


ZMTP_1, ZMTP_2 = b"\x01\x00" * 40, b"\xff" + bytes(8) + b"\x7f\x01\x05" + bytes(60)
"""Greetings of old versions of ZeroMQ's protocol, which had no encryption."""


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64), b"weft-join-3\n", ZMTP_1, ZMTP_2],
)
def test_strangers_are_not_let_in(
    words: bytes, listener: JoinListener, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(words)
        with suppress(OSError):  # the listener has hung up already
            stranger.shutdown(socket.SHUT_WR)
        wait_until_rejected(listener, 1, caplog)
    assert "rejected a connection: it " in caplog.text


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.PAIR])
def test_plain_zeromq_is_not_let_in(
    kind: int, listener: JoinListener, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    with context.socket(kind) as stranger:
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        stranger.connect(f"tcp://127.0.0.1:{listener.port}")
        stranger.send(b"let me in")
        wait_until_rejected(listener, 1, caplog)
        stranger.linger = 0


def test_a_client_with_another_key_is_not_let_in(
    listener: JoinListener, context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    """Knowing the listener's public key is not enough."""
    keys = curve.derive_keys(TOKEN)
    own = curve.KeyPair(*zmq.curve_keypair())
    with curve.make_socket(context, zmq.DEALER, 30.0) as stranger:
        curve.use_as_node(stranger, keys._replace(node=own))
        stranger.connect(f"tcp://127.0.0.1:{listener.port}")
        wait_until_rejected(listener, 1, caplog)
    assert "rejected a connection: it does not know --node-token" in caplog.text


STRANGERS = 65


@contextmanager
def strangers(port: int) -> Iterator[None]:
    """Connect often, and say nothing or half a greeting."""
    with ExitStack() as stack:
        connected = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(STRANGERS)
        ]
        connected[1].sendall(b"\xff" + bytes(8) + b"\x7f\x03")
        yield


def test_strangers_keep_no_node_from_joining(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(curve, "HANDSHAKE_TIMEOUT", 600.0)
    hello = Hello("node1", "127.0.0.1", Inventory())
    with (
        listening(EngineConfig()) as listener,
        strangers(listener.port),
        pretended(listener, hello) as (joined, _),
    ):
        assert joined.hello == hello
    assert "rejected" not in caplog.text, "they have not been waited for"


def test_strangers_are_rejected_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(curve, "HANDSHAKE_TIMEOUT", 0.5)
    with listening(EngineConfig()) as listener, strangers(listener.port):
        wait_until_rejected(listener, STRANGERS, caplog)
    late = "rejected a connection: it did not prove in time that it knows --node-token"
    assert caplog.text.count(late) == STRANGERS


def test_too_many_strangers_end_the_oldest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They cannot take all descriptors of this process, and a node still joins."""
    monkeypatch.setattr(curve, "HANDSHAKE_TIMEOUT", 600.0)
    monkeypatch.setattr(listener_module, "MAX_STRANGERS", 8)
    hello = Hello("node1", "127.0.0.1", Inventory())
    with listening(EngineConfig()) as listener, ExitStack() as stack:
        address = "127.0.0.1", listener.port
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        wait_until_rejected(listener, 12, caplog)
        assert [_is_open(each) for each in silent] == [False] * 12 + [True] * 8
        assert caplog.text.count("ended a connection: over 8 have not joined yet") == 12
        assert stack.enter_context(pretended(listener, hello))[0].hello == hello


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(64):  # the listener's greeting
            pass
    except BlockingIOError:
        return True
    return False


def test_a_node_that_knocks_and_does_not_come_is_forgotten(
    listener: JoinListener,
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_TIMEOUT", 0.05)
    link: Link[Welcome | Refused] = Link.dial(
        context, zmq.DEALER, "127.0.0.1", listener.port, curve.derive_keys(TOKEN), Welcome | Refused
    )
    link.send(Knock("absent-minded", versions()))
    wait_until_rejected(listener, 1, caplog)
    assert isinstance(link.wait(60), Welcome)
    link.close()
    assert "rejected absent-minded: it did not introduce itself in time" in caplog.text


@pytest.mark.parametrize(
    ("knock", "why"),
    [
        (b"nonsense", "rejected a node: "),
        (msgspec.msgpack.encode({"type": "Knock", "name": "x"}), "missing required field"),
    ],
)
def test_a_knock_in_other_words_is_rejected(
    knock: bytes,
    why: str,
    listener: JoinListener,
    context: Context,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with curve.make_socket(context, zmq.DEALER, 30.0) as node:
        curve.use_as_node(node, curve.derive_keys(TOKEN))
        node.connect(f"tcp://127.0.0.1:{listener.port}")
        node.send(knock)
        wait_until_rejected(listener, 1, caplog)
    assert why in caplog.text


@pytest.mark.parametrize("words", [b"weft-join-3\n" + bytes(32), b"SSH-2.0-OpenSSH\r\n", ZMTP_2])
def test_a_listener_of_another_protocol_is_not_joined(words: bytes, tmp_path: Path) -> None:
    """For example an older weft."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        agent(port := listener.getsockname()[1], tmp_path / "log") as joining,
    ):
        peer, _ = listener.accept()
        with peer:
            peer.sendall(words)
            assert joining.wait(60) == 1
    why = f"127.0.0.1:{port}: the server there is not this version of weft with --nodes"
    assert why in (tmp_path / "log").read_text()


def test_a_listener_that_is_silent_or_away_is_awaited(tmp_path: Path) -> None:
    def wait_until(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with agent(port, log):
            wait_until(f"waiting for 127.0.0.1:{port}: it does not answer")
    with agent(port, log):
        wait_until(f"waiting for 127.0.0.1:{port}: nothing accepts connections there")


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
    caplog.set_level("DEBUG", "weft.serving.executor.nodes.join_listener")

    def wait_until(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        waiting = pool.submit(listener.wait_for, 2)
        with agent(listener.port, tmp_path / "log1", name="node1"):
            wait_until("node1 at 127.0.0.1 has connected")
        wait_until("node1 at 127.0.0.1 has hung up")
        for name in ("node2", "node3"):
            stack.enter_context(agent(listener.port, tmp_path / name, name=name))
        joined = waiting.result(60)
    assert sorted(each.hello.name for each in joined) == ["node2", "node3"]
    for each in joined:
        each.link.close()


def test_a_listener_makes_a_token_and_says_what_to_run(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with JoinListener(context, EngineConfig(node_port=0)) as made:
        made.log_join_command(2)
        assert len(made.token) >= 32
        assert f"2 other nodes to run: WEFT_NODE_TOKEN={made.token} weft join " in caplog.text
        assert f":{made.port}" in caplog.text
    caplog.clear()
    with listening(EngineConfig()) as given:
        given.log_join_command(1)
    assert "another node to run: weft join " in caplog.text
    assert TOKEN not in caplog.text


def test_a_short_token_is_refused(context: Context) -> None:
    with pytest.raises(ConfigError, match="--node-token has 6 characters; it must have at least"):
        JoinListener(context, EngineConfig(node_token="secret"))
    check_address("::1")


def test_a_token_comes_from_a_file(context: Context, tmp_path: Path) -> None:
    file = tmp_path / "token"
    config = EngineConfig(node_port=0, node_token_file=str(file))
    with pytest.raises(ConfigError, match=f"--node-token-file {file}: No such file or directory"):
        JoinListener(context, config)
    for content, why in (
        (b"short\n", " has 5 characters; it must"),
        (b"\xff" * 20, " is not text"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"--node-token-file {file}{why}"):
            JoinListener(context, config)
    file.write_text(TOKEN + "\n")
    with JoinListener(context, config) as listener:
        assert listener.token == TOKEN
    with pytest.raises(ConfigError, match="--node-token are both set: leave one out"):
        JoinListener(context, replace(config, node_token=TOKEN))


def test_a_libzmq_without_curve_is_refused(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_curve()
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(
        ConfigError, match=r"libzmq [\d.]+ has no CURVE, which --nodes and weft join"
    ):
        JoinListener(context, EngineConfig())


def test_a_port_in_use_is_named(listener: JoinListener, context: Context) -> None:
    with pytest.raises(ConfigError, match=f"--node-port {listener.port}: Address already in use"):
        JoinListener(context, EngineConfig(node_port=listener.port))


def test_an_address_of_another_machine_is_named(context: Context) -> None:
    elsewhere = EngineConfig(node_port=0, node_address="192.0.2.1")  # RFC 5737: nobody's
    with pytest.raises(ConfigError, match=r"--node-address 192.0.2.1 .*: Cannot assign requested"):
        JoinListener(context, elsewhere)
