"""Devices and slices: sources, axes, the user's own numbers, and what does not exist."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.kernels.devices import DEVICES, DTYPES, GIB, Device, Reached
from weft.models.plan.hardware import Axis, read_devices, read_slice

PAGE = Path(__file__).parents[3] / "docs/plan.md"


def link_of(device: Device) -> str:
    """A device's links in the page's words."""
    each = f"{device.link.bandwidth / 1e9:g}"
    if device.link.reach == "pairs":
        return f"{device.node - 1} x {each}"
    axes = device.shapes[0].count("x") + 1 if device.shapes else 0
    return f"{2 * axes} x {each}" if axes else each


def row(device: Device) -> str:
    rates = " / ".join(f"{device.flops[dtype] / 1e12:.4g}" for dtype in DTYPES)
    return (
        f"| {device.name} | {rates} | {device.memory / GIB:.4g} | {device.bandwidth / 1e12:.3g} "
        f"| {link_of(device)} | {device.network.bandwidth / 1e9:.4g} | {device.price:.2f} |"
    )


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_the_page_has_each_device(device: Device) -> None:
    assert row(device) in PAGE.read_text(), f"docs/plan.md must have {row(device)}"


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_each_figure_has_a_source_and_is_possible(device: Device) -> None:
    figures = {each.name for each in fields(Device)} - {
        *("name", "sources", "shapes", "ring", "like", "overlaps", "vector", "cpu"),
    }
    figures -= {name for name in ("inside", "copy") if not getattr(device, name)}
    assert device.sources.keys() == figures
    assert all(device.sources.values())
    assert tuple(device.flops) == DTYPES
    assert device.flops["float32"] <= device.flops["bfloat16"] <= device.flops["int8"]
    for link in (device.link, device.network):
        assert 0 < link.bandwidth < device.bandwidth
        assert 0 < link.hop < 1e-3


@pytest.mark.parametrize(
    ("text", "devices", "sizes"),
    [
        ("h100:8", 8, [8]),
        ("H100:2x8", 16, [8, 2]),
        ("cpu:1", 1, []),
        ("h100:4x1", 4, [4]),
        ("v5e:1x1", 1, []),
        ("v5e:2x4", 8, [2, 4]),
        ("v5p:2x2x1", 4, [2, 2]),
        ("v4:2x2x4", 16, [2, 2, 4]),
        ("v4:4x4x8", 128, [4, 4, 8]),
        ("tpu7x:2x2x1", 8, [2, 2, 2]),
    ],
)
def test_a_slice_has_devices_on_axes(text: str, devices: int, sizes: list[int]) -> None:
    found = read_slice(text)
    assert found.devices == devices
    assert [axis.size for axis in found.axes] == sizes
    assert read_slice(str(found)) == found


def test_nodes_are_connected_by_the_network() -> None:
    h100 = DEVICES["H100"]
    assert read_slice("h100:2x8").axes == [Axis(8, h100.link), Axis(2, h100.network)]


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("v5e:8x8", [False, False]),
        ("v5e:8x16", [False, True]),
        ("v6e:16x16", [True, True]),
        ("v5p:2x4x4", [False, False, False]),
        ("v5p:4x4x8", [True, True, True]),
        ("tpu7x:4x4x4", [False, True, True, True]),
    ],
)
def test_axes_that_close_to_a_ring(text: str, wraps: list[bool]) -> None:
    assert [axis.wraps for axis in read_slice(text).axes] == wraps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h900:8", "the device 'h900' is unknown; it must be one of A100, .*TOML"),
        ("", "--for has an empty entry; leave out the comma"),
        ("h100", "it must be like H100:8 or H100:2x8"),
        ("h100:", "it must be like H100:8"),
        ("h100:-8", "it must be like H100:8"),
        ("h100:8.5", "it must be like H100:8"),
        ("h100:999999", "it must be like H100:8"),
        ("h100:2x8x8", "it must be like H100:8"),
        ("h100:16", "a node has 1 to 8 H100, not 16; for two nodes, write H100:2x8"),
        ("h100:0", "a node has 1 to 8 H100, not 0"),
        ("h100:0x8", "1 to 1024 nodes, not 0"),
        ("h100:9999x8", "1 to 1024 nodes, not 9999"),
        ("v5e:3x4", "no such slice; v5e has 1x1, 2x2, 2x4, .*16x16, with up to 256 chips"),
        ("v5e:4x2", "no such slice"),
        ("v5e:8", "no such slice"),
        ("v5e:32x32", "no such slice"),
        ("v5p:2x4", "no such slice; v5p has 2x2x1, .* or ascending multiples of 4"),
        ("v5p:8x4x4", "no such slice"),
        ("v5p:0x0x0", "no such slice"),
        ("v5p:16x24x24", "no such slice; .* with up to 6144 chips"),
        ("tpu7x:24x24x24", "no such slice; .* with up to 9216 chips"),
    ],
)
def test_what_is_no_slice(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_slice(text)


def write(folder: Path, text: str) -> Path:
    path = folder / "devices.toml"
    path.write_text(text)
    return path


def test_own_numbers_replace_known_ones(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        [h100]
        price = 1.99

        [mine]
        like = "v5e"
        memory = 24e9
        flops = { int8 = 1e15 }
        link = { bandwidth = 2e11 }
        reached = { flops = 0.5 }
        """,
    )
    devices = read_devices(path)
    cheap, h100 = devices["H100"], DEVICES["H100"]
    assert (cheap.price, cheap.bandwidth) == (1.99, h100.bandwidth)
    assert cheap.sources == h100.sources | {"price": str(path)}
    mine = read_slice("MINE:2x4", devices).device
    assert (mine.name, mine.like, mine.memory) == ("mine", "v5e", 24_000_000_000)
    assert cheap.like == ""
    assert isinstance(mine.memory, int)
    v5e = DEVICES["v5e"]
    assert mine.flops == v5e.flops | {"int8": 1e15}
    assert (mine.link.bandwidth, mine.link.hop, mine.link.reach) == (2e11, v5e.link.hop, "torus")
    assert mine.reached == Reached(flops=0.5)
    assert mine.sources["reached"] == str(path)
    assert devices.keys() == DEVICES.keys() | {"mine"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price = 3", r"devices.toml: price is 3; it must be a table: \[price\]"),
        ("[mine]", "devices.toml: mine: like is missing; .*: like = one of A100"),
        ("[mine]\nlike = 3", "mine: like is 3; it must be one of"),
        ('["a b"]\nlike = "H100"', "a b: a name has letters"),
        ("[H100]\nprize = 3", "H100: unknown key 'prize'; known are like, flops, memory"),
        ("[H100]\nsources = {}", "H100: unknown key 'sources'"),
        ('[H100]\nprice = "3"', "H100: price is '3'; it must be a number"),
        ("[H100]\nprice = true", "H100: price is True; it must be a number"),
        ("[H100]\nprice = -1", "H100: price is -1; it must be 0 or more"),
        ("[H100]\nmemory = 0", "H100: memory is 0; it must be 1 or more"),
        ("[H100]\nmemory = inf", "H100: memory is inf"),
        ("[H100]\nbandwidth = nan", "H100: bandwidth is nan"),
        ("[H100]\nflops = 3", "H100: flops is 3; it must be a table with float32, bfloat16"),
        ("[H100]\nflops = { fp8 = 1 }", "H100: flops: unknown key 'fp8'; known are float32"),
        ("[H100]\nlink = { bandwidth = 0 }", "H100: link.bandwidth is 0; it must be 1 or more"),
        ("[H100]\nreached = { flops = 0 }", "H100: reached.flops is 0; it must be 0.001 or more"),
        ("[H100]\nreached = { flops = 5 }", "reached.flops is 5; it must be from 0.001 to 2"),
        ("[H100]\nreached = { host = 1 }", "unknown key 'host'; known are flops, bandwidth, links"),
        ("[H100", "devices.toml is not TOML"),
        ("a = " + 9999 * "[", "devices.toml is not TOML"),
    ],
)
def test_impossible_numbers_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_devices(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: No such file"):
        read_devices(tmp_path / "none.toml")
