"""The engine cores: started together, watched, and restarted when they fail.

A core runs in its own process, or in a thread of this process. With `dp` there are several equal
cores. When a core fails, its requests end with an error. The rest depends on `restart`:

    a core fails ──► its requests end with an error ──► the engine fails, and all other cores end
                                                    └─► with `restart`, a new core replaces it
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import zmq

from weft.errors import EngineError, ModelError, WeftError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core_client import CoreClient
from weft.serving.engine.core_process import share_out
from weft.serving.engine.protocol import EngineInfo, EngineStats
from weft.serving.executor.nodes.inventory import own_inventory
from weft.serving.executor.placement import Inventory, kind_of

if TYPE_CHECKING:
    from weft.serving.executor.nodes.node_pool import NodePool

Status = Literal["ready", "restarting", "stalled", "draining", "dead"]

LOAD_MODEL = "weft.serving.executor.loading:load_model"
MAX_RESTARTS = 3  # of one core, one after another, without success
END_GRACE = 2.0  # seconds for a failed core to end by itself
SLOW_RELOAD = 10.0  # a restarted core may load this many times as long as at first

logger = logging.getLogger(__name__)


class CoreSupervisor:
    """Runs the cores of an engine.

    Args:
        config: settings of the engine.
        in_process: run the cores in threads instead of processes.
        load_model: "module:function" that loads the model in a core.
        restart: restart a core that has failed. A core that is stuck in a thread cannot be ended,
            and goes on.

    Attributes:
        cores: one for each replica of the engine.
        info: sizes of the loaded model; of the cores' KV caches, the smallest.
        failure: the error that ended the engine; None while it runs or after `shutdown`.
        restarts: number of restarts of cores.
        draining: the engine shuts down, and requests may finish.
    """

    info: EngineInfo

    def __init__(
        self, config: EngineConfig, in_process: bool, load_model: str, restart: bool
    ) -> None:
        self.cores: list[CoreClient] = []
        self.failure: EngineError | None = None
        self.restarts = 0
        self._config = config
        self._in_process = in_process
        self._load_model = load_model
        self._restart = restart
        self.draining = False
        self._past = EngineStats()
        self._pool: NodePool | None = None
        self._shares: list[EngineConfig] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._load_seconds = 0.0

    @property
    def stats(self) -> EngineStats:
        """Sums over all cores, from the last message of each."""
        return sum((core.stats for core in self.cores), self._past)

    @property
    def status(self) -> Status:
        """The state of the engine; see `AsyncEngine.status`."""
        states = {core.status for core in self.cores}
        lost: Status = "stalled" if "stalled" in states else "dead"
        if self.draining:
            return "draining" if "ready" in states else lost
        if self.failure is not None or not (self._restart or states == {"ready"}):
            return lost
        return "ready" if "ready" in states else "restarting"

    @property
    def ready(self) -> list[CoreClient]:
        """The cores that serve."""
        return [core for core in self.cores if core.status == "ready"]

    @property
    def seconds_to_wait(self) -> int:
        """Estimate of the seconds until a core that is restarting is ready."""
        loading = (core.age for core in self.cores if core.status == "loading")
        return max(1, math.ceil(self._load_seconds - max(loading, default=0.0)))

    async def spawn(self, on_spawned: Callable[[], None]) -> None:
        """Start the cores; see `AsyncEngine.start`."""
        self._shares = await self._share_out(on_spawned)
        self.cores = [CoreClient(share) for share in self._shares]
        for core in self.cores:
            await core.spawn(self._load_model, in_process=self._in_process)
        on_spawned()

    async def load(self) -> None:
        """Wait until all cores have loaded the model, and supervise them from then on.

        Raises:
            ConfigError, ModelError: a core cannot load the model.
            EngineError: a core ended.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for number, core in enumerate(self.cores):
                    group.create_task(core.load(partial(self._announce_port, number)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self.info = min((core.info for core in self.cores), key=lambda info: info.num_blocks)
        self._load_seconds = max(core.load_seconds for core in self.cores)
        self._tasks = [asyncio.create_task(self._supervise(i)) for i in range(self._config.dp)]

    async def abandon(self) -> None:
        """End cores that could not all be started."""
        for task in self._tasks:
            task.cancel()
        for core in self.cores:
            await core.close()
        if self._pool is not None:
            await self._pool.close()

    async def shutdown(self, *, drain: bool, timeout: float) -> None:
        """End the cores; see `AsyncEngine.shutdown`."""
        for core, task in zip(self.cores, self._tasks, strict=True):
            if core.status == "loading":
                task.cancel()
        await asyncio.gather(*(core.shutdown(drain=drain, timeout=timeout) for core in self.cores))
        await asyncio.wait(self._tasks)
        if self._pool is not None:
            await self._pool.close()

    async def _share_out(self, on_spawned: Callable[[], None]) -> list[EngineConfig]:
        """Return each core's settings, once all nodes have joined.

        Raises:
            ConfigError: the devices do not suffice.
        """
        config = self._config
        if config.executor == "ray":  # Ray knows the nodes and chooses suitable ones
            most = config.dp * config.world_size
            kind = kind_of(config)  # auto: no node is asked
            offer = Inventory(
                gpus=(0,) * most if kind == "cuda" else (),
                tpus=(0,) * most if kind == "tpu" else (),
            )
            group = secrets.token_hex(4)
            return [
                replace(share, replica=replace(share.replica, group=group))
                for share in share_out(config, [offer] * config.nodes)
            ]
        gpus = config.device in ("auto", "cuda") and config.backend != "jax"
        offers = [own_inventory(config, gpus=gpus)]
        if config.nodes > 1:
            from weft.serving.executor.loading import check_ranks
            from weft.serving.executor.nodes.node_pool import NodePool

            if self._load_model == LOAD_MODEL:
                check_ranks(config)  # before the user is asked to start other nodes
            self._pool = NodePool(config)
            on_spawned()
            offers += await self._pool.inventories()
            config = replace(config, node_token=self._pool.token, node_token_file=None)
        shares = share_out(config, offers)
        if self._pool is not None:
            self._pool.assign(shares)
        return shares

    def _announce_port(self, number: int, port: int) -> None:
        """Tell a core's nodes the port at which the core waits for them."""
        if self._pool is not None:
            self._pool.connect_nodes(number, port)

    async def _supervise(self, number: int) -> None:
        """Run a core, and the cores that replace it."""
        tries = 0
        while True:
            core = self.cores[number]
            try:
                await self._run_core(core, number)
                return
            except WeftError as error:
                tries = 0 if core.works else tries
                failure = self._restart_error(error, tries)
                if failure is None:
                    logger.warning("%s; it is started again", error)
                else:
                    self._fail(failure)
                if core.status != "loading":  # a core that loads does not listen yet
                    await core.shutdown(drain=False, timeout=END_GRACE)
            except Exception as error:  # a bug, which nobody else would report
                self._fail(EngineError(f"{core.name}: {error!r}"))
                raise
            finally:
                await core.close()
            if failure is not None or self.draining:
                return
            tries += 1
            self.restarts += 1
            self._past += core.stats
            self.cores[number] = CoreClient(self._shares[number])

    async def _run_core(self, core: CoreClient, number: int) -> None:
        """Load a core if necessary, and serve until the core has shut down.

        Raises:
            ConfigError, ModelError: the core cannot be loaded.
            EngineError: the core ended, failed or is stuck.
        """
        if core.status == "loading":
            if self._pool is not None:
                core.config = await self._pool.wait_for_slice(number)
            patience = math.ceil(self._config.stall_timeout + SLOW_RELOAD * self._load_seconds)
            try:
                async with asyncio.timeout(patience):
                    await core.spawn(self._load_model, in_process=self._in_process)
                    await core.load(partial(self._announce_port, number))
            except TimeoutError:
                raise EngineError(f"{core.name} did not load within {patience} s") from None
            except (OSError, zmq.ZMQError) as error:  # no more processes, no space for a socket
                raise EngineError(f"{core.name} cannot be started: {error}") from error
            if core.info.vocab_size != self.info.vocab_size:  # the tokenizer is the old one
                raise ModelError(f"{self._config.model} is not the model that it was")
            self.info = min(
                (other.info for other in self.cores if other.status == "ready"),
                key=lambda info: info.num_blocks,
            )
            logger.warning("%s serves again", core.name)
        await core.serve()

    def _restart_error(self, error: WeftError, tries: int) -> EngineError | None:
        """Return why a core is not restarted after an error; None if it is.

        A ConfigError does not prevent a restart: the settings worked at first, and the memory or
        the nodes that are missing now may come back.

        Args:
            error: the error that ended the core.
            tries: number of restarts before this one that did not help.
        """
        if isinstance(error, ModelError):
            return EngineError(f"the engine cannot be started again: {error}")
        if self.draining or not self._restart or self.failure is not None:
            return error if isinstance(error, EngineError) else EngineError(str(error))
        if tries == MAX_RESTARTS:
            return EngineError(f"{error}; it was started {tries} times in vain")
        return None

    def _fail(self, failure: EngineError) -> None:
        """End the engine with an error; a core that drains may finish its requests."""
        self.failure = self.failure or failure
        if not self.draining:
            for core in self.cores:
                core.drop_all(failure)
