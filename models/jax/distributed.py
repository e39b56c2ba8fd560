"""Processes that run one model together: one on each machine, with that machine's devices.

    process 0                        process 1
    opens a port, tells it      ──►  connects there           jax.distributed
    devices 0, 1                     devices 2, 3             jax.devices(): the same on both
    a program                        the same program         XLA's collectives, in the same order

Every process is given the same steps and dispatches the same programs (SPMD); what is read of a
step is replicated, so that any of them can say it. TPUs exchange over their own links, for which
libtpu knows the machines of a slice; CPUs exchange through gloo.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import jax
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax
from jax.extend.backend import register_backend_factory

SHUTDOWN = 5
"""Seconds that processes which end wait for each other."""


def meet(
    rank: int,
    world_size: int,
    find_port: Callable[[int | None], int],
    timeout: float,
    *,
    host: str,
    address: str,
) -> list[jax.Device]:
    """Meet the other processes, once in a process, before jax looks for devices. Collective.

    As models.torch.group.meet, of which the arguments are; what is opened listens at `host` and
    `address` alone.

    Returns:
        the devices of all processes, in an order that is the same for all.

    Raises:
        jax.errors.JaxRuntimeError: they did not come.
    """
    # Theirs alone to end each other, and none of a proxy's to carry what they say.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    os.environ.update(no_grpc_proxy=host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as held:
        if rank == 0:
            # Until jax listens there, which is not told in time where that is: nobody else gets it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, 0))
            port = find_port(held.getsockname()[1])
        else:
            port = find_port(None)
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        jax.distributed.initialize(
            at,
            world_size,
            rank,
            cluster_detection_method="deactivate",
            coordinator_bind_address=at,
            initialization_timeout=int(timeout),
            heartbeat_timeout_seconds=int(timeout),
            shutdown_timeout_seconds=SHUTDOWN,
        )

    def cpus() -> object:
        # jax's own way lets gloo listen where the host's name leads.
        gloo = _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname=address)
        return xla_bridge.make_cpu_client(gloo)

    register_backend_factory("cpu", cpus, fail_quietly=False)
    devices: list[jax.Device] = jax.devices()
    # Now this number only says that the first one alone keeps what is compiled, in a folder that
    # all share. But machines have folders of their own.
    distributed.global_state.process_id = 0
    return devices


def least(number: int, timeout: float) -> int:
    """Of the numbers of all processes. Collective; once in a process.

    Raises:
        jax.errors.JaxRuntimeError: some did not say theirs within so many seconds.
    """
    client, milliseconds = distributed.global_state.client, int(1000 * timeout)
    client.key_value_set(f"weft/{jax.process_index()}", str(number))
    all_processes = range(jax.process_count())
    return min(int(client.blocking_key_value_get(f"weft/{i}", milliseconds)) for i in all_processes)


def leave() -> None:
    """Part from the other processes, if there are any, once all do."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
