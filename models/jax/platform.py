"""jax in this process: its devices, its compilation cache, and a count of compilations.

`prepare` and `keep_to` configure jax before it looks for devices. On a node without TPUs, jax is
held to the CPU, which stands for as many devices as needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.kernels.devices import DEVICES

if TYPE_CHECKING:
    import jax

GOOGLE = "0x1ae0"
TPUS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
"""PCI ids: the vendor, and the TPU kinds that jax's own code lists."""

VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"
"""Variable with the chips for libtpu in this process; Ray sets it for its actors, too."""

BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""libtpu's notation for a number of chips on one node."""

FORCE_CPU_DEVICES = "--xla_force_host_platform_device_count"
INSTALL = "pip install 'jax[tpu]>=0.10.2'"

logger = logging.getLogger(__name__)


def is_installed() -> bool:
    """True if jax is installed."""
    return find_spec("jax") is not None


def tpu_memory(root: Path = Path("/")) -> tuple[int, ...]:
    """Return the bytes of each TPU, as jax counts them, without asking jax: it would take them.

    Args:
        root: parent folder of /sys; for tests.
    """
    if not is_installed() or find_spec("libtpu") is None:
        return ()
    chips = [DEVICES[kind] for kind in _chips(root)]
    return tuple(chip.memory for chip in chips for _ in range(chip.per_chip))


def prepare(
    count: int, setting: str = "auto", *, own_process: bool = False, interpreting: bool = False
) -> None:
    """Hold jax to the CPU, as `count` devices, if that is set or there are no TPUs.

    Args:
    count: devices in this process.
        setting: "auto", "cpu" or "tpu".
        own_process: nothing else here uses jax, so it has not started with another number.
        interpreting: kernels will be interpreted on CPUs. That hangs unless XLA has more threads
            than devices.

    Raises:
        ConfigError: jax is missing.
    """
    if not is_installed():
        raise ConfigError(f"--backend is 'jax', which is not installed: {INSTALL}")
    if setting == "tpu" or (setting == "auto" and _chips(Path("/"))):
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "").split()
    if own_process:
        flags = [flag for flag in flags if not flag.startswith(FORCE_CPU_DEVICES)]
    if not any(flag.startswith(FORCE_CPU_DEVICES) for flag in flags):
        flags.append(f"{FORCE_CPU_DEVICES}={count}")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    if interpreting:
        os.environ.setdefault("NPROC", str(2 * count + 2))


def keep_to(indexes: Sequence[int]) -> None:
    """Leave this node's other TPUs, and the slice's other nodes, to other processes.

    Raises:
        ConfigError: libtpu supports no such part of a node.
    """
    kinds = _chips(Path("/"))
    each = max(DEVICES[kind].per_chip for kind in kinds)
    chips = sorted({index // each for index in indexes})
    if len(chips) not in BOUNDS or len(indexes) % each:
        sizes = ", ".join(str(size * each) for size in BOUNDS)
        raise ConfigError(
            f"--tp is {len(indexes)}; with --dp engines on TPUs have these sizes: {sizes}"
        )
    visible = _visible_chips() or [str(index) for index in range(len(kinds))]
    os.environ[VISIBLE_CHIPS] = ",".join(visible[chip] for chip in chips)
    os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] = BOUNDS[len(chips)]
    os.environ["TPU_PROCESS_BOUNDS"] = "1,1,1"


def devices(count: int) -> list[jax.Device]:
    """Return `count` devices on this node: see `prepare`.

    Raises:
        ConfigError: jax has fewer.
    """
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
    """Describe TPUs that are not attached, to compile for a slice such as v5e:4x4.

    Raises:
        ConfigError: jax or libtpu is missing, or the slice does not exist.
    """
    if not is_installed() or find_spec("libtpu") is None:
        raise ConfigError(f"weft compile needs jax and libtpu: {INSTALL}")
    # libtpu must neither look for this node's TPUs nor block other compilations. The last three
    # keep it from warning about them; the topology alone decides.
    for name, value in (
        ("JAX_PLATFORMS", "cpu"),
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_WORKER_ID", "0"),
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
        raise ConfigError(
            f"--for is {topology!r}, which libtpu does not know as a slice: {reason}"
        ) from None
    return list(found.devices)


def keep_compiled(folder: Path) -> None:
    """Let jax keep all compiled programs in a folder, and look there first."""
    import jax

    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompileCounter:
    """Counts XLA's compilations in this process from now on.

    Attributes:
        count: number of programs.
    """

    def __init__(self) -> None:
        import jax.monitoring

        self.count = 0
        self._taken = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1
            logger.warning("jax compiled a program after warm-up; a step has waited for it")

    def take(self) -> int:
        """Return the number since the last call."""
        new, self._taken = self.count - self._taken, self.count
        return new

    def close(self) -> None:
        """Stop counting."""
        import jax.monitoring

        jax.monitoring.unregister_event_duration_listener(self._count)


def _visible_chips() -> list[str]:
    """Return this process's chips, by number; empty if it may have all."""
    return os.environ.get(VISIBLE_CHIPS, "").replace(",", " ").split()


def _chips(root: Path) -> list[str]:
    """List the TPU chips on this node for this process, by kind."""

    def attribute(device: Path, name: str) -> str:
        return (device / name).read_text().strip()

    devices = (root / "sys/bus/pci/devices").glob("*")
    google = (one for one in devices if attribute(one, "vendor") == GOOGLE)
    chips = [TPUS[kind] for one in google if (kind := attribute(one, "device")) in TPUS]
    return chips[: len(_visible_chips()) or None]
