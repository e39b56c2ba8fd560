"""The parts of serve.py, in their order, and how large they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness.command import Parts
from harness.ranks import prepare, receive_all, run
from harness.report import Case, Figure, LeftOut
from harness.timing import Ratio, Times, copying, ratio

from serve_parts.group import Table, virtual_groups
from serve_parts.model import PAGE, STD_OF_CACHE, Scale, decodes, fill_cache, make_runner
from weft.kernels.gpu.tuning.clock import gpu_clock, host_clock
from weft.kernels.symmetric.memory import Home
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.spec.layout import Layout
from weft.models.torch.overlapped import Overlapped
from weft.models.torch.runner import TorchRunner

COPIES = 5
"""Of the bandwidth, in each repetition."""

CHAIN = 6
"""Steps whose tokens are compared."""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def full() -> Scale:
    """For the GPU that this process has."""
    return Scale(
        tiny=False,
        device="cuda:0",
        dtype="bfloat16",
        config=LLAMA | LLAMA_8B,
        users=(1, 16, 128),
        context=1024,
        worlds=(2, 4, 8),
        steps=32,
        copied=1 << 31,
    )


TINY = Scale(
    tiny=True,
    device="cpu",
    dtype="float32",
    config=LLAMA | SMALL,
    users=(1, 3),
    context=PAGE + 3,
    worlds=(2,),
    steps=1,
    copied=1 << 20,
)


def decode(scale: Scale, repetitions: int) -> Iterator[Case]:
    """The part of the bandwidth."""
    for users in scale.users:
        yield Case(f"{users} users", partial(_decode, scale, users, repetitions))


def _decode(scale: Scale, users: int, repetitions: int) -> Figure:
    runner = _alone(scale, users)
    figure = _part_of_bandwidth(scale, runner, Layout(), users, repetitions)
    runner.close()
    return figure


def shard(scale: Scale, repetitions: int) -> Iterator[Case]:
    """One of several ranks, without the others."""
    for world in scale.worlds:
        for users in scale.users:
            made = partial(_shard, scale, world, users, repetitions)
            yield Case(f"{users} users, rank 0 of {world}", made)


def _shard(scale: Scale, world: int, users: int, repetitions: int) -> Figure:
    _check_divides(scale, world)
    layout = Layout(tp=world)

    def on_rank(home: Home) -> list[Figure]:
        found = []
        if home.rank:  # its buffers only
            dtype = getattr(torch, scale.dtype)
            other = Layout(tp=world, rank=home.rank)
            Overlapped(home, None, scale.spec, other, dtype, max_tokens=users)
            home.barrier()
        else:
            runner, exchange = make_runner(scale, home, layout, users)
            home.barrier()
            assert isinstance(exchange, Overlapped)
            for workspace in exchange.workspaces:
                receive_all(workspace, processors_of(scale))
            runner.warm_up()
            found.append(_part_of_bandwidth(scale, runner, layout, users, repetitions))
            runner.close()
        home.exchange("measured")
        return found

    return run(on_rank, world, tiny=scale.tiny)[0][0]


def together(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Virtual ranks that serve on one device; one rank's time over theirs."""
    for world in scale.worlds:
        for users in scale.users:
            made = partial(_together, scale, world, users, repetitions)
            yield Case(f"{users} users, {world} ranks", made)


def _together(scale: Scale, world: int, users: int, repetitions: int) -> Figure:
    _check_divides(scale, world)
    one = _alone(scale, users, cuda_graphs=False)
    expected = _tokens(scale, one, users)
    of_one = _time(scale, repetitions, _steps(scale, one, users))
    one.close()
    del one
    table: Table = {}

    def on_rank(home: Home) -> tuple[list[int], Times]:
        layout = Layout(tp=world, rank=home.rank)
        groups = virtual_groups(home, table)
        runner, _ = make_runner(scale, home, layout, users, groups=groups, cuda_graphs=False)
        prepare(home, [lambda: runner.step(decodes(scale, users, 0))])
        tokens = _tokens(scale, runner, users)
        times = _time(scale, repetitions, _steps(scale, runner, users))
        home.barrier()
        runner.close()
        return tokens, times

    tokens, times = zip(*run(on_rank, world, tiny=scale.tiny), strict=True)
    same = sum(a == b for a, b in zip(tokens[0], expected, strict=True)) / len(expected)
    return Figure(
        *ratio(of_one, times[0]),
        goal="all ranks sample the same tokens",
        good=all(of_rank == tokens[0] for of_rank in tokens),
        details={"ms": 1e3 * times[0].median, "of one": 1e3 * of_one.median, "its tokens": same},
    )


def _tokens(scale: Scale, runner: TorchRunner, users: int) -> list[int]:
    """What is sampled after an empty context, which is the same on any number of ranks."""
    fill_cache(runner, 0.0)
    tokens: list[int] = []
    for number in range(CHAIN):  # each decodes what the last has sampled, of any rank's vocabulary
        tokens += runner.step(decodes(scale, users, number)).token_ids.tolist()
    fill_cache(runner, STD_OF_CACHE)
    return tokens


