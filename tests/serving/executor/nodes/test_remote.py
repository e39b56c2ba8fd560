"""Messages from another node, over a connection whose other end belongs to the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.mock_ranks import batch, failure_of
from support.nodes import TOKEN, listening, pretended

from weft.errors import EngineError
from weft.serving.config.settings import EngineConfig, Replica
from weft.serving.config.slices import NodeSlice
from weft.serving.executor.child_process import Failed
from weft.serving.executor.loading import ModelInfo
from weft.serving.executor.nodes.link import Link
from weft.serving.executor.nodes.messages import Hello, RankMessage, Start, ToAgent
from weft.serving.executor.nodes.remote import RemoteNode
from weft.serving.executor.placement import Inventory
from weft.serving.executor.rank_messages import Done, Loaded, encoder
from weft.serving.executor.ranks import RankExecutor


@contextmanager
def remote_node(**settings: Any) -> Iterator[tuple[RemoteNode, Link[ToAgent]]]:
    """Create a remote node with one rank; yield it with the agent's end of the connection."""
    hello = Hello("node1", "10.0.0.2", Inventory())
    with listening(EngineConfig()) as listener, pretended(listener, hello) as (joined, agent):
        config, part = EngineConfig(**settings), NodeSlice(1, (0,))
        yield (
            RemoteNode(
                joined, config, part, range(1), 1, rendezvous_host="127.0.0.1", patience=30.0
            ),
            agent,
        )


def test_a_remote_node_measures_its_own_memory() -> None:
    """Start carries neither this node's memory nor the token."""
    with remote_node(replica=Replica(memory=1000, engines=3), node_token=TOKEN) as (_, agent):
        start = agent.wait(60)
        assert isinstance(start, Start)
        assert start.config.replica == Replica(memory=None, engines=1)
        assert start.config.node_token is None


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (b"nonsense", "is lost, with rank 0, while loading: it sent an invalid message: "),
        (
            RankMessage(0, b"nonsense"),
            "failed while loading: it sent an invalid message: ",
        ),
        (
            RankMessage(0, encoder.encode(Done(None))),
            "(node1 at 10.0.0.2) sent an unexpected Done while loading",
        ),
        (
            RankMessage(0, encoder.encode(Failed("EngineError", "no memory"))),
            "rank 0 on node1 at 10.0.0.2 failed while loading: no memory",
        ),
    ],
)
def test_a_nodes_last_message_is_reported_instead_of_its_loss(word: object, why: str) -> None:
    with remote_node() as (node, agent):
        agent.send(word)
        agent.close()
        with pytest.raises(EngineError) as caught:
            RankExecutor(EngineConfig(), [node])
    assert "node1 at 10.0.0.2" in str(caught.value)
    assert why in str(caught.value)


def test_an_answer_that_was_not_asked_for_is_an_error() -> None:
    with remote_node() as (node, agent):
        info = ModelInfo(8, 16, 1000, 64, "none", 1)
        agent.send(RankMessage(0, encoder.encode(Loaded(info))))
        executor = RankExecutor(EngineConfig(), [node])
        assert executor.model == info
        assert executor.check() is None
        agent.send(RankMessage(0, encoder.encode(Done(None))))
        unasked = "rank 0 answers a step that it was not given"
        assert str(failure_of(executor)) == unasked
        with pytest.raises(EngineError, match=unasked):
            executor.submit((batch(0),)).result(0)
        executor.close()
