"""A container as a runtime makes it of a pod's manifest, without its image: this environment's weft
in namespaces of its own, with its own root.

- Its process is PID 1: signals that it does not handle are lost, and all others end with it.
- Its root file system is a new one, read-only if the manifest says so. Of this machine it has what
  weft runs with, also read-only: system, interpreter, environment, repository. `weft`, which the
  image has in /opt/weft/bin, is the environment's.
- The pod's volumes are where the manifest says; /etc/hosts and the host's name are the pod's.
- It runs as the image's user, who is not root, without capabilities.
- Its network is that of a `Host`, so ports are as they are rendered.

It does not limit cores and memory.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.netns import Host

ROOT = Path(__file__).parents[2]
USER, GROUP = 10001, 0  # of the image: deploy/Dockerfile
PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IMAGE_ENVIRONMENT = {"PATH": PATH, "HOME": "/cache", "USER": "weft", "PYTHONUNBUFFERED": "1"}

# $1: the root; $2: ro or rw; $3: the host name; then the command. Its stdin makes mounts.
_MAKE = f"""
set -e
umask 022
root=$1 mode=$2
hostname "$3"
shift 3
mount -t tmpfs -o mode=755 tmpfs "$root"
bind() {{ mkdir -p "$root$2"; mount --bind -o "$3" "$1" "$root$2"; }}
file() {{ : > "$root$2"; mount --bind "$1" "$root$2"; }}
memory() {{ mkdir -p "$root$1"; mount -t tmpfs -o mode=1777 tmpfs "$root$1"; }}
for each in /bin /lib /lib64 /sbin; do
  if [ -L $each ]; then cp -P $each "$root$each"; elif [ -d $each ]; then bind $each $each ro; fi
done
mkdir "$root/proc" && mount -t proc proc "$root/proc"
mkdir "$root/etc"
cp -L /etc/passwd /etc/group /etc/nsswitch.conf /etc/ld.so.cache "$root/etc"
bind /usr /usr ro; bind /sys /sys ro; bind /dev /dev rw
. /dev/stdin
mkdir -p "$root/cache"
mount -o remount,$mode "$root"
exec chroot "$root" setpriv --pdeathsig=KILL --reuid={USER} --regid={GROUP} --clear-groups \\
  --no-new-privs --bounding-set=-all --inh-caps=-all env --chdir=/cache "$@" </dev/null
"""

Object = dict[str, Any]


class Container:
    """A container that runs.

    Attributes:
        pid: of its PID 1, as this machine counts.
        environment: of its processes.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, pid: int, environment: Mapping[str, str]
    ) -> None:
        self._process = process
        self.pid = pid
        self.environment = environment

    @classmethod
    async def start(
        cls,
        container: Object,
        name: str,
        host: Host,
        environment: Mapping[str, str],
        mounts: Sequence[str],
        folder: Path,
    ) -> Container:
        """Start it.

        Args:
            container: of a pod's manifest.
            name: of its host.
            host: whose network it has.
            environment: as the manifest's `env` comes to; the image's is added.
            mounts: of volumes: `bind FOLDER TARGET ro|rw`, `file FILE TARGET`, `memory TARGET`.
            folder: gets its log, "log", to which it appends.
        """
        root = folder / "root"
        root.mkdir(exist_ok=True)
        environment = IMAGE_ENVIRONMENT | environment
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        mode = "ro" if context["readOnlyRootFilesystem"] else "rw"
        words = [expand(word, environment) for word in (*container["command"], *container["args"])]
        with (folder / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig=KILL", "nsenter", f"--net=/run/netns/{host.name}"),
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"),
                *("sh", "-c", _MAKE, "sh", str(root), mode, name, *words),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        assert process.stdin is not None
        process.stdin.write("\n".join([*mounts, *_of_environment()]).encode())
        process.stdin.close()
        try:
            while not (children := psutil.Process(process.pid).children()):
                assert process.returncode is None, (folder / "log").read_text()
                await asyncio.sleep(0.01)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return cls(process, children[0].pid, environment)

    def signal(self, number: signal.Signals) -> None:
        """Send its PID 1 a signal, unless it has ended."""
        if self._process.returncode is None:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                psutil.Process(self.pid).send_signal(number)

    async def run(self, *command: str) -> int:
        """Run a command in it; its exit status, also when the container ends."""
        process = await asyncio.create_subprocess_exec(
            *("nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--uts", "--ipc"),
            *("--root", "--wd", f"--setuid={USER}", f"--setgid={GROUP}", "--", *command),
            env=dict(self.environment),
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def wait(self) -> int:
        """Its exit status; not 0 when a signal has ended it."""
        return await self._process.wait()


def expand(text: str, environment: Mapping[str, str]) -> str:
    """With $(NAME) replaced where there is such a variable, as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: environment.get(found[1], found[0]), text)


def _of_environment() -> list[str]:
    """Mounts of what weft runs with; after the volumes', within which they may be."""
    paths = [sys.base_prefix, sys.prefix, ROOT, *filter(os.path.isdir, sys.path)]
    folders = {Path(each).resolve() for each in paths}
    outer = [each for each in folders if not any(each.is_relative_to(o) for o in folders - {each})]
    quoted = [shlex.quote(str(each)) for each in outer if not each.is_relative_to("/usr")]
    return [f"bind {each} {each} ro" for each in quoted]


@cache
def why_not() -> str | None:
    """Why no container can be made here, if so."""
    for command in ("unshare", "nsenter", "setpriv", "mount", "chroot", "hostname"):
        if shutil.which(command) is None:
            return f"there is no command `{command}`"
    made = "unshare --mount --pid --fork --uts --ipc mount -t tmpfs tmpfs /mnt"
    tried = subprocess.run(made.split(), capture_output=True, text=True)
    return None if tried.returncode == 0 else tried.stderr.strip() or "unshare fails"


def skip_without_containers() -> None:
    """Skip the test where none can be made."""
    if why := why_not():
        pytest.skip(f"containers cannot be made here: {why}")
