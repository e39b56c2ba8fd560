"""Padded and replayed steps; on a CPU, a replay is a call on the same buffers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint
from support.steps import Driver

os.environ["TRITON_INTERPRET"] = "1"

from weft.kernels.interpreter.gpu import installed
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.checkpoint.locate import read_spec
from weft.models.memory.plan import Recordings
from weft.models.spec.layout import Layout
from weft.models.torch.graphs import DECODE_REQUESTS, MIXED_TOKENS, Graphs, recordings
from weft.models.torch.overlapped import DISPATCH_TOKENS
from weft.models.torch.runner import TorchRunner

PAGE, PAGES, REQUESTS, MIXED, DECODES = 4, 24, 5, 3, 4


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_every_step_has_a_bucket_that_is_not_much_larger(seqs: int, tokens: int) -> None:
    sizes, mixed = recordings(Layout(tp=2, ep=2), seqs, tokens, overlapped=False)
    assert list(sizes) == sorted(set(sizes))
    assert list(mixed) == [size for size in MIXED_TOKENS if size <= tokens]
    assert sizes[-1] <= tokens
    assert all(before < seqs for before in sizes[:-1])
    assert sizes[-1] >= seqs or sizes[-1] == max(n for n in DECODE_REQUESTS if n <= tokens)
    for requests in range(1, min(seqs, sizes[-1]) + 1):
        size = next(size for size in sizes if size >= requests)
        assert size < max(2 * requests, requests * 8 / 7 + 8)
        assert size - requests <= max(7, size / 8)


def test_a_gpus_default_number_of_requests_takes_few_recordings() -> None:
    """Each recording takes memory, and time at the start."""
    sizes, _ = recordings(Layout(), 512, 8192, overlapped=False)
    assert sizes[-1] == 512
    assert len(sizes) <= 36


@pytest.mark.features("graphs", "pp")
@pytest.mark.features("graphs", "cp")
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(cp=2), Layout(ep=2, pp=2)])
@pytest.mark.parametrize("overlapped", [True, False])
def test_what_cannot_be_recorded(layout: Layout, overlapped: bool) -> None:
    assert recordings(layout, 8, 64, overlapped=overlapped) == ((), ())


def test_all_sizes_share_their_inputs() -> None:
    """Only one recording runs at a time; at 128k tokens, tables of their own would take 138 MB."""
    graphs = Graphs(
        lambda inputs: pytest.fail("no step is run"),
        torch.device("cpu"),
        sizes=Recordings((1, 8, 4), (32, 16)),
        max_num_seqs=10,
        block_size=PAGE,
        max_model_len=64,
    )
    decodes = [inputs.plan.batch for inputs in graphs._decodes.values()]
    assert [batch.query_start.tolist() for batch in decodes] == [[0, 1], [*range(5)], [*range(9)]]
    assert [batch.block_table.shape for batch in decodes] == [(1, 16), (4, 16), (8, 16)]
    mixed = [inputs.plan.batch for inputs in graphs._mixed.values()]
    assert [batch.block_table.shape for batch in mixed] == [(11, 16)] * 2
    assert len({batch.block_table.data_ptr() for batch in decodes + mixed}) == 1
    assert [len(inputs.token_ids) for inputs in graphs._mixed.values()] == [16, 32]


def test_experts_on_other_ranks_are_recorded_if_one_dispatch_is_enough() -> None:
    assert recordings(Layout(ep=2), 1000, 2048, overlapped=False) == ((), ())
    for sizes in recordings(Layout(ep=2), 1000, 2048, overlapped=True):
        assert sizes[-1] == DISPATCH_TOKENS


def run(path: Path, *, cuda_graphs: bool) -> tuple[list[list[int]], int]:
    """Return the tokens of five requests, one of them sampled; and the number of replayed steps.

    The last request's prompt is computed in two chunks, beside decodes of the others.

    Unassigned pages hold NaN before and after. All replays store their results in the same memory.
    """
    runner = TorchRunner.load(
        path,
        read_spec(path),
        dtype="float32",
        block_size=PAGE,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=64,
        max_model_len=32,
        home=VirtualHome(VirtualWorld(1), 0),
        cuda_graphs=cuda_graphs,
    )
    runner.allocate_kv_cache(PAGES)
    runner.warm_up()
    replays, places = 0, set[int]()
    if runner._graphs is not None:
        replay = runner._graphs.replay

        def counted(*step: object) -> object:
            nonlocal replays
            if found := replay(*step):  # type: ignore[arg-type]
                replays += 1
                places.add(found.hidden.data_ptr())
            return found

        runner._graphs.replay = counted  # type: ignore[method-assign, assignment]
    with torch.inference_mode():
        for cache in runner._cache:
            for tensor in cache:
                tensor.fill_(float("nan"))
    driver = Driver(runner, PAGE, PAGES)
    requests = [
        driver.add([5 + i] * (3 + i), 16, temperature=float(i == 1), seed=i)
        for i in range(REQUESTS)
    ]
    *early, late = requests
    driver.step(*((request, len(request.tokens)) for request in early))
    for chunk in (3, len(late.tokens) - 3):
        driver.step(*((request, 1) for request in early), (late, chunk))
    for unknown in (False, True, True, False)[:DECODES]:
        driver.step(*((request, 1) for request in requests), unknown=unknown)
    driver.step((requests[3], 1), (requests[0], 1))
    owned = {block for request in requests for block in request.blocks}
    free = [block for block in range(PAGES) if block not in owned]
    assert free
    assert all(tensor[free].isnan().all() for cache in runner._cache for tensor in cache)
    runner.close()
    assert len(places) <= 1
    return [request.output for request in requests], replays


@pytest.mark.features("gpu", "graphs")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_padded_steps_give_the_same_tokens_and_touch_no_other_page(
    family: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, family, num_hidden_layers=1)
    with installed():
        expected, replays = run(path, cuda_graphs=False)
        assert replays == 0
        found, replays = run(path, cuda_graphs=True)
    assert replays == MIXED + DECODES + 1
    assert found == expected
    assert len({tuple(output) for output in expected}) > 1
