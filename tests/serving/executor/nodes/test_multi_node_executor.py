"""Ranks on several nodes: steps through agents, and failures that name the node.

The nodes are local processes that join over the loopback interface.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.mock_ranks import batch, failure_of, load
from support.nodes import MOCK, TOKEN, Agent, agent, listening, spread
from support.processes import wait_until_gone

from weft.errors import ConfigError, EngineError
from weft.serving.cli.join import run
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core_process import share_out
from weft.serving.executor.nodes import multi_node_executor
from weft.serving.executor.nodes.messages import (
    Hello,
    differences,
)
from weft.serving.executor.nodes.multi_node_executor import (
    MultiNodeExecutor,
    check_addresses,
    check_nodes,
    own_address,
    start_nodes,
)
from weft.serving.executor.nodes.remote import RINGS_AHEAD, JoinedNode
from weft.serving.executor.placement import Inventory
from weft.serving.executor.ranks import RankExecutor
from weft.serving.executor.step_ring import ring_entries


@pytest.fixture(autouse=True)
def mocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank processes import the mocks."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """Settings with four ranks on two nodes; the ranks note their steps in tmp_path."""
    return EngineConfig(model="none", tokenizer=str(tmp_path), tp=4, nodes=2)


def notes(path: Path, rank: int) -> list[str]:
    return (path / f"rank{rank}").read_text().splitlines()


def ranks_of(process: Agent) -> list[int]:
    return [child.pid for child in psutil.Process(process.pid).children()]


def fail(executor: RankExecutor, steps: int) -> EngineError:
    """Submit at most `steps` steps until one fails; return the error."""
    for step in range(steps):
        if (error := executor.submit((batch(step),)).exception(20)) is not None:
            assert isinstance(error, EngineError)
            return error
    raise AssertionError(f"{steps} steps have not failed")


def test_ranks_of_all_nodes_run_the_same_steps_in_order(
    config: EngineConfig, tmp_path: Path
) -> None:
    with spread(config, tmp_path) as (executor, [joined]):
        assert executor.model.num_blocks == 8
        ranks = ranks_of(joined)
        assert len(ranks) == 2
        pending = [executor.submit((batch(step, tokens=10 + step),)) for step in range(20)]
        for step, each in enumerate(pending):
            (output,) = each.result(60)
            assert output is not None
            assert output.step == step
            assert output.token_ids.tolist() == [100 * step, 100 * step + 1]
    assert joined.returncode == 0
    wait_until_gone(ranks)
    ran = [f"{step} {batch(step, tokens=10 + step).token_ids.sum()}" for step in range(20)]
    for rank in range(4):
        assert notes(tmp_path, rank) == [*ran, "closed"]


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"tp": 5}, [[0, 1], [2, 3], [4]]),
        ({"tp": 5, "devices": "1+1+3"}, [[0], [1], [2, 3, 4]]),
    ],
)
def test_three_nodes_have_the_ranks_of_the_slice(
    settings: dict[str, object], ranks: list[list[int]], config: EngineConfig, tmp_path: Path
) -> None:
    config = replace(config, nodes=3, **settings)  # type: ignore[arg-type]
    with spread(config, tmp_path) as (executor, agents):
        assert [len(ranks_of(each)) for each in agents] == [len(each) for each in ranks[1:]]
        assert executor.submit((batch(0),)).result(60)[0].step == 0
        names = ["", "node1 at 127.0.0.1", "node2 at 127.0.0.1"]
        found = [(node.where, list(node.ranks)) for node in executor._nodes]
        assert found == list(zip(names, ranks, strict=True))


def test_each_rank_is_told_its_device(config: EngineConfig, tmp_path: Path) -> None:
    _, mine = share_out(replace(config, dp=2, devices="2x2"), [Inventory(4), Inventory(8)])
    with (
        listening(config) as listener,
        agent(listener.port, tmp_path / "log"),
    ):
        nodes = {1: listener.wait_for(1)[0]}
        RankExecutor(mine, start_nodes(mine, nodes, MOCK)).close()
    devices = [(tmp_path / f"device{rank}").read_text() for rank in range(4)]
    assert devices == ["2", "3", "2", "3"]


def test_ranks_of_another_node_may_lag_but_not_more_than_its_agent_keeps(
    config: EngineConfig, tmp_path: Path
) -> None:
    ahead = RINGS_AHEAD * ring_entries(1)
    count = 3 * ahead
    with spread(replace(config, model="3 lags in 0"), tmp_path) as (executor, _):
        for step in range(count):  # only rank 0 answers, and it would be far ahead
            executor.submit((batch(step),)).result(60)
            if step >= ahead:
                assert step + 1 - len(notes(tmp_path, 3)) <= ahead
    assert len(notes(tmp_path, 3)) == count + 1
    assert notes(tmp_path, 3) == notes(tmp_path, 0)


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("3 raises", r"rank 3 on node1 at 127.0.0.1 failed in step 4: ValueError\('a bad step'"),
        (
            "2 dies",
            r"rank 2 \(process \d+ on node1 at 127.0.0.1\) was killed by SIGKILL in step 4",
        ),
        ("1 dies", r"rank 1 \(process \d+\) was killed by SIGKILL in step 4"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_node(
    fault: str, how: str, config: EngineConfig, tmp_path: Path
) -> None:
    with spread(replace(config, model=f"{fault} in 3"), tmp_path) as (executor, [joined]):
        ranks = ranks_of(joined)
        with pytest.raises(EngineError, match=how):
            raise fail(executor, 50)
        with pytest.raises(EngineError, match=how):
            executor.submit((batch(99),)).result(0)
        wait_until_gone([*ranks, joined.pid])


def test_what_a_rank_of_another_node_refuses_is_raised(
    config: EngineConfig, tmp_path: Path
) -> None:
    refused = "node1 at 127.0.0.1: --model is not to my liking"
    with (
        pytest.raises(ConfigError, match=refused),
        spread(replace(config, model="2 refuses in 0"), tmp_path),
    ):
        pass


def test_a_node_that_is_lost_is_named_and_ends_all(config: EngineConfig, tmp_path: Path) -> None:
    with spread(config, tmp_path) as (executor, [joined]):
        assert executor.submit((batch(0),)).result(60)[0].step == 0
        ranks = ranks_of(joined)
        joined.kill()
        lost = "node1 at 127.0.0.1 is lost, with rank 2, 3, after step 1: its connection has"
        failure_of(executor)
        with pytest.raises(EngineError, match=lost):
            executor.submit((batch(1),)).result(0)
        wait_until_gone(ranks)
        wait_until_gone(executor._nodes[0].pids)


def test_a_node_that_says_nothing_is_named(config: EngineConfig, tmp_path: Path) -> None:
    with spread(replace(config, stall_timeout=1.6), tmp_path) as (executor, [joined]):
        assert executor.submit((batch(0),)).result(60)[0].step == 0
        joined.send_signal(signal.SIGSTOP)
        failure_of(executor)
        silent = "node1 at 127.0.0.1 is lost, with rank 2, 3, .*: it has said nothing for 0.8 s"
        with pytest.raises(EngineError, match=silent):
            executor.submit((batch(1),)).result(0)
        joined.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_stuck_rank_is_named_wherever_it_is(
    rank: int, config: EngineConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, model=f"{rank} hangs in 1", stall_timeout=1.6)
    with spread(config, tmp_path) as (executor, [joined]):
        assert executor.submit((batch(0),)).result(60)[0].step == 0
        on = " on node1 at 127.0.0.1" if rank == 3 else ""
        stuck = rf"rank {rank} \(process \d+{on}\) is stuck in step 2: "
        for step in range(1, 4):
            executor.submit((batch(step),))
        failure_of(executor)
        with pytest.raises(EngineError, match=stuck):
            executor.submit((batch(4),)).result(0)
    wait_until_gone([joined.pid])
    log = (tmp_path / "node1.log").read_text() if rank == 3 else capfd.readouterr().err
    assert "mock_ranks.py" in log  # where it hangs


def test_a_stopped_rank_of_another_node_is_named(config: EngineConfig, tmp_path: Path) -> None:
    with spread(replace(config, stall_timeout=1.6), tmp_path) as (executor, [joined]):
        assert executor.submit((batch(0),)).result(60)[0].step == 0
        os.kill(ranks_of(joined)[1], signal.SIGSTOP)
        executor.submit((batch(1),))
        failure_of(executor)
        with pytest.raises(EngineError, match=r"rank \d \(process .* on node1 .*\) is stopped"):
            executor.submit((batch(2),)).result(0)


def test_a_node_that_cannot_start_ranks_says_why(config: EngineConfig, tmp_path: Path) -> None:
    with (
        listening(config) as listener,
        agent(listener.port, tmp_path / "log") as joining,
    ):
        nodes = {1: listener.wait_for(1)[0]}
        enough_to_be_probed = psutil.Process(joining.pid).num_fds() + 3
        psutil.Process(joining.pid).rlimit(psutil.RLIMIT_NOFILE, (enough_to_be_probed,) * 2)
        (config,) = share_out(config, [Inventory()] * 2)
        why = r"rank 2 on node1 at 127.0.0.1 failed while loading: OSError\(24, 'Too many open"
        with pytest.raises(EngineError, match=why):
            RankExecutor(config, start_nodes(config, nodes, MOCK))


def test_a_node_that_does_not_connect_is_named(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node_executor, "JOIN_TIMEOUT", 0.01)
    (config,) = share_out(config, [Inventory(), Inventory(where="node1 at 10.0.0.2")])
    with pytest.raises(EngineError) as caught:
        MultiNodeExecutor(config, load, lambda port: None)
    assert str(caught.value) == (
        "node1 at 10.0.0.2, for ranks 2, 3, did not connect to its engine within 0.01 s"
    )


CONTROLLER = """
import sys
from pathlib import Path
from typing import Any
from support.clock import Clock
from support.nodes import spread
from weft.serving.config.settings import EngineConfig, Replica
config = EngineConfig(model="none", tp=2, nodes=2)
with spread(config, Path(sys.argv[1])) as (executor, [joined]):
    print(joined.pid, flush=True)
    sys.stdin.read()
