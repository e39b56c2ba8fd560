"""Free memory on this node, by its cgroups."""

from __future__ import annotations

from pathlib import Path

from weft.models.memory.available import available_memory
from weft.models.memory.ledger import MIB


def make_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_of_this_machine() -> None:
    assert 0 < available_memory() < 2**50


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > MIB


def test_version_2_group_and_its_parents(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": f"{20 * MIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{15 * MIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\nactive_file 7\ninactive_file {2 * MIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{14 * MIB}\n",
        },
    )
    assert available_memory(root) == 7 * MIB


def test_version_2_path_of_the_host(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/abc\n",
            "sys/fs/cgroup/memory.max": f"{9 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{4 * MIB}\n",
        },
    )
    assert available_memory(root) == 5 * MIB


def test_version_1(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpuset:/\n2:cpu,memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 * MIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{9 * MIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{4 * MIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": f"total_inactive_file {MIB}\n",
        },
    )
    assert available_memory(root) == 6 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "200\n",
        },
    )
    assert available_memory(root) == 0
