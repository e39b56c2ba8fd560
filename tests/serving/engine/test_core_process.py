"""What each of several engine cores is given of the machine; how a thread ends."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

from weft.errors import ConfigError
from weft.serving.config.settings import EngineConfig, Replica
from weft.serving.config.slices import NodeSlice
from weft.serving.engine.core_client import CoreClient
from weft.serving.engine.core_process import share_out
from weft.serving.executor.loading import LoadedModel, Progress, load_model
from weft.serving.executor.nodes.inventory import own_inventory
from weft.serving.executor.placement import Inventory
from weft.serving.executor.ranks import import_path


def test_one_core_has_everything() -> None:
    (share,) = share_out(EngineConfig(), [Inventory(memory=1001)])
    assert share.replica == Replica(slice=(NodeSlice(0, (0,)),))


def test_cores_share_threads_memory_and_devices() -> None:
    shares = share_out(EngineConfig(dp=4, tp=2, threads=9), [Inventory(memory=1001)])
    assert [share.replica for share in shares] == [
        Replica(n, 250, 4, (NodeSlice(0, (2 * n, 2 * n + 1), 4),)) for n in range(4)
    ]


def test_cores_on_other_machines_leave_this_one_to_the_rest() -> None:
    here, there = share_out(EngineConfig(dp=2, nodes=2), [Inventory(memory=1001)] * 2)
    assert here.replica == Replica(0, None, 1, (NodeSlice(0, (0,)),))
    assert there.replica == Replica(1, None, 1, (NodeSlice(1, (0,)),))


def test_interpreted_kernels_are_on_one_machine() -> None:
    config = EngineConfig(tp=2, nodes=2, kernels="overlapped")
    with pytest.raises(ConfigError, match="with --kernels overlapped all ranks of an engine must"):
        share_out(config, [Inventory()] * 2)
    for share in share_out(replace(config, dp=2), [Inventory()] * 2):
        assert len(share.replica.slice) == 1
    (share,) = share_out(replace(config, backend="jax"), [Inventory(tpus=(2**30,))] * 2)
    assert len(share.replica.slice) == 2, "TPUs have links"


def test_the_first_of_several_shows_what_each_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("weft.models.memory.available.available_memory", lambda: 2**28)
    model = str(make_checkpoint(tmp_path, "qwen3"))
    config = EngineConfig(model, dp=2, max_num_seqs=2, max_num_batched_tokens=64)
    for share in share_out(config, [own_inventory(config)]):
        loaded = load_model(share, lambda done, total: None)
        loaded.runner.close()
    assert caplog.text.count("memory of each of 2 engine cores: KV cache ") == 1
    assert "of the 102.4 MiB that weft may take" in caplog.text
    assert "to run several, set --kv-cache-memory" not in caplog.text


def test_a_cache_of_all_the_memory_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("weft.models.memory.available.available_memory", lambda: 2**26)
    model = str(make_checkpoint(tmp_path, "qwen3"))
    config = EngineConfig(model, device="cpu", max_num_seqs=1000, max_num_batched_tokens=64)
    for settings, announced in ((config, 1), (replace(config, kv_cache_memory=2**20), 1)):
        load_model(settings, lambda done, total: None).runner.close()
        assert caplog.text.count("to run several, set --kv-cache-memory") == announced


told = threading.Event()


def refuse_when_told(config: EngineConfig, progress: Progress) -> LoadedModel:
    told.wait()
    raise ConfigError("--model is not to my liking")


@pytest.mark.parametrize("left_behind", [False, True])
async def test_the_context_of_a_thread_ends_with_it(left_behind: bool) -> None:
    told.clear()
    client = CoreClient(EngineConfig(model="none"))
    await client.spawn(import_path(refuse_when_told), in_process=True)
    if not left_behind:
        told.set()
        with pytest.raises(ConfigError, match="--model is not to my liking"):
            await client.load(lambda port: None)
        assert client._core is not None
        await client._core.ended
        assert not client._context.closed, "messages may have to be read"
    await client.close()
    if left_behind:
        assert not client._context.closed, "the thread has sockets"
        told.set()
    async with asyncio.timeout(60):
        while not client._context.closed:
            await asyncio.sleep(0.01)
