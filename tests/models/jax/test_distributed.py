"""Two processes with one mesh: the weights each reads, their agreement, and their sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.checkpoints import make_checkpoint

from weft.models.checkpoint.locate import read_spec
from weft.models.spec.layout import Layout

PROCESS = """
import json, sys, time
from pathlib import Path

import psutil

from weft.models.jax import platform

path, rank, counts, tp, ep = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
platform.prepare(counts[rank], own_process=True)

import jax

from weft.models.checkpoint.locate import read_spec
from weft.models.jax.distributed import leave, meet, minimum
from weft.models.jax.mesh import make_mesh
from weft.models.jax.parameters import load
from weft.models.spec.layout import Layout


def find_port(own):
    told = path / "port"
    if own is not None:
        told.with_suffix(".new").write_text(str(own))
        told.with_suffix(".new").rename(told)
    while not told.exists():
        time.sleep(0.01)
    return int(told.read_text())


devices = meet(rank, len(counts), find_port, 60.0, host="127.0.0.1", address="127.0.0.1")
read = []
layout = Layout(tp, ep)
params = load(
    *(path, read_spec(path), layout, make_mesh(devices, layout.tp, layout.ep), "float32"),
    progress=lambda done, total: read.append(total),
)
sums = jax.jit(lambda params: [abs(leaf).sum() for leaf in jax.tree.leaves(params)])(params)
connections = psutil.Process().net_connections()
(path / f"said-{rank}").write_text(json.dumps({  # standard output has Gloo's lines, too
    "devices": len(devices),
    "here": len(jax.local_devices()),
    "minimum": minimum(7 - rank, 60.0),
    "read": read[-1],
    "held": sum(part.data.nbytes for p in jax.tree.leaves(params) for part in p.addressable_shards),
    "sums": [float(one) for one in sums],
    "listens": [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN],
}))
leave()
"""


def _run(path: Path, counts: list[int], *layout: str) -> list[dict[str, Any]]:
    """Return each process's output."""
    (path / "port").unlink(missing_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path), str(rank), json.dumps(counts), *layout],
            env=os.environ | {"http_proxy": "http://127.0.0.1:1"},
        )
        for rank in range(len(counts))
    ]
    assert [process.wait(timeout=400) for process in processes] == [0] * len(counts)
    return [json.loads((path / f"said-{rank}").read_text()) for rank in range(len(counts))]


def test_each_process_reads_the_parts_of_its_devices_alone(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1)
    layout, counts = Layout(tp=4, ep=2), [1, 3]
    one, three = _run(path, counts, "4", "2")
    assert (one["devices"], three["devices"]) == (4, 4)
    assert (one["here"], three["here"]) == (1, 3)
    assert one["minimum"] == three["minimum"] == 6
    each = layout.local(read_spec(path)).weight_bytes("float32")
    assert (one["held"], three["held"]) == (each, 3 * each)
    assert three["read"] == 3 * one["read"]
    assert one["sums"] == three["sums"]
    assert set(one["listens"]) | set(three["listens"]) <= {"127.0.0.1", "::ffff:127.0.0.1"}
