"""Free memory on this node: how much a process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take, within the node and its cgroups.

    A container's limit is that of its cgroup (version 1 or 2) or of a parent cgroup. File pages
    that the kernel can drop count as free, as in MemAvailable of /proc/meminfo.

    Args:
        root: parent folder of /proc and /sys; for tests.
    """
    import psutil

    free = [int(psutil.virtual_memory().available)]
    for group, limit_file, usage_file, file_pages in _memory_cgroups(root):
        limit, usage = _read_number(group / limit_file), _read_number(group / usage_file)
        if limit is not None and usage is not None:
            free.append(limit - usage + _read_stat(group / "memory.stat", file_pages))
    return max(0, min(free))


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield this process's memory cgroups: folder, and names of its files and fields."""
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
        # In a container the path may be the node's, with only its end mounted, or nothing.
        # Folders that do not exist are skipped, because they have no files.
        own = mount / path.lstrip("/")
        for group in (own, *own.parents):
            yield group, *names
            if group == mount:
                break


def _read_number(path: Path) -> int | None:
    """Read the number in a file; None if the file is missing or sets no limit."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)


def _read_stat(path: Path, field: str) -> int:
    """Read one field of a cgroup's memory.stat; 0 if it is missing."""
    if not path.exists():
        return 0
    fields = dict(line.split() for line in path.read_text().splitlines())
    return int(fields.get(field, 0))
