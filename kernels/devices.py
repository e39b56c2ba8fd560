"""Figures of devices: arithmetic, memory, links, latencies and prices, with their sources.

The planner (models/plan) and the cost model for GPU kernels (gpu/tuning/costs.py) read this table.
Figures are peaks from data sheets, so predictions from them are lower bounds on times. A source
says "assumed" for a number without a publication.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GIB = 1 << 30
MIB = 1 << 20

DTYPES = ("float32", "bfloat16", "int8", "float8")
"""Number formats in `Device.flops`. A device without products in a format casts to a wider one."""


@dataclass(frozen=True, slots=True)
class Link:
    """A device's connection to others.

    Attributes:
        bandwidth: bytes per second in one direction over one link.
        hop: seconds for a message without data to the nearest device.
        reach: the devices at the other end. "switch": any of them, over the device's single link.
            "pairs": each of them, with a link of its own. "torus": two neighbours on an axis, with
            a link to each.
    """

    bandwidth: float
    hop: float
    reach: Literal["switch", "pairs", "torus"] = "switch"


@dataclass(frozen=True, slots=True)
class Reached:
    """Shares of a device's peaks that serving reaches; `weft plan --calibrate` measures them.

    Attributes:
        flops: share of the operations per second, in all number formats.
        bandwidth: share of the bytes per second from memory.
        links: share of the bytes per second between devices.
    """

    flops: float = 0.7
    bandwidth: float = 0.8
    links: float = 0.8


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one core of a CPU.

    Attributes:
        name: the name in a slice such as H100:8.
        flops: dense operations per second, by number format; its keys are `DTYPES`.
        memory: bytes that programs can use.
        bandwidth: bytes per second from memory.
        link: to the devices in the same node or slice.
        node: maximum number of devices that `link` connects.
        network: to devices in other nodes; each device's share of it.
        launch: seconds between a kernel or operator and the next.
        host: seconds of work on the host for one step.
        price: US dollars per device and hour, on demand.
        reached: shares of `flops`, `bandwidth`, and `link` and `network` that serving reaches.
        sources: the source of each figure, by attribute.
        shapes: slices of a torus, the smallest first, counted in chips; () without a torus.
        ring: axes with a multiple of this size close to a ring. With three axes, all or none do.
        inside: between the devices on one chip; None if a chip is one device, else a chip is two.
        overlaps: reads from memory run beside arithmetic.
        vector: on a CPU with matrix units, the number format at whose rate its vector units
            multiply; else None.
        cpu: it is a core of a CPU.
        copy: seconds to start a copy to a core's own memory; 0 if kernels load single rows.
        like: for a user's own device, the device in this table from which its numbers come.
    """

    name: str
    flops: dict[str, float] = field(hash=False)
    memory: int
    bandwidth: float
    link: Link
    node: int
    network: Link
    launch: float
    host: float
    price: float
    sources: dict[str, str] = field(hash=False)
    shapes: tuple[str, ...] = ()
    ring: int = 0
    inside: Link | None = None
    like: str = ""
    reached: Reached = Reached()
    overlaps: bool = True
    vector: str | None = None
    cpu: bool = False
    copy: float = 0.0

    @property
    def gpu(self) -> bool:
        """True for a GPU: neither a core of a CPU nor a TPU."""
        return not self.cpu and not self.shapes

    @property
    def per_chip(self) -> int:
        """Devices on one chip."""
        return 1 if self.inside is None else 2


BOOK = '"How to Scale Your Model" (Austin et al. 2025)'
NEBIUS = "Nebius, on demand, in SkyPilot's catalogue v8 (2025)"
CLOUD = "Google Cloud, on demand, us-central1, in SkyPilot's catalogue v8 (2026)"

HOP = 1e-6
"""BOOK, part 3, says "about 1 us" for ICI. Assumed to hold for GPUs in a node, too."""
GPU_LAUNCH = 4e-6
"""Assumed."""
SENDERS = 16
"""Programs that saturate a GPU's link. Assumed; DeepEP uses 20 for all traffic."""
COPY = 32e-9
"""Assumed: scalar instructions to start a copy on a TPU, and to wait for it."""
HOST = 0.2e-3
HOST_SOURCE = "docs/benchmarks/engine.md: the scheduler takes 0.11 to 0.19 ms for a step"

SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")


def _flops(float32: float, bfloat16: float, int8: float, float8: float) -> dict[str, float]:
    return dict(zip(DTYPES, (float32, bfloat16, int8, float8), strict=True))


