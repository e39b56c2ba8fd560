"""Encrypted connections: an eavesdropper's view, large messages, slow peers, and endings."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from support.mock_ranks import batch, failure_of
from support.nodes import TOKEN, listening, pretended
from support.recorder import Recorder, recorder

from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import NodeSlice
from weft.serving.executor.loading import ModelInfo
from weft.serving.executor.nodes import curve
from weft.serving.executor.nodes import link as link_module
from weft.serving.executor.nodes.curve import Context
from weft.serving.executor.nodes.link import ENDED, LINGER, Link
from weft.serving.executor.nodes.messages import (
    FromAgent,
    Hello,
    Knock,
    NodeStep,
    Pong,
    RankMessage,
    Refused,
    ToAgent,
    Welcome,
    versions,
)
from weft.serving.executor.nodes.remote import RemoteNode
from weft.serving.executor.placement import Inventory
from weft.serving.executor.rank_messages import Loaded, encode_step, encoder
from weft.serving.executor.ranks import RankExecutor

PROMPT = np.arange(1000, 1064, dtype=np.int32)
HELLO = Hello("node1", "127.0.0.1", Inventory())


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(LINGER)


def wait_for(link: Link[Any]) -> Any:
    message = link.wait(60)
    assert message is not None
    return message


def exchange(stack: ExitStack, context: Context) -> Recorder:
    """Send a step through a recorder, and get an answer; return the recorder."""
    keys = curve.derive_keys(TOKEN)
    head: Link[FromAgent]
    head, port = Link.listen(context, "127.0.0.1", keys, FromAgent, 30.0)
    stack.callback(head.close)
    tape = stack.enter_context(recorder(port))
    node: Link[ToAgent] = Link.dial(context, zmq.PAIR, "127.0.0.1", tape.port, keys, ToAgent, 30.0)
    stack.callback(node.close)
    node.send(HELLO)
    assert wait_for(head) == HELLO
    step = msgspec.structs.replace(batch(0, tokens=64), token_ids=PROMPT)
    head.send(NodeStep(encode_step((step,))))
    assert PROMPT.tobytes() in wait_for(node).data
    node.send(RankMessage(0, b"the answer of the model"))
    assert isinstance(wait_for(head), RankMessage)
    return tape


def test_a_recording_contains_no_plaintext(context: Context) -> None:
    with ExitStack() as stack:
        authenticator = curve.authenticate(context, curve.derive_keys(TOKEN))
        stack.callback(authenticator.stop)
        tape = exchange(stack, context)
    assert len(tape.answered) > PROMPT.nbytes
    recorded = bytes(tape.sent + tape.answered)
    for secret in (PROMPT.tobytes(), b"the answer of the model", b"node1", TOKEN.encode()):
        assert secret not in recorded
    keys = curve.derive_keys(TOKEN)
    for pair in keys:
        assert zmq.utils.z85.decode(pair.secret) not in recorded
    assert zmq.utils.z85.decode(keys.head.public) not in recorded


def test_a_recording_without_curve_contains_everything(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without encryption, the recorder sees the messages."""
    for name in ("use_as_head", "use_as_node"):
        monkeypatch.setattr(link_module, name, lambda socket, keys: None)
    with ExitStack() as stack:
        tape = exchange(stack, context)
    assert PROMPT.tobytes() in tape.answered
    assert b"the answer of the model" in tape.sent


def test_replayed_bytes_are_refused(context: Context, caplog: pytest.LogCaptureFixture) -> None:
    with listening(EngineConfig()) as listener:
        with recorder(listener.port) as tape:
            keys = curve.derive_keys(TOKEN)
            node: Link[Welcome | Refused] = Link.dial(
                context, zmq.DEALER, "127.0.0.1", tape.port, keys, Welcome | Refused
            )
            node.send(Knock("node1", versions()))
            answer = None
            while answer is None:
                assert listener.wait_for(1, 0.05) == []
                answer = node.wait(0.05)
            assert isinstance(answer, Welcome)
            node.close()
        listener.accept()
        waiting = len(listener.sockets)
        assert "rejected a connection" not in caplog.text
        with socket.create_connection(("127.0.0.1", listener.port)) as replayed:
            replayed.sendall(tape.sent)
            deadline = time.monotonic() + 60
            while "rejected a connection: it does not know --node-token" not in caplog.text:
                assert listener.wait_for(1, 0.05) == []
                assert time.monotonic() < deadline
        assert len(listener.sockets) <= waiting, "no new node has knocked"


def test_large_messages_arrive_whole_and_in_order() -> None:
    with listening(EngineConfig()) as listener, pretended(listener, HELLO) as (joined, node):
        large = np.random.default_rng(0).bytes(64 << 20)
        for data in (b"first", large, b"last"):
            joined.link.send(NodeStep(data))
        assert [wait_for(node).data for _ in range(3)] == [b"first", large, b"last"]


def test_messages_before_the_end_are_received() -> None:
    with listening(EngineConfig()) as listener, pretended(listener, HELLO) as (joined, node):
        for number in range(100):
            node.send(RankMessage(number, bytes(10_000)))
        node.close()
        assert [wait_for(joined.link).rank for _ in range(100)] == list(range(100))
        assert joined.link.wait(60) is None
        assert joined.link.has_ended
        with pytest.raises(ConnectionError, match=ENDED):
            joined.link.send(Pong())


def test_strangers_at_a_nodes_own_port_do_not_end_its_connection() -> None:
    with listening(EngineConfig()) as listener, pretended(listener, HELLO) as (joined, node):
        port = link_module.port_of(joined.link.sockets[0])
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(words)
                with suppress(OSError):  # the node may have hung up already
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1 << 16):
                        pass
        assert joined.link.wait(0.5) is None
        assert not joined.link.has_ended
        node.send(Pong())
        assert wait_for(joined.link) == Pong()


def test_a_peer_that_does_not_read_is_reported_and_its_queue_is_bounded() -> None:
    config = EngineConfig(stall_timeout=2.0)
    with listening(EngineConfig()) as listener, pretended(listener, HELLO) as (joined, agent):
        part = NodeSlice(1, (0,))
        node = RemoteNode(
            joined, config, part, range(1), 1, rendezvous_host="127.0.0.1", patience=600.0
        )
        agent.send(RankMessage(0, encoder.encode(Loaded(ModelInfo(8, 16, 1000, 64, "none", 1)))))
        executor = RankExecutor(config, [node])
        for step in range(4000):  # the executor itself would stop far earlier; see `has_room`
            node.put(step, bytes(16_000))
        failure = str(failure_of(executor))
        assert "node1 at 127.0.0.1 is lost, with rank 0" in failure
        assert failure.endswith("it does not read its messages")
        executor.close()
