"""Steps dispatched ahead on a GPU: in Triton's interpreter, or with tensors without contents."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.steps import Driver

os.environ["TRITON_INTERPRET"] = "1"

from support.dispatched import left_out

from weft.kernels.interpreter.gpu import installed
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.checkpoint.locate import read_spec
from weft.models.interface import DispatchingRunner
from weft.models.spec.layout import WHOLE
from weft.models.torch.dry import META, NoWeights
from weft.models.torch.exchange import Plain
from weft.models.torch.gpu_model import GpuModel
from weft.models.torch.group import ALONE
from weft.models.torch.runner import DispatchingTorchRunner, TorchRunner

PAGE, PAGES, DECODES = 4, 48, 6
KINDS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logit_bias": {5: 2.0}, "min_tokens": 3, "end_token_ids": (1, 2)},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def load(path: Path, *, gpu: bool) -> TorchRunner:
    runner = TorchRunner.load(
        path,
        read_spec(path),
        dtype="float32",
        block_size=PAGE,
        max_num_seqs=len(KINDS),
        max_num_batched_tokens=64,
        max_model_len=32,
        home=VirtualHome(VirtualWorld(1), 0) if gpu else None,
    )
    runner.allocate_kv_cache(PAGES)
    return runner


def outputs(runner: TorchRunner, *, ahead: int) -> list[Any]:
    """Each step's tokens and log probabilities.

    With several steps ahead, another thread reads a step after that many others have begun.
    """
    runner.warm_up()
    driver, pending, read = Driver(runner, PAGE, PAGES), list[Any](), list[Any]()
    prompts = np.random.default_rng(1).integers(8, VOCAB_SIZE, (len(KINDS), 5)).tolist()
    requests = [
        driver.add(prompt, 20, prompt_token_ids=prompt, **kind)
        for prompt, kind in zip(prompts, KINDS, strict=True)
    ]
    with ThreadPoolExecutor(1) as reader, installed():
        for number in range(1 + DECODES):
            count = 1 if number else len(prompts[0])
            step = driver._build(tuple((request, count) for request in requests), -1)
            if ahead:
                assert isinstance(runner, DispatchingRunner)
                pending.append(runner.dispatch(step))
            else:
                pending.append(lambda step=step: runner.step(step))
            for request in requests:
                request.done += count
                request.output.append(-1)
                request.tokens.append(-1 - request.sampling.slot)
            while len(pending) > ahead or (number == DECODES and pending):
                read.append(reader.submit(pending.pop(0)).result())
    runner.close()
    return [(out.token_ids.tolist(), out.status.tolist(), out.logprobs) for out in read]


def test_steps_begin_before_others_are_read(path: Path) -> None:
    """Greedy, random and penalised requests continue with tokens that nobody has read."""
    with installed():
        found = outputs(load(path, gpu=True), ahead=3)
    wanted = outputs(load(path, gpu=False), ahead=0)
    assert [out[:2] for out in found] == [out[:2] for out in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one[2].rank, other[2].rank)
        np.testing.assert_allclose(one[2].chosen, other[2].chosen, atol=1e-4)


def test_cpus_and_pipeline_stages_are_not_dispatched(path: Path) -> None:
    assert not isinstance(load(path, gpu=False), DispatchingRunner)
    with installed():
        runner = load(path, gpu=True)
    assert isinstance(runner, DispatchingTorchRunner)
    runner.close()


@pytest.mark.parametrize(
    "sampling", [*KINDS, {"temperature": 1.0}], ids=lambda kind: next(iter(kind))
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_host_reads_nothing_from_the_device_in_a_step(
    path: Path, sampling: dict[str, Any], masked: bool
) -> None:
    """Tensors on the meta device have no contents, so reading one is an error."""
    spec = read_spec(path)
    model = GpuModel(
        spec,
        NoWeights(spec, WHOLE),
        torch.bfloat16,
        device=META,
        exchange=Plain(ALONE),
        groups=ALONE,
    )
    runner = DispatchingTorchRunner(
        model,
        spec,
        pipe=ALONE.pipe,
        vocab_size=spec.vocab_size,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=PAGE,
        max_num_seqs=4,
        max_tokens=64,
        layout=WHOLE,
        device=META,
        max_model_len=32,
    )
    runner.allocate_kv_cache(PAGES)
    driver = Driver(runner, PAGE, PAGES)
    prompt = [*range(8, 13)]
    request = driver.add(prompt, 20, prompt_token_ids=prompt, **sampling)
    pooled = driver.add(prompt, 20)
    with left_out() as launched, installed():
        for count in (5, 1, 1):
            chunks = [(request, count)] + ([(pooled, 5)] if count > 1 else [])
            top = 2 if count > 1 else -1
            step = driver._build(tuple(chunks), top, [pooled] if count > 1 else [])
            if masked:
                mask = np.full((1, -(-VOCAB_SIZE // 32)), -1, np.int32)
                step = replace(step, masked=np.zeros(1, np.int32), token_mask=mask)
            runner.dispatch(step)
            request.done += count
            request.output.append(-1)
            request.tokens.append(-1)
    assert ("draw_tokens" in launched) == (masked or sampling != KINDS[0])
    assert ("edit_rows" in launched) == (masked or sampling in KINDS[2:])
    with pytest.raises(RuntimeError, match="meta"):
        runner._newest_token[0].item()