def _gpu_sources(sheet: str, price: str = NEBIUS, **others: str) -> dict[str, str]:
    return {
        "flops": f"{sheet}, dense; float32 without TF32, as the kernels multiply it",
        "memory": "the total that nvidia-smi prints",
        "bandwidth": sheet,
        "link": f"{sheet}, one direction; hop assumed",
        "node": sheet,
        "network": f"{BOOK}, part 12: 400 GB/s for 8 GPUs; hop assumed",
        "launch": "assumed",
        "host": HOST_SOURCE,
        "price": price,
        "reached": "assumed",
    } | others


def _tpu_sources(name: str, price: str = CLOUD, **others: str) -> dict[str, str]:
    page = f"Google Cloud's page on TPU {name}"
    return {
        "flops": f"{page}; float32 takes six bfloat16 passes",
        "memory": "what libtpu's compiler grants a program",
        "bandwidth": page,
        "link": f"{BOOK}, parts 3 and 12: 90% of Google's figure; hop: part 3",
        "node": f"{page}: the largest slice",
        "network": f"{page}; hop assumed",
        "launch": "assumed",
        "host": HOST_SOURCE,
        "price": price,
        "copy": "assumed",
        "reached": "assumed",
    } | others


def _cpu_sources(machine: str) -> dict[str, str]:
    return {
        "flops": f"{machine}: one of two cores",
        "memory": "assumed: 8 GiB for each core",
        "bandwidth": f"{machine}: one of two cores; less if more share it",
        "link": "assumed: gloo within a node",
        "node": "assumed",
        "network": "assumed: 10 Gb/s",
        "launch": f"{machine}: one rank",
        "host": HOST_SOURCE,
        "reached": f"{machine}: links with two ranks, the others with one",
        "price": "two virtual CPUs at Nebius, on demand, in SkyPilot's catalogue v8 (2025)",
    }


