"""Overlapped exchanges on one rank; test_split.py has several."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.split import BLOCK, BLOCKS, generate, steps, together

os.environ["TRITON_INTERPRET"] = "1"

from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import run
from weft.kernels.gpu.experts.dispatch_two_level import TwoLevelExpertWorkspace
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.costs import Config, device_named
from weft.kernels.gpu.tuning.products import Way, predicted, three_ways
from weft.kernels.gpu.tuning.table import Entry, key_of
from weft.kernels.interpreter.gpu import installed
from weft.kernels.symmetric.counting import CountingHome
from weft.kernels.symmetric.memory import Home
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.spec.layout import Layout
from weft.models.torch.crossover import products_of
from weft.models.torch.gpu_model import GpuModel
from weft.models.torch.group import ALONE
from weft.models.torch.overlapped import Overlapped, token_limits
from weft.models.torch.runner import TorchRunner


def test_a_wait_that_has_run_out_fails_the_step(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    spec = read_spec(path)
    with installed():
        runner = TorchRunner.load(
            path,
            spec,
            dtype="float32",
            block_size=4,
            max_num_seqs=1,
            max_num_batched_tokens=16,
            max_model_len=16,
            home=VirtualHome(VirtualWorld(1), 0),
        )
        runner.allocate_kv_cache(1)
        runner.warm_up()
        assert isinstance(runner._model, GpuModel)
        home = VirtualHome(VirtualWorld(1), 0)
        made = Overlapped(home, None, spec, Layout(), torch.float32, 16)
        runner._model.exchange = made
        runner.warm_up()
        made.faults()[-1][:] = torch.tensor([0, 3, 7, 6])
        with pytest.raises(KernelError, match="rank 0 gave up waiting for its signal 3 to reach 7"):
            runner.warm_up()
        runner.warm_up()


def test_experts_beyond_nvlink_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Two nodes with two ranks each; their network delays and reorders what it can."""
    path = make_checkpoint(tmp_path, "qwen3_moe", norm_topk_prob=True, num_hidden_layers=1)
    spec, decodes = read_spec(path), 1
    races = RaceDetector()

    def work(home: Home) -> list[list[int]]:
        assert home.ranks_per_node == 2
        runner = TorchRunner.load(
            path,
            spec,
            dtype="float32",
            block_size=BLOCK,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            max_model_len=32,
            layout=Layout(ep=4, rank=home.rank),
            home=home,
            cuda_graphs=False,
        )
        runner.allocate_kv_cache(BLOCKS)
        assert isinstance(runner._model, GpuModel)
        exchange = runner._model.exchange
        assert isinstance(exchange, Overlapped)
        assert isinstance(exchange.dispatch, TwoLevelExpertWorkspace)
        assert exchange.dispatch.far
        ran = [(step, runner.step(step)) for step in together(4, home.rank, decodes)]
        return [output.token_ids.tolist() for step, output in ran if len(step.token_ids)][1:]

    found = run(work, 4, seed=3, races=races, ranks_per_node=2)
    assert races.findings == []
    for rank, tokens in enumerate(found):
        expected, _, _ = generate(*(path, "float32", Layout(), ALONE), inputs=steps(rank, decodes))
        assert tokens == expected.tolist()


def test_norms_over_all_heads_take_symmetric_memory(tmp_path: Path) -> None:
    """Of all ranks, for the squares of all tokens; other models have no such workspace."""
    spec, taken = read_spec(make_checkpoint(tmp_path, "minimax_m2")), []
    without = replace(
        spec,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, q_norm=None, k_norm=None))
            for layer in spec.layers
        ),
    )
    for model in (without, spec):
        home = CountingHome(2)
        made = Overlapped(home, None, model, Layout(tp=2), torch.float32, 1001)
        taken.append((len(made.workspaces), home.nbytes))
    (count, nbytes), (more, in_all) = taken
    assert more == count + 1
    assert in_all - nbytes > 2 * 2 * 1001 * 2 * 4  # slots, ranks, tokens, norms, float32


GPU = "NVIDIA H100 80GB HBM3"


def ways_of(model: str, size: int) -> tuple[Way, Way, Way]:
    """The ways of a layer's products, also of its experts."""
    products = products_of(Layout(size).local(read_spec(locate(model))))
    assert len(products.expert_begins) == len(products.expert_ends) == ("moe" in model)
    return three_ways(size, *products)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", ["weft-demo", "weft-demo-moe"])
def test_the_limits_are_where_the_cost_model_says(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    model: str,
    size: int,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local = Layout(size).local(read_spec(locate(model)))
    with caplog.at_level("DEBUG", "weft.models.torch.overlapped"):
        limits = token_limits(CountingHome(size, GPU), local, torch.bfloat16, 1 << 16)
    device = device_named(GPU)
    sizes = [16 << power for power in range(13)]
    costs = [
        [predicted(way, rows, "bfloat16", device) for way in ways_of(model, size)] for rows in sizes
    ]
    totals = {
        (few, most): sum(
            one[(rows > few) + (rows > most)] for rows, one in zip(sizes, costs, strict=True)
        )
        for few, most in combinations_with_replacement((1, *sizes), 2)
    }
    assert totals[limits] == pytest.approx(min(totals.values()))
    assert limits.replicated < sizes[-1]
    begins = f"up to {limits.replicated} tokens are on all GPUs, and up to {limits.fused}, products"
    assert caplog.messages[-1].startswith(f"{begins} send their sums; predicted: with ")


def test_the_tuning_file_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table = {}
    for way, slow_from in zip(ways_of("weft-demo", 2), (32, 64, 1 << 30), strict=True):
        for rows in (16, 32, 64):
            for problem in (each for one in way for each in one.problems(rows, "bfloat16")):
                key = key_of(problem, GPU)
                fields = {field: getattr(key, field) for field in key.__struct_fields__}
                fixed = {("all_gather_matmul", 1): 4.0, ("all_gather_matmul", 2): 9.0}
                slow = 9.0 if rows >= slow_from else 4.0
                microseconds = fixed.get((problem.op, problem.world_size), slow)
                table[key] = Entry(
                    **fields, config=Config("push", 16, 16, 16), microseconds=microseconds
                )
    tuned.record(tuned.default_path(), table)
    local = Layout(2).local(read_spec(locate("weft-demo")))
    limits = token_limits(CountingHome(2, GPU), local, torch.bfloat16, 1 << 16)
    assert limits == (16, 32)
