"""jax in this process: which devices it has, where it keeps what it compiles, what it compiles.

`prepare` and `keep_to` are where jax is told of devices, before it looks for them itself: on a
machine without TPUs it is held to the CPU, which is taken for as many devices as are needed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError

if TYPE_CHECKING:
    import jax

GOOGLE = "0x1ae0"
TPUS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
"""What a PCI device says it is: vendor, and the kinds that jax's own code lists."""

DEVICES_OF_CHIP = {"tpu7x": 2}
"""Where it is not one."""

VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"
"""Where libtpu is told which chips of a machine are a process's; Ray says it to its actors, too."""

BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""How libtpu wants to be told of so many chips of one machine."""

FORCE_CPU_DEVICES = "--xla_force_host_platform_device_count"
INSTALL = "pip install 'weft[tpu]'"

logger = logging.getLogger(__name__)


def is_installed() -> bool:
    """Whether jax is."""
    return find_spec("jax") is not None


def count_tpus(root: Path = Path("/")) -> int:
    """Devices that jax would find, if it can use TPUs; without a look by jax, which takes them.

    Args:
        root: where /sys is; for tests.
    """
    if not is_installed() or find_spec("libtpu") is None:
        return 0
    return sum(DEVICES_OF_CHIP.get(kind, 1) for kind in _chips(root))


def prepare(
    count: int, setting: str = "auto", *, own_process: bool = False, interpreting: bool = False
) -> None:
    """Hold jax to the CPU, as so many devices, where that is asked for or there are no TPUs.

    Args:
        count: devices of this process.
        setting: "auto", "cpu" or "tpu".
        own_process: nothing else here uses jax, so that it has not begun with another number.
        interpreting: kernels will be interpreted on CPUs, which hangs where XLA has no more threads
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
    """Leave other TPUs of this machine, and other machines of their slice, to other processes.

    Raises:
        ConfigError: libtpu knows no such part of a machine.
    """
    kinds = _chips(Path("/"))
    each = max(DEVICES_OF_CHIP.get(kind, 1) for kind in kinds)
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
    """`count` devices of this machine: see `prepare`.

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


def _visible_chips() -> list[str]:
    """Chips that this process is held to, by their numbers; none if it may have all."""
    return os.environ.get(VISIBLE_CHIPS, "").replace(",", " ").split()


def _chips(root: Path) -> list[str]:
    """The TPU chips of this machine that this process may have, by their kind."""

    def says(device: Path, what: str) -> str:
        return (device / what).read_text().strip()

    devices = (root / "sys/bus/pci/devices").glob("*")
    google = (one for one in devices if says(one, "vendor") == GOOGLE)
    chips = [TPUS[kind] for one in google if (kind := says(one, "device")) in TPUS]
    return chips[: len(_visible_chips()) or None]
