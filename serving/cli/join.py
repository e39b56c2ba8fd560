"""`weft join`: this node's devices, lent to a server that was started with `--nodes`."""

from __future__ import annotations

import logging
import signal

import click

from weft.errors import ConfigError
from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.settings import EngineConfig
from weft.serving.config.sources import Settings

logger = logging.getLogger(__name__)


@click.command(cls=TopicCommand)
@click.argument("server", metavar="HOST:PORT")
@click.option("--once", is_flag=True, help="exit when that server ends, instead of waiting again")
@takes(EngineConfig, only=("node_address", "node_token", "node_token_file", "node_ranks"))
def join(settings: Settings, server: str, once: bool) -> int:
    """Lend this machine to a server that was started with --nodes.

    HOST:PORT is the server's address and its --node-port. The command waits for the server, runs
    the ranks that the server assigns to this machine, and waits again after the server has ended.
    SIGTERM or an interrupt end the ranks and the command; it then exits with 0.

    Both machines need the same token. Set it in WEFT_NODE_TOKEN or with --node-token-file to keep
    it out of `ps`.

    \b
    WEFT_NODE_TOKEN=... weft serve MODEL --tp 4 --nodes 2     on one machine, 10.0.0.1
    WEFT_NODE_TOKEN=... weft join 10.0.0.1:7333               on the other one
    """
    return run(settings.build(EngineConfig), server, once=once)


def run(config: EngineConfig, server: str, *, once: bool) -> int:
    """Lend this node to a server until a signal comes.

    Args:
        config: this node's node_address, node_ranks and token.
        server: HOST:PORT where the server listens for nodes.
        once: return when the server has ended.

    Returns:
        0, after a signal, or with `once` after the server's end.

    Raises:
        ConfigError: a value is invalid, or the server refuses this node.
        EngineError: the connection was lost, with `once`.
    """
    from weft.serving.cli.doctor import examine_machine
    from weft.serving.executor.nodes.agent import join
    from weft.serving.executor.nodes.curve import check_curve, read_token
    from weft.serving.executor.nodes.link import check_address

    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"HOST:PORT is {server!r}; it must be such as 10.0.0.1:7333")
    check_curve()
    if (token := read_token(config)) is None:
        raise ConfigError(
            "--node-token, WEFT_NODE_TOKEN or --node-token-file is missing; it must be the server's"
        )
    check_address(config.node_address)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Without a handler, the kernel drops SIGTERM for the first process of a container. Shells make
    # background processes ignore SIGINT.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        join(
            host.strip("[]"),
            int(port),
            token,
            address=config.node_address,
            once=once,
            node_ranks=config.node_ranks,
            examine=examine_machine,
        )
    except KeyboardInterrupt:
        logger.info("left %s", server)
    return 0
