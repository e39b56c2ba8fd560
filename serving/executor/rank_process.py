"""One rank of a model, in a process of its own: does what its controller puts on the ring.

A process (`python -m weft.serving.executor.rank_process`, see child.py) that node.py
starts. A byte on its socket wakes it for each step, in the order of the steps;
on the socket it says that it is ready, what steps have produced if it is, in the
last stage, the first rank of a copy of attention, and why it ends.
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
"""Of Linux's prctl: the signal that this process gets when its parent ends."""


class RankOrders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank is told at its start.

    Attributes:
        config: of the engine.
        load_model: "module:function" that loads this rank's part of the model.
        rank, world_size: this one's number, and how many there are.
        copy: of attention, to which it belongs.
        answers: whether it says what the copy's steps have produced.
        first, ranks_on_node: the first rank of this node, and how many it has.
        host, address: of the first rank's node of all, and of this one; see RankContext.
        devices: see RankContext.
        socket, ring: file descriptors that it has been given.
    """

    config: EngineConfig
    load_model: str
    rank: int
    world_size: int
    copy: int
    sends_output: bool
    first_on_node: int
    ranks_on_node: int
    rendezvous_host: str
    address: str
    devices: RankDevices
    socket: int = -1
    ring: int = -1


def serve(orders: RankOrders, channel: socket.socket) -> None:
    """Load this rank's part, then run each step, until the controller hangs up.

    Raises:
        Exception: what loading or a step raised; the controller has been told.
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
    """The first rank of all shows how far it is."""
    if orders.rank or orders.config.replica.number:
        return nullcontext(lambda done, total: None)
    return show_progress("loading")


def _run(runner: ModelRunner, orders: RankOrders, ring: StepRing, channel: socket.socket) -> None:
    """Run each step; where devices work on their own, begin it, and let a thread wait for it."""
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
            _end(1)  # the main thread may be stuck in the next step

    with ThreadPoolExecutor(1, thread_name_prefix="weft-readback") as waiting:
        while channel.recv(1):
            step += 1
            ring.begun[column] = ring.done[column] + 1
            batch = decode_step(ring.read(step), orders.copy)
            if dispatch is None:
                finish(step, batch, partial(runner.step, batch))
                continue
            run = dispatch(batch)
            # Where ranks that have dispatched the step meet, on the devices.
            ring.exchanges[column] += 1
            ring.rounds[column] += 1
            waiting.submit(finish_dispatched, step, batch, run)
    runner.close()


def _send(channel: socket.socket, message: FromRank) -> None:
    data = encoder.encode(message)
    channel.sendall(len(data).to_bytes(8, "little") + data)


def main() -> None:
    """Be the process of a rank."""
    gc.disable()  # imports make little garbage; see child.settle_garbage_collector
    # With the engine's process, also if this one is stopped, or stuck in a call.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    orders = child_process.begin(RankOrders)
    status = 0
    with socket.socket(fileno=orders.socket) as channel:
        try:
            serve(orders, channel)
        except WeftError:
            status = 1  # the controller has been told, and says so
    _end(status)


def _end(status: int) -> NoReturn:
    """End this process, in which nothing is left to be done.

    Taking Python down while a thread runs frees little, of which the kernels' interpreter would
    complain.
    """
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
