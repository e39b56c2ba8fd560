"""The core's end of the sockets when the front's is gone."""

from __future__ import annotations

import pytest
import zmq

from weft.errors import EngineError
from weft.serving.engine.core_channel import CoreChannel, addresses
from weft.serving.executor.child_process import Failed

BASE = "inproc://test-channel"


@pytest.mark.timeout(20)
def test_a_core_whose_front_is_gone_ends() -> None:
    def fail_unheard(
        front: list[zmq.Socket[bytes]], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        with CoreChannel(context, BASE) as channel:
            channel.send(Failed("EngineError", "heard"))
            assert b"heard" in front[1].recv()
            for socket in front:
                socket.close(linger=0)
            try:
                while True:  # a socket closes in its own time
                    channel.send(Failed("EngineError", "not heard"))
            except EngineError as error:
                raise ValueError("the cause") from error

    with zmq.Context() as context:
        front = [context.socket(kind) for kind in (zmq.PUSH, zmq.PULL)]
        for socket, address in zip(front, addresses(BASE), strict=True):
            socket.bind(address)
        with pytest.raises(ValueError, match="the cause") as error:
            fail_unheard(front, context)
        assert "no longer listens" in str(error.value.__cause__)
