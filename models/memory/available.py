"""What this machine has free: how much memory a process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: free memory of the machine and of its cgroups.

    A container's limit is its cgroup's, version 1 or 2, or that of a cgroup further up. File
    pages that the kernel can drop count as free, as in /proc/meminfo's MemAvailable.

    Args:
        root: where /proc and /sys are; for tests.
    """
    import psutil

    free = [int(psutil.virtual_memory().available)]
    for group, limit_file, usage_file, file_pages in _memory_cgroups(root):
        limit, usage = _read_number(group / limit_file), _read_number(group / usage_file)
        if limit is not None and usage is not None:
            free.append(limit - usage + _read_stat(group / "memory.stat", file_pages))
    return max(0, min(free))


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """This process's cgroups that may limit memory: folder, and names of its files and fields."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's, of which only the end of it, or
        # nothing, is mounted: folders that are not there have no files to read.
        own = mount / path.lstrip("/")
        for group in (own, *own.parents):
            yield group, *names
            if group == mount:
                break


def _read_number(path: Path) -> int | None:
    """The number in a file; None when there is no file, or it says that there is no limit."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)


def _read_stat(path: Path, field: str) -> int:
    """One field of a cgroup's memory.stat; 0 when it has none."""
    if not path.exists():
        return 0
    fields = dict(line.split() for line in path.read_text().splitlines())
    return int(fields.get(field, 0))
