"""Processes that run one model together: one per node, with that node's devices.

    process 0                        process 1
    opens a port, sends it      ──►  connects there           jax.distributed
    devices 0, 1                     devices 2, 3             jax.devices(): the same on both
    a program                        the same program         XLA's collectives, in the same order

Every process receives the same steps and dispatches the same programs (SPMD). Results are
replicated, so any process can report them. TPUs communicate over their own links, and libtpu knows
the nodes in a slice. CPUs communicate through gloo.
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
"""Seconds for which exiting processes wait for each other."""


def meet(
    rank: int,
    world_size: int,
    find_port: Callable[[int | None], int],
    timeout: float,
    *,
    host: str,
    address: str,
) -> list[jax.Device]:
    """Rendezvous with the other processes. Collective.

    Call it once per process, before jax looks for devices. The arguments are those of
    models.torch.group.meet; sockets listen at `host` and `address` only.

    Returns:
        the devices of all processes, in the same order everywhere.

    Raises:
        jax.errors.JaxRuntimeError: a process did not arrive in time.
    """
    # Only these processes may end each other, and no proxy may carry their messages.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    os.environ.update(no_grpc_proxy=host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as held:
        if rank == 0:
            # Hold the port until jax listens there, so that nobody else gets it.
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
        # jax itself would let gloo listen at the address that the node's name resolves to.
        gloo = _jax.make_gloo_tcp_collectives(distributed.global_state.client, hostname=address)
        return xla_bridge.make_cpu_client(gloo)

    register_backend_factory("cpu", cpus, fail_quietly=False)
    devices: list[jax.Device] = jax.devices()
    # From here on, jax uses this number only to let process 0 alone write the compilation cache in
    # a shared folder. But nodes have separate folders.
    distributed.global_state.process_id = 0
    return devices


def minimum(number: int, timeout: float) -> int:
    """Return the minimum over all processes. Collective; once per process.

    Args:
        number: this process's number.
        timeout: seconds to wait for the others.

    Raises:
        jax.errors.JaxRuntimeError: a process did not report in time.
    """
    client, milliseconds = distributed.global_state.client, int(1000 * timeout)
    client.key_value_set(f"weft/{jax.process_index()}", str(number))
    all_processes = range(jax.process_count())
    return min(int(client.blocking_key_value_get(f"weft/{i}", milliseconds)) for i in all_processes)


def leave() -> None:
    """Leave the other processes, if any, once all do."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