def _check_divides(scale: Scale, world: int) -> None:
    if scale.spec.num_kv_heads % world:
        raise LeftOut(f"{scale.spec.num_kv_heads} KV heads do not divide by {world} ranks")


def processors_of(scale: Scale) -> int:
    """That one rank may fill."""
    if scale.tiny:
        return 2
    return torch.cuda.get_device_properties(0).multi_processor_count


def graphs(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Steps without CUDA graphs over those with them."""
    for users in scale.users:
        yield Case(f"{users} users", partial(_graphs, scale, users, repetitions))


def _graphs(scale: Scale, users: int, repetitions: int) -> Figure:
    times: dict[bool, Times] = {}
    for recorded in (False, True):
        runner = _alone(scale, users, cuda_graphs=recorded)
        times[recorded] = _time(scale, repetitions, _steps(scale, runner, users))
        runner.close()
    details = {"ms with": 1e3 * times[True].median, "ms without": 1e3 * times[False].median}
    return Figure(*ratio(times[False], times[True]), details=details)


def peer(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Tokens a second over those of transformers."""
    for users in scale.users:
        yield Case(f"{users} users", partial(_peer, scale, users, repetitions))


def _peer(scale: Scale, users: int, repetitions: int) -> Figure:
    runner = _alone(scale, users)
    ours = _time(scale, repetitions, _steps(scale, runner, users))
    runner.close()
    del runner
    if not scale.tiny:
        torch.cuda.empty_cache()
    theirs = _time(scale, repetitions, _their_steps(scale, users))
    rates = {"tokens/s": users / ours.median, "transformers'": users / theirs.median}
    return Figure(*ratio(theirs, ours), details=rates)


def _their_steps(scale: Scale, users: int) -> Callable[[], object]:
    """Steps of transformers' model, each user's last token again and again, as of ours."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    left_out = ("architectures", "model_type", "torch_dtype")
    config = LlamaConfig(**{k: v for k, v in scale.config.items() if k not in left_out})
    dtype: torch.dtype = getattr(torch, scale.dtype)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(scale.device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    before = torch.ones(users, scale.context - 1, dtype=torch.int64, device=scale.device)
    with torch.inference_mode():
        cache = DynamicCache()
        some = 1 if scale.tiny else 256  # tokens of each user at a time
        for start in range(0, scale.context - 1, some):
            model(before[:, start : start + some], past_key_values=cache, logits_to_keep=1)
    tokens = before[:, :1]

    @torch.inference_mode()
    def step() -> object:
        nonlocal tokens
        logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
        tokens = logits[:, -1:].argmax(-1)
        result = tokens.cpu()  # as a server has to know them
        cache.crop(-1)  # and the next step begins as this one did
        return result

    return step


def _alone(scale: Scale, users: int, *, cuda_graphs: bool = True) -> TorchRunner:
    home = VirtualHome(VirtualWorld(1, device=scale.device), 0)
    runner, _ = make_runner(scale, home, Layout(), users, cuda_graphs=cuda_graphs)
    runner.warm_up()
    return runner


def _steps(scale: Scale, runner: TorchRunner, users: int) -> Callable[[], object]:
    """A call is a step; the first brings the sampling settings."""
    runner.step(decodes(scale, users, 0))
    again = decodes(scale, users, 1)
    return lambda: runner.step(again)


def _time(scale: Scale, repetitions: int, step: Callable[[], object]) -> Times:
    """Of a step, on the host: each one waits for its result."""
    step()
    return Times(tuple(host_clock(step, scale.steps) for _ in range(repetitions)))


def _part_of_bandwidth(
    scale: Scale, runner: TorchRunner, layout: Layout, users: int, repetitions: int
) -> Figure:
    step = _steps(scale, runner, users)
    copy = copying(scale.copied, scale.device)
    clock = host_clock if scale.tiny else gpu_clock
    step()
    copy()
    steps, copies = [], []
    for _ in range(repetitions):  # in turns
        steps.append(host_clock(step, scale.steps))
        copies.append(clock(copy, 1 if scale.tiny else COPIES))
    nbytes = scale.bytes_read(layout, users)
    times, of_copy = Times(tuple(steps)), Times(tuple(copies))
    part: Ratio = ratio(of_copy, times, nbytes / scale.copied)
    return Figure(
        *part,
        details={
            "ms": 1e3 * times.median,
            "tokens/s": users / times.median,
            "GB/s": 1e-9 * nbytes / times.median,
            "copy's": 1e-9 * scale.copied / of_copy.median,
        },
    )


PARTS: Parts = {
    "decode": decode,
    "peer": peer,
    "graphs": graphs,
    "shard": shard,
    "together": together,
}
