"""One rank of a model, in its own process: runs the steps in the step ring.

node.py starts the process (`python -m weft.serving.executor.rank_process`, see child_process.py).
One byte on the rank's socket announces each step, in order. On the same socket the rank reports
that it is loaded and why it ends. In the last pipeline stage, the first rank in each attention
group also reports each output.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn

import msgspec

from weft.errors import WeftError
from weft.models.interface import DispatchingRunner, ModelRunner, StepInput, StepOutput
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import RankDevices
from weft.serving.executor import child_process
from weft.serving.executor.child_process import Failed
from weft.serving.executor.loading import LoadedModel, Progress, RankContext, show_progress
from weft.serving.executor.rank_messages import (
    Done,
    FromRank,
    Loaded,
    RendezvousPort,
    decode_step,
    encoder,
)
from weft.serving.executor.step_ring import MET, READ, StepRing

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal to receive when the parent ends."""


class RankOrders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Orders for a rank process, read from stdin.

    Attributes:
        config: settings of the engine.
        load_model: "module:function" that loads this rank's part of the model.
        rank, world_size: number of this rank, and number of ranks.
        group: index of this rank's attention group.
        sends_output: whether this rank sends the output of its group's steps.
        first_on_node, ranks_on_node: first rank of this node, and number of ranks on it.
        rendezvous_host, address: addresses of rank 0's node and of this node; see RankContext.
        devices: see RankContext.
        socket, ring: inherited file descriptors.
    """

    config: EngineConfig
    load_model: str
    rank: int
    world_size: int
    group: int
    sends_output: bool
    first_on_node: int
    ranks_on_node: int
    rendezvous_host: str
    address: str
    devices: RankDevices
    socket: int = -1
    ring: int = -1


def serve(orders: RankOrders, channel: socket.socket) -> None:
    """Load this rank's part of the model, then run steps until the controller hangs up.

    Raises:
        Exception: loading or a step failed. The controller has received the error.
    """
    send = partial(_send, channel)

    ring = StepRing(orders.ranks_on_node, orders.ring, stages=orders.config.pp)
    column = orders.rank - orders.first_on_node

    def rendezvous_port(own: int | None) -> int:
        ring.loaded[column] = MET
        if own is not None:
            send(RendezvousPort(own))
            return own
        return int.from_bytes(channel.recv(8, socket.MSG_WAITALL), "little")

    def count_exchange(of_all: bool) -> None:
        ring.exchanges[column] += 1
        ring.rounds[column] += of_all

    context = RankContext(
        orders.rank,
        orders.world_size,
        rendezvous_port,
        count_exchange,
        orders.ranks_on_node,
        orders.rendezvous_host,
        orders.address,
        orders.devices,
    )
    try:
        load = child_process.find(orders.load_model)
        with _shown_progress(orders) as show:

            def count_read(done: int, total: int) -> None:
                ring.loaded[column] = MET + READ * done // total
                show(done, total)

            loaded: LoadedModel = load(orders.config, count_read, context)
        ring.loaded[column] = MET + READ
        child_process.settle_garbage_collector()
        send(Loaded(loaded.info))
        _run(loaded.runner, orders, ring, channel)
    except Exception as error:
        send(Failed.of(error))
        raise


def _shown_progress(orders: RankOrders) -> AbstractContextManager[Progress]:
    """Show loading progress on rank 0 of the first engine only."""
    if orders.rank or orders.config.replica.number:
        return nullcontext(lambda done, total: None)
    return show_progress("loading")


def _run(runner: ModelRunner, orders: RankOrders, ring: StepRing, channel: socket.socket) -> None:
    """Run each step. On asynchronous devices dispatch it, and let a thread wait for the output."""
    column, step = orders.rank - orders.first_on_node, 0
    dispatch = runner.dispatch if isinstance(runner, DispatchingRunner) else None

    def finish(step: int, batch: StepInput, run: Callable[[], StepOutput]) -> None:
        ring.begun[column] = step
        began = time.perf_counter_ns()
        output = run()
        ring.busy[column] += (time.perf_counter_ns() - began) // 1000
        ring.done[column] = step
        if orders.sends_output:
            _send(channel, Done(output if len(batch.token_ids) else None))

    def finish_dispatched(step: int, batch: StepInput, run: Callable[[], StepOutput]) -> None:
        try:
            finish(step, batch, run)
        except Exception as error:
            _send(channel, Failed.of(error))
            logger.critical("step %d failed", step, exc_info=error)
            _exit(1)  # the main thread may be stuck in the next step

    with ThreadPoolExecutor(1, thread_name_prefix="weft-readback") as readback:
        while channel.recv(1):
            step += 1
            ring.begun[column] = ring.done[column] + 1
            batch = decode_step(ring.read(step), orders.group)
            if dispatch is None:
                finish(step, batch, partial(runner.step, batch))
                continue
            run = dispatch(batch)
            # A dispatched step counts as one exchange: the ranks meet on the devices.
            ring.exchanges[column] += 1
            ring.rounds[column] += 1
            readback.submit(finish_dispatched, step, batch, run)
    runner.close()


def _send(channel: socket.socket, message: FromRank) -> None:
    data = encoder.encode(message)
    channel.sendall(len(data).to_bytes(8, "little") + data)


def main() -> None:
    """Run this process as a rank."""
    gc.disable()  # imports make little garbage; see settle_garbage_collector
    # Die with the parent even when this process is stopped or stuck in a call.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    orders = child_process.begin(RankOrders)
    status = 0
    with socket.socket(fileno=orders.socket) as channel:
        try:
            serve(orders, channel)
        except WeftError:
            status = 1  # the controller has received the error and reports it
    _exit(status)


def _exit(status: int) -> NoReturn:
    """End this process at once.

    A regular shutdown of Python beside a running thread frees little, and the kernel interpreter
    would report the leftovers.
    """
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
