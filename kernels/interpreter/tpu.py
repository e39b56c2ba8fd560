"""Pallas' TPU interpreter, made strict: what it would print or pass over is an error here.

The interpreter runs a kernel on forced CPU devices with remote DMA, semaphores and vector clocks,
poisons memory with NaN, and raises when a kernel reads or writes out of bounds. `strict` adds:

    races       It prints them, and forgets them when the next kernel starts. Here they stay.
    leftovers   It prints semaphores that do not end at zero, and looks before other devices are
                done. Here all of them are looked at when the last device is.
    entry       A device may touch another one's buffers and semaphores only after it has heard
                from it, directly or through others, in this kernel: until then XLA may use that
                memory for something else. The interpreter does not see that a barrier is missing.
                Here each remote DMA, and each signal to a semaphore that is not the barrier's,
                asks the vector clocks: has anything of the target happened before?
    exit        The barrier's semaphore outlives the kernel. A device that leaves while one that it
                has signalled there still waits could signal it again, from the next call, and be
                taken for another one. Asked of the vector clocks when a device leaves.
    deadlock    It waits for ever. Here a thread watches: if every device is done or waits, none of
                them for something that is there, and nothing has happened between two looks, they
                are named with what they wait for.

This reaches into jax._src, for there is no public way; jax is pinned in constraints.txt. One
process interprets under `strict` for its whole life (worker.py): after an error its state is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from jax._src.pallas.mosaic import tpu_info
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as ipc
from jax._src.pallas.mosaic.interpret import race_detection_state, shared_memory
from jax.experimental.pallas import tpu as pltpu

DmaMode = Literal["eager", "on_wait"]
"""When a DMA happens: as it is started, or as late as somebody waits for it."""

CLOCKS = 64
"""Entries of a vector clock. Those beyond the devices are DMAs'; few would hide races."""

LOOK = 0.5
"""Seconds between two looks of the watchdog."""


class ProtocolError(Exception):
    """A kernel does what is not allowed, or devices wait for what never comes."""


