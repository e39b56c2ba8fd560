"""Steps of a model on one device: their time, their kernels, and their share of the bandwidth."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from harness.report import Case, Figure
from harness.timing import Ratio, Times, copying, ratio

from model.model import GREEDY, Scale, decodes, make_runner, mixed_step
from weft.kernels.gpu.tuning.clock import gpu_clock, host_clock
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.interface import DispatchingRunner, SlotSampling
from weft.models.spec.layout import Layout
from weft.models.torch.runner import TorchRunner

COPIES = 5
"""Of the bandwidth, in each repetition."""

SHOWN = 0.005
"""Kernels with a smaller share of a step are summed up."""

SETTINGS = {
    "greedy": GREEDY,
    "temperature 1": SlotSampling(slot=0, temperature=1.0),
    "top-k 50, top-p 0.95": SlotSampling(slot=0, temperature=1.0, top_k=50, top_p=0.95),
}

_Runners = Callable[[], TorchRunner]


def step(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Decodes of so many users: time, kernels, and what other sampling settings add."""
    runner = _shared(scale)
    for users in scale.users:
        yield Case(f"{users} users", partial(_step, scale, runner, users, repetitions))
        yield Case(f"{users} users, kernels", partial(_kernels, scale, runner, users))
        yield Case(f"{users} users, sampling", partial(_sampling, scale, runner, users))


def mixed(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Steps with prompts: one alone, and the end of one beside decodes."""
    runner = _shared(scale)
    prompt, suffix = scale.prompt
    users = sorted(scale.users)[len(scale.users) // 2]
    alone, beside = f"a prompt of {prompt} tokens", f"{suffix} tokens beside {users} decodes"
    for name, queries, contexts in (
        (alone, [prompt], [prompt]),
        (beside, [1] * users + [suffix], [scale.context] * (users + 1)),
    ):
        made = partial(_mixed, scale, runner, queries, contexts, repetitions)
        yield Case(name, made)


def _shared(scale: Scale) -> _Runners:
    """Make one runner, when it is first needed, for all cases of a part."""

    @cache
    def make() -> TorchRunner:
        most = max(scale.users) + 1
        tokens = max(most, *scale.prompt)
        return alone(scale, most, graph_sizes=scale.users, max_tokens=tokens)

    return make


def _step(scale: Scale, runner: _Runners, users: int, repetitions: int) -> Figure:
    figure = part_of_bandwidth(scale, runner(), Layout(), users, repetitions)
    waits = _waits(scale, steps_of(scale, runner(), users))
    return replace(figure, details={**(figure.details or {}), "waits for the device": waits})


def _waits(scale: Scale, step: Callable[[], object]) -> int:
    """Count how often the host waits for the device in a step."""
    if scale.tiny:
        return 1  # torch counts them on CUDA only
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in seen)


def _kernels(scale: Scale, runner: _Runners, users: int) -> Figure:
    return _profiled(scale, steps_of(scale, runner(), users))


def _profiled(scale: Scale, step: Callable[[], object]) -> Figure:
    """The device's busy share of a step, and each kernel's microseconds."""
    step()
    seconds = host_clock(step, scale.steps)
    kind = (
        torch.profiler.ProfilerActivity.CPU if scale.tiny else torch.profiler.ProfilerActivity.CUDA
    )
    with torch.profiler.profile(activities=[kind]) as profile:
        for _ in range(scale.steps):
            step()
    found: dict[str, float] = {}
    rest = launches = 0.0
    for event in profile.key_averages():
        on_device = event.device_type.name != "CPU"
        if on_device == scale.tiny:
            continue
        total = event.self_cpu_time_total if scale.tiny else event.self_device_time_total
        each, calls = total / scale.steps, event.count / scale.steps
        launches += calls
        if each >= SHOWN * seconds * 1e6:
            found[f"us {event.key[:60]} x {calls:g}"] = each
        else:
            rest += each
    busy = (sum(found.values()) + rest) * 1e-6 / seconds
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
    details = {"ms": 1e3 * seconds, "launches": launches, **ordered, "us others": rest}
    return Figure(busy, "busy", busy, busy, details=details)


def _sampling(scale: Scale, runner: _Runners, users: int) -> Figure:
    """A step with the usual sampling settings over a greedy one."""
    times = {
        name: time_of(scale, 3, steps_of(scale, runner(), users, settings))
        for name, settings in SETTINGS.items()
    }
    *_, usual = times.values()
    details = {f"ms {name}": 1e3 * each.median for name, each in times.items()}
    return Figure(*ratio(usual, times["greedy"]), details=details)


def _mixed(
    scale: Scale,
    runner: _Runners,
    queries: Sequence[int],
    contexts: Sequence[int],
    repetitions: int,
) -> Figure:
    """The share of the device's rate for products."""
    runner().step(mixed_step(scale, queries, contexts, 0))
    again = mixed_step(scale, queries, contexts, 1)

    def step() -> object:
        return runner().step(again)

    dtype: torch.dtype = getattr(torch, scale.dtype)
    m, n, k = scale.product
    x, w = (torch.randn(s, dtype=dtype, device=scale.device) for s in ((m, k), (k, n)))
    clock = host_clock if scale.tiny else gpu_clock
    product = partial(torch.matmul, x, w)
    product()
    times = time_of(scale, repetitions, step)
    rates = Times(tuple(clock(product, COPIES) for _ in range(repetitions)))
    weights = scale.spec.weight_bytes(scale.dtype) / dtype.itemsize - scale.spec.embedding.size
    operations = 2 * weights * sum(queries)  # of products; attention is not counted
    profiled = _profiled(replace(scale, steps=2), step)
    details = {
        "ms": 1e3 * times.median,
        "TFLOP/s": 1e-12 * operations / times.median,
        "busy": profiled.value,
        **(profiled.details or {}),
    }
    return Figure(*ratio(rates, times, operations / (2 * m * n * k)), details=details)


def alone(
    scale: Scale,
    users: int,
    *,
    graph_sizes: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> TorchRunner:
    """A runner without other ranks, warmed up; see make_runner."""
    home = VirtualHome(VirtualWorld(1, device=scale.device), 0)
    runner, _ = make_runner(
        scale, home, Layout(), users, graph_sizes=graph_sizes, max_tokens=max_tokens
    )
    runner.warm_up()
    return runner


def steps_of(
    scale: Scale, runner: TorchRunner, users: int, settings: SlotSampling = GREEDY
) -> Callable[[], object]:
    """A call begins a step, and reads the one before, as a server does."""
    runner.step(decodes(scale, users, 0, settings))
    again = decodes(scale, users, 1)
    if not isinstance(runner, DispatchingRunner):
        return lambda: runner.step(again)
    dispatch = runner.dispatch
    pending = deque([dispatch(again)])

    def step() -> object:
        pending.append(dispatch(again))
        return pending.popleft()()

    return step


def time_of(scale: Scale, repetitions: int, step: Callable[[], object]) -> Times:
    """Of a step, on the host."""
    step()
    return Times(tuple(host_clock(step, scale.steps) for _ in range(repetitions)))


def part_of_bandwidth(
    scale: Scale, runner: TorchRunner, layout: Layout, users: int, repetitions: int
) -> Figure:
    """A step's share of a copy's bandwidth, both in this run."""
    step = steps_of(scale, runner, users)
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
