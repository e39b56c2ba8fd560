"""What this node has for ranks: see resources.py, which maps them to it."""

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
    """Of this node.

    Args:
        config: its `node_ranks` limits how many ranks share the cores.
        gpus: look for them, which takes some seconds where there are any.
    """
    from weft.models.jax.platform import count_tpus
    from weft.models.memory.available import available_memory

    return Inventory(
        config.node_ranks,
        memory=available_memory(),
        gpus=_free_of_gpus() if gpus else (),
        tpus=count_tpus(),
    )


def _free_of_gpus() -> tuple[int, ...]:
    """Free bytes of each GPU that torch sees.

    Asked in a process of its own: who asks has a context on each, of half a GiB, until it ends.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():  # AMD's
        return ()
    command = [sys.executable, "-P", "-c", _GPUS]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        return ()  # no driver that suits; `weft doctor` says so
    return tuple(json.loads(asked.stdout))