_TABLE = (
    Device(
        name="A100",
        flops=_flops(19.5e12, 312e12, 624e12, 312e12),
        memory=81920 * MIB,
        bandwidth=2.0e12,
        link=Link(300e9, HOP),
        node=8,
        network=Link(25e9, 5e-6),
        launch=GPU_LAUNCH,
        host=HOST,
        price=2.79,
        sources=_gpu_sources(
            "NVIDIA's data sheet on the A100 80 GB SXM",
            price="Lambda, 8 GPUs, on demand, in SkyPilot's catalogue v8 (2026)",
            network="NVIDIA's data sheet on the DGX A100: 200 Gb/s for each GPU; hop assumed",
        ),
    ),
    Device(
        name="H100",
        flops=_flops(67e12, 989e12, 1979e12, 1979e12),
        memory=81559 * MIB,
        bandwidth=3.35e12,
        link=Link(450e9, HOP),
        node=8,
        network=Link(50e9, 5e-6),
        launch=GPU_LAUNCH,
        host=HOST,
        price=2.95,
        sources=_gpu_sources("NVIDIA's data sheet on the H100 SXM"),
    ),
    Device(
        name="H200",
        flops=_flops(67e12, 989e12, 1979e12, 1979e12),
        memory=143771 * MIB,
        bandwidth=4.8e12,
        link=Link(450e9, HOP),
        node=8,
        network=Link(50e9, 5e-6),
        launch=GPU_LAUNCH,
        host=HOST,
        price=3.50,
        sources=_gpu_sources("NVIDIA's data sheet on the H200 SXM"),
    ),
    Device(
        name="B200",
        flops=_flops(75e12, 2250e12, 4500e12, 4500e12),
        memory=183359 * MIB,
        bandwidth=8.0e12,
        link=Link(900e9, HOP),
        node=8,
        network=Link(50e9, 5e-6),
        launch=GPU_LAUNCH,
        host=HOST,
        price=5.50,
        sources=_gpu_sources("NVIDIA's data sheet on the DGX B200"),
    ),
    Device(
        name="L40S",
        flops=_flops(91.6e12, 362e12, 733e12, 733e12),
        memory=46068 * MIB,
        bandwidth=0.864e12,
        link=Link(32e9, HOP),
        node=8,
        network=Link(12.5e9, 5e-6),
        launch=GPU_LAUNCH,
        host=HOST,
        price=1.55,
        sources=_gpu_sources(
            "NVIDIA's data sheet on the L40S",
            link="NVIDIA's data sheet on the L40S: PCIe 4.0 x16, one direction; hop assumed",
            node="assumed: 8 in a server",
            network="assumed: 100 Gb/s for each GPU",
        ),
    ),
    Device(
        name="MI300X",
        flops=_flops(163.4e12, 1307e12, 2615e12, 2615e12),
        memory=196592 * MIB,
        bandwidth=5.3e12,
        link=Link(64e9, HOP, "pairs"),
        node=8,
        network=Link(50e9, 5e-6),
        launch=GPU_LAUNCH,
        host=HOST,
        price=1.85,
        sources=_gpu_sources(
            "AMD's data sheet on the Instinct MI300X",
            price="Vultr, on demand (2026)",
            memory="the total that rocm-smi prints",
            network="assumed: 400 Gb/s for each GPU",
        ),
    ),
    Device(
        name="v4",
        flops=_flops(275e12 / 6, 275e12, 275e12, 275e12),
        memory=32 * GIB,
        bandwidth=1.2e12,
        link=Link(4.5e10, HOP, "torus"),
        node=4096,
        network=Link(6.25e9, 50e-6),
        launch=1e-6,
        host=HOST,
        price=3.22,
        sources=_tpu_sources(
            "v4",
            price="Google Cloud, on demand, us-central2 (2024)",
            memory="Google Cloud's page on TPU v4: 32 GiB, none reserved",
            network=f"{BOOK}, part 2: 25 GB/s for a host with 4 chips; hop assumed",
        ),
        shapes=CUBES,
        copy=COPY,
        ring=4,
    ),
    Device(
        name="v5e",
        flops=_flops(197e12 / 6, 197e12, 394e12, 197e12),
        memory=63 * GIB // 4,
        bandwidth=0.819e12,
        link=Link(4.5e10, HOP, "torus"),
        node=256,
        network=Link(3.125e9, 50e-6),
        launch=1e-6,
        host=HOST,
        price=1.20,
        sources=_tpu_sources("v5e"),
        shapes=SQUARES,
        copy=COPY,
        ring=16,
    ),
    Device(
        name="v5p",
        flops=_flops(459e12 / 6, 459e12, 918e12, 459e12),
        memory=95 * GIB,
        bandwidth=2.765e12,
        link=Link(9e10, HOP, "torus"),
        node=6144,
        network=Link(6.25e9, 50e-6),
        launch=1e-6,
        host=HOST,
        price=4.20,
        sources=_tpu_sources("v5p"),
        shapes=CUBES,
        copy=COPY,
        ring=4,
    ),
    Device(
        name="v6e",
        flops=_flops(918e12 / 6, 918e12, 1836e12, 918e12),
        memory=125 * GIB // 4,
        bandwidth=1.638e12,
        link=Link(9e10, HOP, "torus"),
        node=256,
        network=Link(12.5e9, 50e-6),
        launch=1e-6,
        host=HOST,
        price=2.70,
        sources=_tpu_sources("v6e"),
        shapes=SQUARES,
        copy=COPY,
        ring=16,
    ),
    # A device is half a chip. The halves share the chip's ICI links.
    Device(
        name="tpu7x",
        flops=_flops(1153.5e12 / 6, 1153.5e12, 1153.5e12, 2307e12),
        memory=379 * GIB // 4,
        bandwidth=3.69e12,
        link=Link(4.5e10, HOP, "torus"),
        node=18432,
        network=Link(6.25e9, 50e-6),
        launch=1e-6,
        host=HOST,
        price=6.00,
        sources=_tpu_sources(
            "7x",
            flops="Google Cloud's page on TPU 7x, halved; int8 assumed to be as bfloat16",
            bandwidth="Google Cloud's page on TPU 7x, halved",
            link="as v5p, whose chip has the same ICI bandwidth, halved",
            network="Google Cloud's page on TPU 7x, halved; hop assumed",
            price="assumed: no list price is known",
            inside="Google Cloud's page on TPU 7x: six times an ICI link; hop assumed",
        ),
        shapes=CUBES,
        copy=COPY,
        ring=4,
        inside=Link(6 * 9e10, HOP, "pairs"),
    ),
    Device(
        name="cpu",
        flops=_flops(99e9, 362e9, 362e9, 99e9),
        memory=8 * GIB,
        bandwidth=22e9,
        link=Link(5e9, 20e-6),
        node=64,
        network=Link(1.25e9, 50e-6),
        launch=12e-6,
        host=HOST,
        price=0.05,
        sources=_cpu_sources("docs/benchmarks/plan.md, an AMD EPYC (Zen 4)"),
        reached=Reached(flops=1.0, bandwidth=1.1, links=0.4),
        cpu=True,
    ),
    # With matrix units (AMX), a core reads weights and multiplies them in turn.
    Device(
        name="cpu-amx",
        flops=_flops(150e9, 300e9, 600e9, 150e9),
        memory=8 * GIB,
        bandwidth=23e9,
        link=Link(5e9, 20e-6),
        node=64,
        network=Link(1.25e9, 50e-6),
        launch=36e-6,
        host=HOST,
        price=0.05,
        sources=_cpu_sources("docs/plan.md, an Intel Xeon with AMX"),
        reached=Reached(flops=0.64, bandwidth=0.67, links=0.1),
        overlaps=False,
        vector="float32",
        cpu=True,
    ),
)
DEVICES = {device.name: device for device in _TABLE}
"""The devices by name."""
