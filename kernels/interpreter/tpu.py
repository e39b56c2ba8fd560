"""Pallas' TPU interpreter, made strict: problems that it prints or ignores are errors here.

The interpreter runs a kernel on forced CPU devices with remote DMA, semaphores and vector clocks.
It poisons memory with NaN, and raises on reads and writes out of bounds. `strict` adds checks:

    races       The interpreter prints races and forgets them when the next kernel starts. `strict`
                keeps them.
    leftovers   The interpreter prints semaphores that do not end at zero, but looks before other
                devices are done. `strict` looks at all of them when the last device is done.
    entry       A device may touch another device's buffers and semaphores only after it has heard
                from it in this kernel, directly or through others. Until then, XLA may use that
                memory otherwise. The interpreter does not detect a missing barrier. `strict` asks
                the vector clocks at each remote DMA, and at each signal to a semaphore other than
                the barrier's: has anything on the target happened before?
    exit        The barrier's semaphore outlives the kernel. Suppose a device exits while a device
                that it signalled there still waits. It could signal again from the next call, and
                that signal would be mistaken for another device's. The vector clocks are asked when
                a device exits.
    deadlock    The interpreter waits forever. In `strict`, a watchdog thread looks for this state:
                every device is done or waits, none of them for something available, and nothing
                has happened between two looks. It then names the devices and their waits.

This uses jax._src, because there is no public interface; constraints.txt pins jax. A process stays
under `strict` for its whole life (worker.py), because an error destroys the interpreter's state.
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
"""When a DMA happens: as soon as it starts, or as late as its first wait."""

CLOCKS = 64
"""Entries of a vector clock. DMAs use those beyond the devices; too few would hide races."""

WATCH_INTERVAL = 0.5
"""Seconds between two looks by the watchdog."""


class ProtocolError(Exception):
    """A kernel breaks a rule, or devices wait forever."""


class _State:
    """Findings in one kernel, and the current waits."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.findings: list[str] = []
        self.events = 0
        self.waiting: dict[int, tuple[shared_memory.Semaphore, int, str]] = {}
        self.done: set[int] = set()
        self.signalled: dict[int, set[int]] = {}  # by core: targets of its barrier signals
        self.passed: dict[int, int] = {}  # a core's own clock when it passed the barrier

    def report(self, finding: str) -> None:
        with self.lock:
            if finding not in self.findings:
                self.findings.append(finding)


def params(mode: DmaMode, cores: int = 1) -> pltpu.InterpretParams:
    """Return the interpreter's parameters for `strict`.

    Args:
        mode: when DMAs happen.
        cores: cores per device; 2 for a chip with megacore.
    """
    return pltpu.InterpretParams(
        dma_execution_mode=mode,
        detect_races=True,
        uninitialized_memory="nan",
        num_cores_or_threads=cores,
        vector_clock_size=CLOCKS,
        random_seed=0,
    )


def emulate_chip(cores: int) -> None:
    """Emulate a chip with this number of cores per device: 1 is a v5e, 2 a v5p."""
    chip = pltpu.ChipVersion("v5e" if cores == 1 else "v5p")
    tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(chip, cores)
    pltpu.get_tpu_info.cache_clear()


def strict() -> Callable[[], list[str]]:
    """Make the interpreter strict for this process; return a function for the findings."""
    state = _State()
    race_detection_state.print = lambda text: state.report(_race_finding(text))
    replaced = {
        (ipc, "dma_start"): _check_entry(state, ipc.dma_start, sem=9, target=11),
        (ipc, "semaphore_signal"): _check_entry(state, ipc.semaphore_signal, sem=3, target=5),
        (ipc, "_validate"): _check_exit(state),
        (ipc, "_clear_shared_memory"): _check_leftovers(state, ipc._clear_shared_memory),
        (shared_memory.Semaphore, "wait"): _track_waits(state, shared_memory.Semaphore.wait),
    }
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    threading.Thread(target=_watch, args=(state,), daemon=True).start()
    return lambda: list(state.findings)


def _race_finding(text: str) -> str:
    """Remove the clocks from the detector's output, because they differ between runs."""
    accesses = [
        line.strip() for line in text.splitlines() if line.startswith(("  read", "  write"))
    ]
    return f"race: {' and '.join(accesses)}"


def _check_entry(
    state: _State, call: Callable[..., Any], *, sem: int, target: int
) -> Callable[..., Any]:
    """Wrap `call`: first check that the device has heard from its target."""

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


def _check_exit(state: _State) -> Callable[..., Any]:
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


def _check_leftovers(state: _State, clear: Callable[[], None]) -> Callable[[], None]:
    """Wrap `clear`: when all devices are done, report semaphores with unused counts."""

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


def _track_waits(state: _State, wait: Callable[..., None]) -> Callable[..., None]:
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


def _describe_deadlock(state: _State) -> str:
    """Describe all waits if no device can continue; otherwise return an empty string."""
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
        time.sleep(WATCH_INTERVAL)
        with state.lock:
            now, events = _describe_deadlock(state), state.events
        if now and now == before and events == seen:
            state.report(f"deadlock: {now}")
            memory = ipc._get_shared_memory()
            memory.set_failed(ProtocolError(f"deadlock: {now}"), top_level=False)
            return
        before, seen = now, events