"""


def test_a_node_ends_its_ranks_when_the_controller_is_gone(tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-P", "-c", CONTROLLER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    joined = psutil.Process(int(controller.stdout.readline()))
    ranks = [child.pid for child in joined.children()]
    assert len(ranks) == 1
    controller.kill()
    controller.communicate()
    wait_until_gone([*ranks, joined.pid])
    assert "has hung up" in (tmp_path / "node1.log").read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 2, "nodes": 3}, "--nodes is 3; it must be at most 2, the number of ranks"),
        (
            {"tp": 2, "nodes": 2, "node_address": "localhost"},
            "--node-address is 'localhost'; it must be an IP address of this node",
        ),
    ],
)
def test_what_cannot_be_on_several_nodes_is_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_nodes(EngineConfig(**settings))  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("address", "settings", "message"),
    [
        ("10.0.0.1", {}, "HOST:PORT is '10.0.0.1'; it must be such as 10.0.0.1:7333"),
        ("10.0.0.1:http", {}, "HOST:PORT is '10.0.0.1:http'; it must be such as"),
        ("10.0.0.1:7333", {}, "--node-token, WEFT_NODE_TOKEN or --node-token-file is missing"),
        ("10.0.0.1:7333", {"node_token": "short"}, "--node-token has 5 characters"),
        (
            "10.0.0.1:7333",
            {"node_token": TOKEN, "node_address": "here"},
            "--node-address is 'here'; it must be an IP address",
        ),
    ],
)
def test_what_a_node_cannot_join_with_is_refused(
    address: str, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(EngineConfig(**settings), address, once=True)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


class SeenAt:
    """Stub for a link with an `own_address`."""

    def __init__(self, address: str) -> None:
        self.own_address = address


def test_this_node_is_where_all_others_have_reached_it() -> None:
    hello = Hello("node1", "10.0.0.2", Inventory())
    one, two = (JoinedNode(SeenAt(a), hello, {}) for a in ("10.0.0.1", "10.1.0.1"))  # type: ignore[arg-type]
    config = EngineConfig()
    assert own_address(config, [one, one]) == "10.0.0.1"
    with pytest.raises(ConfigError, match=r"at 10.0.0.1 and 10.1.0.1: set --node-address"):
        own_address(config, [one, two])
    assert own_address(replace(config, node_address="10.2.0.1"), [one, two]) == "10.2.0.1"


def test_loopback_is_for_nodes_that_are_all_one() -> None:
    check_addresses(["127.0.0.1", "127.0.0.1"])
    check_addresses(["10.0.0.1", "10.0.0.2"])
    with pytest.raises(ConfigError, match=r"joined at 127.0.0.1, where 10.0.0.2 cannot reach it"):
        check_addresses(["127.0.0.1", "10.0.0.2"])


def test_versions_that_differ_are_listed() -> None:
    ours = {"weft": "1", "torch": "2"}
    assert differences(ours, dict(ours)) == []
    assert differences(ours, {"weft": "3"}) == [
        "weft is 3 there and 1 here",
        "torch is missing there and 2 here",
    ]
    jax = ours | {"jax": "1"}
    assert differences(ours, jax) == differences(jax, ours) == []
    assert differences(jax, ours | {"jax": "2"}) == ["jax is 2 there and 1 here"]


def test_a_node_that_cannot_be_reached_is_named_before_ranks_are_started(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node_executor, "check_addresses", lambda addresses: None)
    with (
        listening(config) as listener,
        agent(listener.port, tmp_path / "log", address="192.0.2.1"),  # RFC 5737: nobody's
    ):
        (joined,) = listener.wait_for(1)
        (config,) = share_out(config, [Inventory()] * 2)
        with pytest.raises(EngineError) as caught:
            list(start_nodes(config, {1: joined}, MOCK))
    assert "this node cannot reach node1 at " in str(caught.value)
    why = "192.0.2.1 is not available there: Cannot assign requested address"
    assert why in str(caught.value)
