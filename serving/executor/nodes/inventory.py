"""This node's inventory: its free memory and its devices (see placement.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from weft.serving.config.settings import EngineConfig
from weft.serving.executor.placement import Inventory

_GPUS = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([torch.cuda.mem_get_info(i)[0] for i in range(count)]))
"""


def own_inventory(config: EngineConfig, *, gpus: bool = True) -> Inventory:
    """Take this node's inventory.

    Args:
        config: its `node_ranks` limits the number of ranks on the CPU cores.
        gpus: look for GPUs, which takes some seconds on a machine that has them.
    """
    from weft.models.jax.platform import tpu_memory
    from weft.models.memory.available import available_memory

    return Inventory(
        config.node_ranks,
        memory=available_memory(),
        gpus=_free_gpu_memory() if gpus else (),
        tpus=tpu_memory(),
    )


def _free_gpu_memory() -> tuple[int, ...]:
    """Return the free bytes on each GPU.

    A child process asks torch, because the asking process keeps half a GiB on each GPU (its
    context) until it ends.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():  # AMD's
        return ()
    command = [sys.executable, "-P", "-c", _GPUS]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        return ()  # no suitable driver; `weft doctor` reports this
    return tuple(json.loads(asked.stdout))
