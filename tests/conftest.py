"""What holds for all tests."""

import os
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings
from support import surroundings
from support.sweeps import sample

# Before any other module reads the environment; each of xdist's processes does so too.
surroundings.settle()

# jax splits the CPU into devices, so that a mesh has some. It reads this when it is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
DEVICES = "--xla_force_host_platform_device_count"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

# A time says how busy the machine is, and nothing about the code.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")


OPTIONS = {
    "asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
    "timeout": ("timeout",),
}
"""Settings in pyproject.toml of plugins that a machine with GPUs may lack."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept a missing plugin's settings: --strict-config would refuse them, and all tests."""
    for plugin, names in OPTIONS.items():
        if not pluginmanager.hasplugin(plugin):
            for name in names:
                parser.addini(name, f"of pytest-{plugin}, which is not installed")


@pytest.hookimpl(tryfirst=True)  # before the cases that are slow are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        for case, taken in zip(
            cases, sample([case.callspec.indices for case in cases]), strict=True
        ):
            if not taken:
                case.add_marker(pytest.mark.slow)
