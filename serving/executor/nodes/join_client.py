"""Joining a controller: the node's side of join_listener.py."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass

import msgspec
import zmq

from weft.errors import ConfigError
from weft.serving.executor.nodes.curve import HANDSHAKE_TIMEOUT, Context, Keys
from weft.serving.executor.nodes.link import HandshakeError, Link
from weft.serving.executor.nodes.messages import Knock, Refused, ToAgent, Welcome, versions

MAX_REFUSALS = 2
"""Handshakes in a row that the controller ends before they fail, until its token counts as another.

ZeroMQ does not tell a wrong token from a controller that is about to end.
"""

RETRY_PAUSE = 1.0
"""Seconds between two attempts to join."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinClient:
    """Client for a controller's join ports; see link.py for the messages.

    Attributes:
        context: owner of all sockets.
        host: the controller's address.
        keys: the group's keys.
        name: this node's name.
    """

    context: Context
    host: str
    keys: Keys
    name: str

    def join_as_soon_as_possible(self, port: int) -> Link[ToAgent]:
        """Join as soon as the controller listens; log the failures until then.

        Raises:
            ConfigError: see `join`.
        """
        logged, refusals = "", 0
        while True:
            try:
                return self.join(port)
            except HandshakeError as error:
                reason = str(error.strerror)
                refusals += 1
                if refusals == MAX_REFUSALS:
                    raise ConfigError(
                        f"{self.host}:{port}: --node-token is not the token of that server"
                    ) from None
            except OSError as error:
                reason = str(error.strerror or error)
                refusals = 0
            if reason != logged:
                logger.info("waiting for %s:%d: %s", self.host, port, logged := reason)
            time.sleep(RETRY_PAUSE)

    def join(self, port: int) -> Link[ToAgent]:
        """Knock at a join port, and connect to the controller's new port for this node.

        Raises:
            OSError: nobody answers there.
            ConfigError: the controller refuses this node, has another token, or is not weft.
        """
        try:
            knocking: Link[Welcome | Refused] = Link.dial(
                self.context, zmq.DEALER, self.host, port, self.keys, Welcome | Refused
            )
            with closing(knocking):
                knocking.send(Knock(self.name, versions()))
                answer = knocking.wait(HANDSHAKE_TIMEOUT)
            match answer:
                case Welcome(own_port, patience):
                    return Link.dial(
                        self.context, zmq.PAIR, self.host, own_port, self.keys, ToAgent, patience
                    )
                case None:
                    raise TimeoutError(0, "it does not answer")
        except ConfigError as error:
            raise ConfigError(f"{self.host}:{port}: {error}") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.host}:{port}: it sent an invalid message: {error}") from None
        raise ConfigError(answer.reason)
