"""A model that ranks share, run in a process for each of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from support.checkpoints import VOCAB_SIZE
from weft.kernels.symmetric.memory import Home
from weft.models.checkpoint.locate import read_spec
from weft.models.interface import NOTHING, Int32, SlotSampling, StepInput
from weft.models.memory.plan import Recordings
from weft.models.spec.layout import Layout
from weft.models.spec.spec import FP8_CACHE
from weft.models.torch.group import Group, Groups, make_groups, meet
from weft.models.torch.logits import Logits
from weft.models.torch.runner import TorchRunner
from weft.models.torch.sampler import Masks, Sampler, score

BLOCK, BLOCKS, PROMPT, DECODES = 4, 16, 13, 6
INTERPRETED_DECODES = 2
"""In Triton's interpreter, which is slow."""

Case = tuple[str, str, Layout]
"""A model, the type to compute in or one of `PRECISIONS`, and the layout, of no rank yet."""

PRECISIONS = {
    "int8": {"quantization": "int8"},
    "fp8 cache": {"kv_dtype": FP8_CACHE},
    "int8, fp8 cache": {"quantization": "int8", "kv_dtype": FP8_CACHE},
}
"""In float32, but for weights or the KV cache."""


def steps(seed: int = 0, decodes: int = DECODES) -> list[StepInput]:
    """Two requests: a prompt in two chunks, then decodes; the other samples by seed.

    With the second chunk some of its hidden states are summed, of each request.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, VOCAB_SIZE, (2, PROMPT)).astype(np.int32)
    table = np.arange(BLOCKS, dtype=np.int32).reshape(2, -1)[:, ::-1].copy()
    slots = np.arange(2, dtype=np.int32)
    sampling = (
        SlotSampling(slot=0, logprobs=3),
        SlotSampling(slot=1, temperature=0.8, seed=7, top_k=20, repetition_penalty=1.2),
    )

    def step(number: int, tokens: Any, start: int, new: tuple[SlotSampling, ...]) -> StepInput:
        count = tokens.shape[1]
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), 2)
        last = start + count >= PROMPT
        return StepInput(
            step=number,
            token_ids=np.ascontiguousarray(tokens, dtype=np.int32).ravel(),
            positions=positions,
            query_start=np.array([0, count, 2 * count], np.int32),
            context_len=np.full(2, start + count, np.int32),
            block_table=table,
            slot=slots,
            sample_index=np.array([count - 1, 2 * count - 1], np.int32) if last else slots[:0],
            sample_slot=slots if last else slots[:0],
            output_index=np.full(2 if last else 0, start + count - PROMPT, np.int32),
            new_slots=new,
        )

    second = step(1, prompts[:, 5:], 5, sampling)
    pool = {"pool_index": _int32(1, 2, 6, 8, 9), "pool_count": _int32(3, 2)}
    made = [
        step(0, prompts[:, :5], 0, ()),
        structs.replace(second, **pool),
    ]
    newest = (-1 - slots)[:, None]
    made += [step(2 + i, newest, PROMPT + i, ()) for i in range(decodes)]
    return made


def _int32(*numbers: int) -> Int32:
    return np.array(numbers, np.int32)


def together(copies: int, own: int, decodes: int = DECODES) -> Iterator[StepInput]:
    """What each copy of attention is given, for one of them: another one begins with every step.

    So one has a chunk of a prompt, or nothing, while another decodes.
    """
    made = [steps(copy, decodes) for copy in range(copies)]
    for number in range(len(made[0]) + copies - 1):
        at = [(inputs, number - copy) for copy, inputs in enumerate(made)]
        inputs = [some[i] if 0 <= i < len(some) else NOTHING for some, i in at]
        yield structs.replace(inputs[own], group_sizes=tuple(one.size for one in inputs))


def generate(
    path: Path,
    dtype: str,
    layout: Layout,
    groups: Groups,
    home: Home | None = None,
    context_home: Home | None = None,
    *,
    inputs: Iterable[StepInput],
) -> tuple[Any, Any, Any]:
    """Sampled tokens, log probabilities of the greedy request, and sums of hidden states.

    None of them before the last stage.
    """
    runner = TorchRunner.load(
        path,
        read_spec(path),
        dtype="float32" if dtype in PRECISIONS else dtype,
        **PRECISIONS.get(dtype, {}),
        block_size=BLOCK,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=32,
        layout=layout,
        groups=groups,
        home=home,
        context_home=context_home,
    )
    runner.allocate_kv_cache(BLOCKS)
    if runner._graphs is not None:
        runner._graphs.record()
    ran = [(step, runner.step(step)) for step in inputs]
    outputs = [output for step, output in ran if len(step.token_ids)]
    runner.close()
    tokens = np.array([output.token_ids for output in outputs[1:]])
    logprobs = np.array([o.logprobs.chosen[0] for o in outputs[1:] if o.logprobs is not None])
    return tokens, logprobs, outputs[1].pooled


def told_of(logits: Logits) -> tuple[list[Any], ...]:
    """All that can be asked of logits: the two answers of argmax; amax, top and score."""
    rows = logits.float_rows(slice(None))
    ranked = Logits(rows.local.nan_to_num(), rows.shape[1], rows.group)
    top, ids = ranked.top(3)
    answers = (*logits.argmax(), ranked.amax(), top, *rows.score(ids[:, 0]))
    return tuple(answer.tolist() for answer in answers)


def take_part(rank: int, columns: int, cases: list[torch.Tensor], pipe: Connection) -> None:
    """A process: hold some columns of logits [S, columns], and send what it is told of all."""
    torch.set_num_threads(1)
    size = 4
    meet(rank, size, lambda own: take_port(own, pipe), timeout=60)
    group = make_groups(Layout(tp=size, rank=rank)).tensor
    each = -(-columns // size)
    for case in cases:
        logits = Logits(case[:, rank * each : (rank + 1) * each], columns, group)
        pipe.send(told_of(logits))
    torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Sampling:
    """A few steps of a sampler over made-up logits.

    Attributes:
        columns, dtype, spread, seed: of the logits; their standard deviation.
        strange: some rows are broken, or have but few finite logits.
        slots: a row for each.
        masked: every other row may have only some tokens.
        top: of the log probabilities of a prompt; -1 for none.
        gpu: by a GPU's sampler.
    """

    columns: int
    dtype: torch.dtype
    spread: float
    seed: int
    strange: bool
    slots: tuple[SlotSampling, ...]
    masked: bool = False
    top: int = -1
    steps: int = 3
    gpu: bool = False

    def logits(self, step: int) -> torch.Tensor:
        """[rows, columns]."""
        generator = torch.Generator().manual_seed(self.seed + step)
        logits = torch.randn(len(self.slots), self.columns, generator=generator) * self.spread
        if self.strange:
            kind = torch.randint(0, 6, (len(self.slots),), generator=generator)
            where = torch.randint(0, self.columns, kind.shape, generator=generator)
            for row, (of_row, column) in enumerate(zip(kind.tolist(), where.tolist(), strict=True)):
                if of_row < 2:
                    logits[row, column] = (float("nan"), float("inf"))[of_row]
                elif of_row == 2:
                    logits[row] = -torch.inf
                elif of_row == 3:
                    logits[row, :column] = -torch.inf
        return logits.to(self.dtype)

    def masks(self, step: int) -> Masks | None:
        """Of every other row, about a quarter of the tokens, and the last one."""
        if not self.masked:
            return None
        rows = list(range(0, len(self.slots), 2))
        generator = torch.Generator().manual_seed(self.seed - step)
        allowed = torch.rand(len(rows), -(-self.columns // 32) * 32, generator=generator) < 0.25
        allowed[:, self.columns - 1] = True
        bits = np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int32)
        return Masks(rows, torch.tensor(bits))

    def run(self, group: Group) -> list[Any]:
        """By this rank: tokens, status and log probabilities of each step, then of a prompt."""
        if not self.gpu:
            return self._run(Sampler(self.columns, len(self.slots)), group)
        os.environ["TRITON_INTERPRET"] = "1"
        from weft.kernels.interpreter.gpu import installed
        from weft.models.torch.gpu_sampler import GpuSampler

        with installed():
            return self._run(GpuSampler(self.columns, len(self.slots)), group)

    def _run(self, sampler: Sampler, group: Group) -> list[Any]:
        sampler.set_slots(self.slots)
        each = -(-self.columns // group.size)
        own = slice(group.index * each, (group.index + 1) * each)
        slots, told = torch.arange(len(self.slots)), list[Any]()
        for step in range(self.steps):
            index = torch.tensor([len(slot.output_token_ids) + step for slot in self.slots])
            logits = Logits(self.logits(step)[:, own], self.columns, group)
            sampled = sampler.sample(logits, slots, index, self.masks(step))
            scores = None if sampled.logprobs is None else sampled.logprobs.on_host()
            told += [sampled.token_ids.numpy(), sampled.status.numpy(), scores]
        if self.top >= 0:
            logits = Logits(self.logits(0)[:, own], self.columns, group)
            told.append(score(logits, sampled.token_ids, self.top).on_host())
        return told


class CountingGroup(Group):
    """Counts the bytes that other ranks have to tell this one: those of what they give."""

    bytes = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes += (self.size - 1) * x.nbytes
        return super().sum(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes += (self.size - 1) * x.nbytes
        return super().gather(x)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes += (self.size - 1) * x[0].nbytes
        return super().all_to_all(x)


def sample_parts(rank: int, size: int, pipe: Connection) -> None:
    """A process: with as many of the others as is said, take part in what is asked."""
    torch.set_num_threads(1)
    meet(rank, size, lambda own: take_port(own, pipe), timeout=60)
    made = {ranks: torch.distributed.new_group(range(ranks)) for ranks in range(2, size + 1)}
    while (asked := pipe.recv()) is not None:
        ranks, sampling = asked
        group = CountingGroup(range(ranks), rank, made[ranks])
        pipe.send((sampling.run(group), group.bytes))
    torch.distributed.destroy_process_group()


def take_port(own: int | None, pipe: Connection) -> int:
    if own is not None:
        pipe.send(own)
        return own
    port: int = pipe.recv()
    return port


def _recordings(few_tokens: int, layout: Layout, *_: int, overlapped: bool) -> Recordings:
    """Decodes padded to three requests, and chunks of prompts to 16 tokens."""
    if not layout.cp == layout.pp == 1 or (layout.dp_size > 1 and not overlapped):
        return Recordings()
    return Recordings((3,), (16,) if layout.dp_size == 1 or few_tokens >= 16 else ())


def be_rank(
    rank: int,
    size: int,
    cases: list[tuple[str, Path, Case]],
    pipe: Connection,
    few_tokens: int | None = None,
    fused: int = 0,
    overlapped: bool = True,
) -> None:
    """A process: run each case, and send what came out, and how many exchanges of all it counted.

    On Triton kernels if `few_tokens` is given, which are then the same on all ranks, or sent at a
    time; up to `fused`, products send their sums. Steps are then padded.
    """
    torch.set_num_threads(1)
    store = meet(rank, size, lambda own: take_port(own, pipe), timeout=60)
    with ExitStack() as stack:
        home = None
        if few_tokens is not None:
            os.environ["TRITON_INTERPRET"] = "1"
            from weft.kernels.interpreter.gpu import installed
            from weft.kernels.symmetric.shared import SharedHome
            from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
            from weft.models.torch import graphs
            from weft.models.torch import overlapped as exchange

            exchange.token_limits = lambda *_: exchange.Limits(fused, few_tokens)
            exchange.DISPATCH_TOKENS = graphs.DISPATCH_TOKENS = few_tokens
            graphs.recordings = partial(_recordings, few_tokens)
            stack.enter_context(installed())
        for name, path, (_, dtype, whole) in cases:
            layout, counted = replace(whole, rank=rank), list[bool]()
            if few_tokens is not None and not overlapped:
                home = VirtualHome(VirtualWorld(1), 0)
            elif few_tokens is not None and (home is None or home.world_size != layout.stage_size):
                of_stage = layout.rank % layout.stage_size, layout.stage_size
                which = f"stage {layout.stage} of {layout.pp}"
                home = stack.enter_context(SharedHome(store, *of_stage, which))
            groups = make_groups(layout, counted.append)
            groups.open(torch.device("cpu"))  # as between GPUs
            context_home = None
            if home is not None and overlapped and layout.cp > 1:
                own = f"context-{rank // layout.cp}"
                context_home = SharedHome(store, layout.context, layout.cp, own)
                stack.enter_context(context_home)
            decodes = DECODES if few_tokens is None else INTERPRETED_DECODES
            inputs = together(layout.dp_size, layout.dp_group, decodes)
            got = generate(path, dtype, layout, groups, home, context_home, inputs=inputs)
            pipe.send((name, *got, sum(counted)))
    torch.distributed.destroy_process_group()


@contextmanager
def running(
    size: int, body: Callable[..., None], *arguments: Any, after: Any = ()
) -> Iterator[list[Connection]]:
    """The pipes of processes body(rank, *arguments, pipe, *after); in the end, all ended well.

    They are copies of a process that has imported torch, which takes seconds of a core.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weft.models.torch.runner"])
    pipes, processes = [], []
    ended, end = context.Pipe(duplex=False)
    for rank in range(size):
        own, other = context.Pipe()
        # The first rank has the ranks' store, so it ends last.
        until = ended if rank == 0 else None
        process = context.Process(
            target=_be, args=(dict(os.environ), until, body, rank, *arguments, other, *after)
        )
        process.daemon = True
        process.start()
        other.close()
        pipes.append(own)
        processes.append(process)
    ended.close()
    port = pipes[0].recv()
    for pipe in pipes[1:]:
        pipe.send(port)
    yield pipes
    for process in processes[1:]:
        process.join(30)
        assert process.exitcode == 0
    end.send(None)
    processes[0].join(30)
    assert processes[0].exitcode == 0


def _be(
    environment: dict[str, str],
    until: Connection | None,
    body: Callable[..., None],
    *arguments: Any,
) -> None:
    """A process: run the body in this environment, and end once `until` says so."""
    os.environ.clear()
    os.environ.update(environment)
    body(*arguments)
    if until is not None:
        until.recv()
