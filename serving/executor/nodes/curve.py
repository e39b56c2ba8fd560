"""Keys and options for the ZeroMQ sockets between nodes.

The sockets use CURVE (CurveZMQ, RFC 26): both sides prove possession of their keys, and everything
afterwards is encrypted. Each connection has its own temporary keys, so a recording can neither be
replayed nor be decrypted later. Both sides derive two key pairs from the group's token: one for the
head, one for the joining nodes. Only the token needs to be distributed.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import cache
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from weft.errors import ConfigError
from weft.serving.config.settings import EngineConfig

HANDSHAKE_TIMEOUT = 5.0
"""Seconds for the other side to prove that it knows the token, and to introduce itself."""

MAX_PATIENCE = 100_000.0
"""Maximum patience in seconds. A quarter of it fits TCP's limit for keepalive times, 32,767."""

TOKEN_LENGTH = 16
"""Minimum characters in a token. Whoever sees a handshake can test guesses against it."""

WORK = 2**14
"""Cost of a guess: scrypt's N. With r = 8, deriving the keys takes 16 MiB and some 50 ms."""

DOMAIN = "weft"
"""ZAP domain: makes libzmq ask the authenticator about each client key (ZeroMQ RFC 27)."""

Context = zmq.Context[zmq.Socket[bytes]]


class KeyPair(NamedTuple):
    """A Curve25519 key pair in Z85, ZeroMQ's text form for keys."""

    public: bytes
    secret: bytes


class Keys(NamedTuple):
    """Key pairs derived from a token: one for the head, one for all joining nodes."""

    head: KeyPair
    node: KeyPair


def check_curve() -> None:
    """Raise ConfigError if libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} has no CURVE, which --nodes and weft join need: install "
            "a wheel with `pip install --force-reinstall --only-binary :all: pyzmq`"
        )


def read_token(config: EngineConfig) -> str | None:
    """Return the group's token from node_token or node_token_file; None if there is none.

    Raises:
        ConfigError: both are set, the file cannot be read, or the token could be guessed.
    """
    token, flag = config.node_token, "--node-token"
    if config.node_token_file is not None:
        flag = f"--node-token-file {config.node_token_file}"
        if token is not None:
            raise ConfigError(f"{flag} and --node-token are both set: leave one out")
        try:
            token = Path(config.node_token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"{flag}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{flag} is not text") from None
    if token is not None and len(token) < TOKEN_LENGTH:
        raise ConfigError(
            f"{flag} has {len(token)} characters; it must have at least {TOKEN_LENGTH}"
        )
    return token


@cache
def derive_keys(token: str) -> Keys:
    """Derive the key pairs from the group's token with scrypt (RFC 7914)."""
    secret = hashlib.scrypt(token.encode(), salt=b"weft nodes", n=WORK, r=8, p=1, dklen=64)
    return Keys(*(_key_pair(z85.encode(half)) for half in (secret[:32], secret[32:])))


def _key_pair(secret: bytes) -> KeyPair:
    return KeyPair(zmq.curve_public(secret), secret)


def authenticate(context: Context, keys: Keys) -> ThreadAuthenticator:
    """Start the thread that authenticates nodes for the sockets of a context."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(DOMAIN, _OnlyNodes(keys.node.public))
    return authenticator


class _OnlyNodes:
    """Credentials provider for a ThreadAuthenticator."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client has the nodes' key."""
        return hmac.compare_digest(key, self._public)


def make_socket(context: Context, kind: int, patience: float) -> zmq.Socket[bytes]:
    """Create a socket; after `patience` silent seconds, its connection counts as lost.

    TCP keepalive detects a node that vanishes without closing the connection. A lost connection is
    not opened again.
    """
    patience = min(patience, MAX_PATIENCE)
    probe = max(1, round(patience / 4))
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_TIMEOUT))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, probe)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, probe)
    socket.setsockopt(zmq.TCP_MAXRT, round(1000 * patience))  # TCP_USER_TIMEOUT
    return socket


def use_as_head(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let the socket accept nodes with the token; needs `authenticate`."""
    socket.curve_secretkey = keys.head.secret
    socket.curve_server = True
    socket.zap_domain = DOMAIN.encode()


def use_as_node(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let the socket connect to a head with the token."""
    socket.curve_publickey, socket.curve_secretkey = keys.node
    socket.curve_serverkey = keys.head.public
