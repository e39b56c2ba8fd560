"""`weft doctor --nodes N`: what is found on the other machines, and between them.

They run `weft join`, as for serving; each looks at itself (doctor.py), and then at its way to
each of the others. No model is loaded.
"""

from __future__ import annotations

import dataclasses
import logging
from contextlib import suppress

from weft.errors import ConfigError
from weft.serving.cli.doctor import devices
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.nodes.inventory import own_inventory
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.messages import (
    CheckResults,
    End,
    Finding,
    LinkSpeed,
    RunChecks,
    Unreachable,
    differences,
    versions,
)
from weft.serving.executor.nodes.multi_node_executor import (
    check_addresses,
    check_nodes,
    own_address,
)
from weft.serving.executor.nodes.probe import measure_links
from weft.serving.executor.nodes.remote import JoinedNode

JOIN = 60.0
"""Seconds for the machines to join."""

EXAMINE = 120.0
"""Seconds for a machine to look at itself."""

SEND = 0.3
"""Seconds to send for on each way."""

SLOW = 1e9
"""Bytes a second, below which the layers of a model should not be split over a way."""


def examine_others(config: EngineConfig) -> list[Finding]:
    """What is found on the machines that join, and on the ways between all.

    Raises:
        ConfigError: they cannot take part with these settings.
    """
    if config.executor == "ray":
        raise ConfigError(
            "--executor is ray; weft doctor looks at machines that run weft join, without Ray: "
            "leave --executor out, and run that on them for as long as it looks"
        )
    check_nodes(config)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with JoinListener(config, strict=False) as head:
        head.log_join_command(config.nodes - 1)
        others = head.wait_for(config.nodes - 1, JOIN)
    try:
        missing = config.nodes - 1 - len(others)
        there = ", ".join(["this one", *(joined.where for joined in others)])
        if missing:
            advice = f"{missing} more must run weft join, and reach --node-port {head.port} here"
            return [Finding("machines", "fail", there, advice)]
        found = [Finding("machines", "ok", there)]
        own = own_address(config, others)
        check_addresses([own, *(joined.hello.address for joined in others)])
        for source, target, way in measure_links(own, others, head.token, SEND):
            found.append(_way(source, target, way))
        offers = [own_inventory(config), *(joined.hello.inventory for joined in others)]
        found += devices(config, offers)
        for joined in others:
            found += _machine(config, joined)
        return found
    finally:
        for joined in others:
            with suppress(OSError):  # it has left
                joined.link.send(End(0.0))
            joined.link.close()


def _way(source: str, target: str, way: LinkSpeed | Unreachable) -> Finding:
    between = f"{source} to {target}"
    if isinstance(way, Unreachable):
        advice = "open all ports between the machines, or give each its --node-address"
        return Finding("link", "fail", f"{between}: {way.reason}", advice)
    seen = f"{between}: {way.bandwidth / 1e9:.2f} GB/s, {1e6 * way.round_trip:.0f} us to and fro"
    if way.bandwidth < SLOW:
        advice = "slow for --tp and --ep: let each stage of --pp be on one machine"
        return Finding("link", "warn", seen, advice)
    return Finding("link", "ok", seen)


def _machine(config: EngineConfig, joined: JoinedNode) -> list[Finding]:
    where = joined.where
    if wrong := differences(versions(), joined.hello.versions):
        advice = "install the same versions on all machines"
        found = [Finding("versions", "fail", "; ".join(wrong), advice)]
    else:
        same = ", ".join(f"{name} {number}" for name, number in versions().items())
        found = [Finding("versions", "ok", f"{same} as here")]
    asked = dataclasses.replace(config, node_token=None)
    with suppress(OSError):
        joined.link.send(RunChecks(asked))
        match joined.link.wait(EXAMINE):
            case CheckResults(findings):
                found += findings
                return [dataclasses.replace(finding, machine=where) for finding in found]
    advice = "see the log of weft join there"
    found.append(Finding("machine", "fail", "it does not answer", advice))
    return [dataclasses.replace(finding, machine=where) for finding in found]
