"""`weft join`: lends this machine to a server that was started with `--nodes`."""

from __future__ import annotations

import logging
import signal

from weft.errors import ConfigError
from weft.serving.cli.doctor import examine_machine
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.nodes.agent import join
from weft.serving.executor.nodes.link import check_address, check_token

logger = logging.getLogger(__name__)


def run(config: EngineConfig, head: str, *, once: bool) -> int:
    """Lend this machine to `head`; see `join`.

    Args:
        config: node_address, node_token and node_ranks of it.
        head: HOST:PORT.

    Returns:
        0 when it was told to end, or with `once` the head has ended.

    Raises:
        ConfigError: as `join`, or what is given cannot be.
        EngineError: as `join`.
    """
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"HOST:PORT is {head!r}; it must be such as 10.0.0.1:7333")
    if config.node_token is None:
        raise ConfigError("--node-token or WEFT_NODE_TOKEN is missing; the head prints it")
    check_token(config.node_token)
    check_address(config.node_address)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # The kernel drops them for the first process of a container, unless there is a handler; shells
    # have what they run in the background ignore the second.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        join(
            host.strip("[]"),
            int(port),
            config.node_token,
            address=config.node_address,
            once=once,
            node_ranks=config.node_ranks,
            examine=examine_machine,
        )
    except KeyboardInterrupt:
        logger.info("left %s", head)
    return 0
