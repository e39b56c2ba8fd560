"""jax in this process: which devices it has, where it keeps what it compiles, what it compiles.

`devices` is the one place where jax is told of devices, before it looks for them itself: on a
machine without TPUs it is held to the CPU, which is taken for as many devices as are needed.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError

if TYPE_CHECKING:
    import jax

GOOGLE = "0x1ae0"
TPUS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
"""What a PCI device says it is: vendor, and the kinds that jax's own code lists."""

FORCE_CPU_DEVICES = "--xla_force_host_platform_device_count"
INSTALL = "pip install 'weft[tpu]'"

logger = logging.getLogger(__name__)


def is_installed() -> bool:
    """Whether jax is."""
    return find_spec("jax") is not None


def finds_tpus(root: Path = Path("/")) -> bool:
    """Whether this machine has TPUs and jax can use them, without a look by jax, which takes them.

    Args:
        root: where /sys is; for tests.
    """
    return is_installed() and find_spec("libtpu") is not None and _has_tpus(root)


def devices(count: int, root: Path = Path("/"), *, interpreting: bool = False) -> list[jax.Device]:
    """`count` devices of this machine: TPUs if there are any, else parts of the CPU.

    Args:
        count: how many.
        root: where /sys is; for tests.
        interpreting: kernels will be interpreted on CPUs, which hangs where XLA has no more threads
            than devices.

    Raises:
        ConfigError: jax is missing, or has fewer.
    """
    if not is_installed():
        raise ConfigError(f"--backend is 'jax', which is not installed: {INSTALL}")
    if not _has_tpus(root):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        flags = os.environ.get("XLA_FLAGS", "")
        if FORCE_CPU_DEVICES not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {FORCE_CPU_DEVICES}={count}".strip()
        if interpreting:
            os.environ.setdefault("NPROC", str(2 * count + 2))
    import jax

    found: list[jax.Device] = jax.devices()
    if len(found) < count:
        kind = found[0].platform
        hint = (
            f"; jax has begun with that many in this process: set XLA_FLAGS={FORCE_CPU_DEVICES}="
            f"{count} before anything uses it"
            if kind == "cpu"
            else ""
        )
        raise ConfigError(f"--tp is {count}; jax has {len(found)} devices here ({kind}){hint}")
    return found[:count]


def described_devices(topology: str) -> list[jax.Device]:
    """TPUs that are not here, to compile for: of a slice such as v5e:4x4.

    Raises:
        ConfigError: jax or libtpu is missing, or there is no such slice.
    """
    if not is_installed() or find_spec("libtpu") is None:
        raise ConfigError(f"weft compile needs jax and libtpu: {INSTALL}")
    # libtpu is not to look for a machine's TPUs, nor to keep others from compiling.
    for name, value in (
        ("JAX_PLATFORMS", "cpu"),
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(
            platform="tpu",
            topology_name=topology,
            **({"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}),
        )
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--for is {topology!r}, no slice that libtpu knows: {reason}") from None
    return list(found.devices)


def keep_compiled(folder: Path) -> None:
    """Have jax keep all that it compiles in a folder, and look there first."""
    import jax

    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompileCounter:
    """Counts what XLA compiles in this process from here on.

    Attributes:
        count: programs.
    """

    def __init__(self) -> None:
        import jax.monitoring

        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
            logger.warning("jax compiled a program after warm-up; a step has waited for it")

    def close(self) -> None:
        """Count no further."""
        import jax.monitoring

        jax.monitoring.unregister_event_duration_listener(self._count)


def _has_tpus(root: Path) -> bool:
    def says(device: Path, what: str) -> str:
        return (device / what).read_text().strip()

    devices = (root / "sys/bus/pci/devices").glob("*")
    return any(says(one, "vendor") == GOOGLE and says(one, "device") in TPUS for one in devices)