class _State:
    """What was found in one kernel, and who waits for what."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.findings: list[str] = []
        self.events = 0
        self.waiting: dict[int, tuple[shared_memory.Semaphore, int, str]] = {}
        self.done: set[int] = set()
        self.signalled: dict[int, set[int]] = {}  # on the barrier semaphore, by core: which cores
        self.passed: dict[int, int] = {}  # the own clock of a core when it has passed the barrier

    def report(self, finding: str) -> None:
        with self.lock:
            if finding not in self.findings:
                self.findings.append(finding)


def params(mode: DmaMode, cores: int = 1) -> pltpu.InterpretParams:
    """What `strict` needs the interpreter to be told.

    Args:
        mode: when DMAs happen.
        cores: of a device; 2 for a chip with megacore.
    """
    return pltpu.InterpretParams(
        dma_execution_mode=mode,
        detect_races=True,
        uninitialized_memory="nan",
        num_cores_or_threads=cores,
        vector_clock_size=CLOCKS,
        random_seed=0,
    )


def be(cores: int) -> None:
    """Have kernels see a chip whose devices have so many cores: 1 is a v5e, 2 a v5p."""
    chip = pltpu.ChipVersion("v5e" if cores == 1 else "v5p")
    tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(chip, cores)
    pltpu.get_tpu_info.cache_clear()


def strict() -> Callable[[], list[str]]:
    """Make the interpreter strict for the rest of this process; what gives the findings so far."""
    state = _State()
    race_detection_state.print = lambda text: state.report(_race(text))
    replaced = {
        (ipc, "dma_start"): _touching(state, ipc.dma_start, sem=9, target=11),
        (ipc, "semaphore_signal"): _touching(state, ipc.semaphore_signal, sem=3, target=5),
        (ipc, "_validate"): _leaving(state),
        (ipc, "_clear_shared_memory"): _clearing(state, ipc._clear_shared_memory),
        (shared_memory.Semaphore, "wait"): _waiting(state, shared_memory.Semaphore.wait),
    }
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    threading.Thread(target=_watch, args=(state,), daemon=True).start()
    return lambda: list(state.findings)


def _race(text: str) -> str:
    """What the detector prints, without the clocks, of which no two runs have the same."""
    accesses = [
        line.strip() for line in text.splitlines() if line.startswith(("  read", "  write"))
    ]
    return f"race: {' and '.join(accesses)}"


def _touching(
    state: _State, call: Callable[..., Any], *, sem: int, target: int
) -> Callable[..., Any]:
    """`call`, after a look whether the device has heard from the one it touches."""

    def touch(*args: Any, **kwargs: Any) -> Any:
        memory = ipc._get_shared_memory()
        device, core = int(args[1]), int(args[2])
        to = device if args[target] is None else int(args[target])
        with memory.lock:
            state.events += 1
            barrier = int(args[sem]) in memory.fixed_id_sem
            clock = memory.clocks[memory.get_global_core_id(device, core)]
            heard = any(clock[i] for i in memory.get_global_core_ids(to))
            if barrier:
                targets = memory.get_global_core_ids(to)
                state.signalled.setdefault(memory.get_global_core_id(device, core), set()).add(
                    targets[core if len(targets) > 1 else 0]
                )
        if to != device and not barrier and not heard:
            what = "writes to" if call.__name__ == "dma_start" else "signals"
            state.report(
                f"missing barrier: device {device} {what} device {to} before it has heard from it"
            )
        return call(*args, **kwargs)

    touch.__name__ = call.__name__
    return touch


def _leaving(state: _State) -> Callable[..., Any]:
    def validate(token: Any, device_id: Any) -> Any:
        memory = ipc._get_shared_memory()
        cores = memory.get_global_core_ids(int(device_id))
        with memory.lock, state.lock:
            state.events += 1
            state.done.update(cores)
            early = [
                (core, other)
                for core in cores
                for other in state.signalled.get(core, ())
                if memory.clocks[core][other] < state.passed.get(other, 1 << 30)
            ]
        for core, other in early:
            state.report(f"early exit: core {core} leaves before core {other} is past the barrier")
        return token

    return validate


def _clearing(state: _State, clear: Callable[[], None]) -> Callable[[], None]:
    """All devices are done: what has a count that nobody waited for?"""

    def clean_up() -> None:
        memory = ipc._get_shared_memory()
        if memory._failure is None:
            for device in range(memory.num_devices):
                for sem, _ in memory.get_sempahores_with_nonzero_count(device):
                    count = sem.count_by_core[memory.get_global_core_id(device, 0)]
                    state.report(f"leftover: a semaphore of device {device} ends at {count}, not 0")
        for each in (state.done, state.signalled, state.passed):
            each.clear()
        clear()

    return clean_up


def _waiting(state: _State, wait: Callable[..., None]) -> Callable[..., None]:
    def waited(
        self: shared_memory.Semaphore, value: int, global_core_id: int, **kwargs: Any
    ) -> None:
        core = int(global_core_id)
        info = kwargs.get("logging_info")
        source = info.source_info if info else None
        where = ipc.source_info_util.summarize(source) if source else "an unknown line"
        with state.lock:
            state.events += 1
            state.waiting[core] = (self, int(value), where)
        try:
            wait(self, value, global_core_id, **kwargs)
            memory = self.shared_memory
            if self in memory.fixed_id_sem.values():
                state.passed[core] = int(memory.clocks[core][core]) + 1
        finally:
            with state.lock:
                state.events += 1
                del state.waiting[core]

    return waited


def _stuck(state: _State) -> str:
    """Who waits for what, if none can go on; else nothing."""
    memory = ipc._shared_memory
    if memory is None or not state.waiting:
        return ""
    if len(state.waiting) + len(state.done) < memory.num_cores:
        return ""
    lines = []
    for core, (sem, value, where) in sorted(state.waiting.items()):
        if sem.count_by_core[core] >= value or sem.tasks[core]:
            return ""
        lines.append(f"core {core} waits for {value}, has {sem.count_by_core[core]}, at {where}")
    return "; ".join(lines)


def _watch(state: _State) -> None:
    before, seen = "", -1
    while True:
        time.sleep(LOOK)
        with state.lock:
            now, events = _stuck(state), state.events
        if now and now == before and events == seen:
            state.report(f"deadlock: {now}")
            memory = ipc._get_shared_memory()
            memory.set_failed(ProtocolError(f"deadlock: {now}"), top_level=False)
            return
        before, seen = now, events
