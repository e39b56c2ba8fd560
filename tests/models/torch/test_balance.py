"""Experts move between ranks while a model runs, and its tokens stay the same."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.split import (
    BLOCK,
    BLOCKS,
    INTERPRETED_DECODES,
    generate,
    running,
    steps,
    take_port,
    together,
)

os.environ["TRITON_INTERPRET"] = "1"

from weft.kernels.gpu.experts.placement import Placement, balanced, doubled, even
from weft.models.checkpoint.locate import read_spec
from weft.models.spec.layout import Layout
from weft.models.torch import balance
from weft.models.torch.balance import Move, arranged, most_rows, moves_between
from weft.models.torch.gpu_model import GpuModel
from weft.models.torch.group import ALONE, make_groups, meet
from weft.models.torch.runner import TorchRunner

EXPERTS, RANKS, REDUNDANT = 8, 2, 2


def skewed_checkpoint(path: Path) -> Path:
    """A model in which each token chooses experts 0 and 2, or 1 and 3."""
    path = make_checkpoint(path, "qwen3_moe", norm_topk_prob=True)
    weights = load_file(path / "model.safetensors")
    for name, router in weights.items():
        if name.endswith("mlp.gate.weight"):
            first = 50 * router[0]
            router[:4] = torch.stack([first, -first, 0.9 * first, -0.9 * first])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def be_rank(rank: int, path: Path, pipe: Connection) -> None:
    """A process: run the steps, and send the tokens and what became of the experts."""
    torch.set_num_threads(1)
    store = meet(rank, RANKS, lambda own: take_port(own, pipe), timeout=60)
    from weft.kernels.interpreter.gpu import installed
    from weft.kernels.symmetric.shared import SharedHome

    # The rows of the first step are read before the third; the layers move before the next two.
    balance.INTERVAL, balance.READ_AFTER, balance.FEWEST_ROWS = 2, 1, 0
    layout = Layout(ep=RANKS, rank=rank)
    with ExitStack() as stack:
        stack.enter_context(installed())
        home = stack.enter_context(SharedHome(store, rank, RANKS, "stage"))
        groups = make_groups(layout)
        runner = TorchRunner.load(
            path,
            read_spec(path),
            dtype="float32",
            block_size=BLOCK,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=32,
            layout=layout,
            groups=groups,
            home=home,
            redundant_experts=REDUNDANT,
        )
        runner.allocate_kv_cache(BLOCKS)
        assert runner._graphs is not None
        runner._graphs.record()
        assert isinstance(runner._model, GpuModel)
        placements, rows, tokens = [], [], []
        for step in together(RANKS, rank, INTERPRETED_DECODES + 2):
            output = runner.step(step)
            layers = [experts.tables for experts in runner._model.experts]
            placements.append([layer.placement.slots for layer in layers if layer is not None])
            rows.append(output.expert_rows)
            if len(step.token_ids):
                tokens.append(output.token_ids)
        slots = [
            [weight.numpy().copy() for weight in experts.weights]
            for experts in runner._model.experts
        ]
        pipe.send((placements, rows, np.array(tokens[1:]), slots))
        runner.close()
    torch.distributed.destroy_process_group()


def test_tokens_stay_the_same_when_experts_move(tmp_path: Path) -> None:
    path = skewed_checkpoint(tmp_path)
    with running(RANKS, be_rank, path) as pipes:
        results = [pipe.recv() for pipe in pipes]
    first = doubled(even(EXPERTS, RANKS), REDUNDANT // RANKS)
    weights = load_file(path / "model.safetensors")
    for rank, (placements, rows, tokens, slots) in enumerate(results):
        expected, _, _ = generate(
            *(path, "float32", Layout(), ALONE), inputs=steps(rank, INTERPRETED_DECODES + 2)
        )
        assert (tokens == expected).all()
        assert placements == results[0][0]
        assert placements[:3] == [[first.slots] * 2] * 3
        for slots_of_layer in placements[-1]:  # the first rank had all experts in use
            assert not {0, 1, 2, 3} <= {*slots_of_layer[: len(slots_of_layer) // RANKS]}
        busiest, mean = np.sum(rows, axis=0)
        assert 1.5 * mean < busiest <= 2 * mean
        for layer, of_layer in enumerate(slots):
            own = Placement(tuple(placements[-1][layer]), RANKS).experts(rank)
            for name, found in zip(("gate", "up", "down"), of_layer, strict=True):
                for slot, expert in enumerate(own):
                    key = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                    assert (found[slot] == weights[key].numpy()).all(), (layer, name, slot)


@given(st.lists(st.integers(0, 99), min_size=4, max_size=12), st.integers(0, 2), st.data())
def test_experts_keep_their_slots_where_they_can(loads: list[int], spare: int, data: Any) -> None:
    size = 2 + len(loads) % 3
    each = -(-len(loads) // size) + spare
    other = data.draw(st.permutations(loads))
    old, new = balanced(other, size, each), balanced(loads, size, each)
    placed = arranged(old, new)
    held = list(old.slots)
    assert most_rows(loads, placed) == pytest.approx(most_rows(loads, new))
    for rank in range(size):
        assert sorted(placed.experts(rank)) == sorted(new.experts(rank))
        kept = Counter(old.experts(rank)) & Counter(new.experts(rank))
        same = zip(old.experts(rank), placed.experts(rank), strict=True)
        assert sum(a == b for a, b in same) >= len(kept)
    for move in moves_between(old, placed):
        expert = old.slots[move.source * each + move.source_slot]
        assert expert != held[move.rank * each + move.slot]
        held[move.rank * each + move.slot] = expert
    assert held == list(placed.slots)


def test_a_rank_copies_from_itself_if_it_can_and_else_from_several() -> None:
    old = Placement((0, 1, 0, 2, 3, 3), 3)
    new = Placement((0, 0, 0, 2, 3, 1), 3)
    assert moves_between(old, new) == [Move(0, 0, 0, 1), Move(0, 1, 2, 1)]
    new = Placement((3, 1, 0, 2, 3, 0), 3)
    assert moves_between(old, new) == [Move(2, 0, 0, 0), Move(0, 0, 2, 1)]


def test_the_busiest_rank_has_its_share_of_each_expert() -> None:
    assert most_rows([90, 10, 20], Placement((0, 1, 0, 2), 2)) == 45 + 20


class Nobody:
    """A group and a workspace that must not be used."""

    size = RANKS

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize(
    ("rows", "moves"),
    [
        ([[64, 64, 64], [64, 64, 64]], False),  # even
        ([[90, 10, 10], [9, 10, 10]], False),  # too few
        ([[70, 70, 70], [60, 65, 65]], False),  # nearly even
        ([[900, 100, 100], [90, 100, 100]], True),
    ],
)
def test_experts_move_only_if_it_pays(rows: list[list[int]], moves: bool) -> None:
    balancer = balance.Balancer.__new__(balance.Balancer)
    balancer._tables = [balance.Tables(Placement((0, 1, 2, 3, 4, 3), 2), torch.device("cpu"))]
    balancer._group = balancer._workspace = Nobody()  # type: ignore[assignment]
    balancer._slots, balancer._taken, balancer._moved = 3, (0.0, 0.0), 0
    if moves:
        with pytest.raises(AssertionError, match="move"):
            balancer._balance(0, rows)
    else:
        balancer._balance(0, rows)
    assert balancer._moved == moves
    assert balancer.take() == (max(map(sum, rows)), sum(map(sum, rows)) / 2)
    assert balancer.take() == (0.0, 0.0)
