"""A step's operators: their bytes and operations equal what real ranks read, send and multiply."""

from __future__ import annotations

import json
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.checkpoints import make_checkpoint
from support.split import generate, running, steps, take_port

from weft.models.checkpoint.locate import read_spec
from weft.models.interface import SlotSampling, StepInput
from weft.models.plan.batch import Batch
from weft.models.plan.step import Exchange, Operator, Precision, RankModel, stages
from weft.models.spec.build import build_spec
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec, Packed
from weft.models.torch.group import make_groups, meet

CASES = {
    "llama, tp 2": ("llama", Layout(tp=2)),
    "llama, tp 4": ("llama", Layout(tp=4)),
    "llama, cp 2": ("llama", Layout(cp=2)),
    "llama, tp 2, cp 2": ("llama", Layout(tp=2, cp=2)),
    "llama, pp 2": ("llama", Layout(pp=2)),
    "qwen3_moe, tp 2": ("qwen3_moe", Layout(tp=2)),
    "qwen3_moe, tp 2, ep 2": ("qwen3_moe", Layout(tp=2, ep=2)),
    "qwen3_moe, ep 2": ("qwen3_moe", Layout(ep=2)),
    "qwen3_moe, tp 2, ep 4": ("qwen3_moe", Layout(tp=2, ep=4)),
}
DTYPE = "float32"


class Sent:
    """Bytes that this rank sends, if each byte goes to its receiver directly."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = 0.0
        for name in ("all_reduce", "all_gather", "all_to_all_single", "isend"):
            patch.setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            size = dist.get_world_size(group)
            x = args[1] if name in ("all_gather", "all_to_all_single") else args[0]
            if name == "all_to_all_single":
                own = args[3] if len(args) > 3 else [len(x) // size] * size
                rows = sum(own) - own[dist.get_rank(group)]
                self.bytes += x.nbytes * rows / max(1, len(x))
            else:
                share = {"all_reduce": 2 * (size - 1) / size, "all_gather": size - 1, "isend": 1}
                self.bytes += x.nbytes * share[name]
            return call(*args, **kwargs)

        return counting


def inputs(copies: int) -> list[StepInput]:
    """Two greedy requests in each attention group: a prompt in two chunks, then decodes."""
    greedy = (SlotSampling(slot=0), SlotSampling(slot=1))
    made = [structs.replace(step, new_slots=greedy if step.new_slots else ()) for step in steps()]
    made[1] = structs.replace(made[1], pool_index=made[1].pool_index[:0], pool_count=())
    if copies == 1:
        return made
    return [structs.replace(step, group_sizes=copies * (step.size,)) for step in made]


def be_counted(rank: int, size: int, cases: list[Any], pipe: Connection) -> None:
    """A process: run each case, and send the bytes that each step sends."""
    torch.set_num_threads(1)
    meet(rank, size, lambda own: take_port(own, pipe), timeout=60)
    for path, whole in cases:
        layout = replace(whole, rank=rank)
        groups = make_groups(layout)
        counts = []
        with pytest.MonkeyPatch.context() as patch:
            sent = Sent(patch)

            def counted(
                made: list[StepInput], sent: Sent = sent, counts: list[float] = counts
            ) -> Any:
                for step in made:
                    before = sent.bytes
                    yield step
                    counts.append(sent.bytes - before)

            generate(path, DTYPE, layout, groups, inputs=counted(inputs(layout.dp_size)))
        pipe.send(counts)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_checkpoint(folder / name, name) for name in ("llama", "qwen3_moe")}


@pytest.fixture(scope="module")
def sent(models: dict[str, Path]) -> dict[str, list[list[float]]]:
    """For each case, the bytes of each rank in each step."""
    found: dict[str, list[list[float]]] = {}
    for size in (2, 4):
        chosen = {n: case for n, case in CASES.items() if case[1].world_size == size}
        cases = [(models[model], layout) for model, layout in chosen.values()]
        with running(size, be_counted, size, cases) as pipes:
            for name in chosen:
                found[name] = [pipe.recv() for pipe in pipes]
    return found


@pytest.mark.parametrize("name", CASES)
def test_bytes_between_ranks_are_those_that_ranks_send(
    name: str, models: dict[str, Path], sent: dict[str, list[list[float]]]
) -> None:
    model, layout = CASES[name]
    spec = read_spec(models[model])
    _, prompts, *decodes = inputs(1)  # the first step has no logits
    found: list[list[float]] = []
    for rank in range(layout.world_size):
        own = replace(layout, rank=rank)
        batches = [Batch.of([step]) for step in (prompts, *decodes)]
        made = map(RankModel(spec, own, Precision(DTYPE)).operators, batches)
        found.append([sum(op.sent * op.times for op in operators) for operators in made])
    assert found == [pytest.approx(counts[1:]) for counts in sent[name]]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_a_large_step_reads_all_weights_once(
    model: str, quantization: str, models: dict[str, Path]
) -> None:
    """Norms and biases are left out; the embedding's rows are not its matrix."""
    spec = read_spec(models[model])
    precision = Precision(DTYPE, quantization)
    model_of = RankModel(spec, Layout(), precision)
    operators = model_of.operators(Batch(64, 1.0))
    products = [op for op in operators if op.what not in ("embedding", "attention", "next stage")]
    step_bytes = sum(op.read * op.times for op in products)
    without = model_of.operators(Batch(65, 1.0))
    a_row = sum(op.read * op.times for op in without if op.what in {p.what for p in products})
    weights = step_bytes - 64 * (a_row - step_bytes)
    whole = spec.weight_bytes(DTYPE, quantization)
    if spec.lm_head is not None:
        whole -= spec.embedding.size * precision.item
    assert weights == pytest.approx(whole, rel=0.05)


def test_gpus_read_a_quantised_checkpoints_weights_as_they_are(models: dict[str, Path]) -> None:
    config = json.loads((models["llama"] / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    spec = build_spec(config | {"quantization_config": fp8}, Path("config.json"))

    def read(packed: Packed) -> float:
        precision = Precision(DTYPE, packed=packed)
        operators = RankModel(spec, Layout(), precision).operators(Batch(1, 1.0))
        return sum(op.read * op.times for op in operators)

    saved = spec.weight_bytes(DTYPE) - spec.weight_bytes(DTYPE, packed="gpu")
    assert saved > 0
    assert read(None) - read("gpu") == pytest.approx(saved)


def test_operations_are_twice_the_parameters_of_each_token(models: dict[str, Path]) -> None:
    spec = read_spec(models["llama"])
    operators = RankModel(spec, Layout(), Precision(DTYPE)).operators(Batch(3, 1.0))
    flops = sum(op.flops * op.times for op in operators if op.what != "attention")
    matrices = sum(w.size for w in spec.weights if len(w.shape) > 1 and w is not spec.embedding)
    assert flops == 2 * 3 * matrices


@given(st.integers(1, 64), st.floats(1, 4096), st.integers(0, 512))
def test_ranks_share_the_operations(decodes: int, context: float, prompt: int) -> None:
    spec = _spec()
    batch = Batch(decodes, context, min(prompt, 1), prompt, float(prompt) / 2)

    def flops(layout: Layout) -> float:
        return sum(op.flops * op.times for op in RankModel(spec, layout).operators(batch))

    whole = flops(Layout())
    ranks = [flops(Layout(tp=2, rank=rank)) for rank in range(2)]
    assert sum(ranks) == pytest.approx(whole)
    both = [each.operators(batch) for each in stages(spec, Layout(pp=2), Precision())]
    assert sum(op.flops * op.times for ops in both for op in ops) == pytest.approx(whole)


def test_a_window_bounds_what_attention_reads(models: dict[str, Path]) -> None:
    spec = read_spec(models["llama"])
    layers = tuple(
        replace(layer, attention=replace(layer.attention, sliding_window=100))
        for layer in spec.layers
    )
    windowed = replace(spec, layers=layers)

    def read(spec: ModelSpec, context: float) -> float:
        operators = RankModel(spec, Layout()).operators(Batch(4, context))
        return sum(op.read * op.times for op in operators if op.what == "attention")

    assert read(windowed, 1000) == read(windowed, 100) == read(spec, 100) < read(spec, 1000)


def test_a_cache_in_fp8_halves_what_attention_reads_of_it(models: dict[str, Path]) -> None:
    spec, batch = read_spec(models["llama"]), Batch(8, 100_000.0)
    read = []
    for kept in ("auto", "fp8"):
        operators = RankModel(spec, Layout(), Precision("bfloat16", "none", kept)).operators(batch)
        read.append(sum(each.read for each in operators if each.what == "attention"))
    assert read[1] == pytest.approx(read[0] / 2, rel=1e-3)


def test_few_tokens_need_few_experts(models: dict[str, Path]) -> None:
    """E (1 - (1 - k/E)^T): one token needs k experts, many tokens need all."""
    spec = read_spec(models["qwen3_moe"])

    def experts(tokens: int) -> Operator:
        operators = RankModel(spec, Layout(), Precision(DTYPE)).operators(Batch(tokens, 1.0))
        return next(op for op in operators if op.what == "experts")

    (block,) = {layer.feed_forward for layer in spec.layers[:1]}
    total = block.router.weight.shape[0]  # type: ignore[union-attr]
    top_k = block.router.top_k  # type: ignore[union-attr]
    a_token = experts(2).read - experts(1).read
    assert experts(1).flops * total / top_k == pytest.approx(experts(total).flops / top_k)
    assert experts(1).read < experts(1000).read
    assert a_token > 0


def test_overlapped_exchanges_move_the_same_bytes(models: dict[str, Path]) -> None:
    """An all-reduce is a reduce-scatter and an all-gather."""
    spec = read_spec(models["llama"])

    def sent(overlapped: bool) -> float:
        model = RankModel(spec, Layout(tp=2), overlapped=overlapped)
        layers = [
            op for op in model.operators(Batch(64, 1.0)) if op.what not in ("embedding", "lm head")
        ]
        return sum(op.sent * op.times for op in layers)

    assert sent(True) == sent(False)


def test_an_exchange_of_all_to_all_sends_each_part_once() -> None:
    assert Exchange("all_to_all", "context", 4, 1600).sent == 300
    assert Exchange("all_gather", "tensor", 4, 1600).sent == 1200
    assert Exchange("all_reduce", "tensor", 4, 1600).sent == 2400


def _spec() -> ModelSpec:
    from weft.models.checkpoint.locate import locate

    return read_spec(locate("weft-demo"))
