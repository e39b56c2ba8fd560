"""`weft doctor`: can this machine serve, and what to do where it cannot; with others, if so told.

Each check is one function that looks and returns a Finding; it changes
nothing and loads no model. "warn" means slower or less, "fail" that serving
will not work.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.errors import ConfigError, ModelError, WeftError
from weft.models.checkpoint.locate import BUNDLED, locate, read_spec
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.executor.nodes.inventory import own_inventory
from weft.serving.executor.nodes.messages import Finding
from weft.serving.executor.placement import (
    Inventory,
    decided,
    devices_of_ranks,
    kind_of,
    map_slices,
)

GIB = 1024**3


def run(engine: EngineConfig, server: ServerConfig, *, as_json: bool = False) -> int:
    """Print all findings; 1 if one failed."""
    findings = examine(engine, server)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        import click

        colors = {"ok": "green", "warn": "yellow", "fail": "red"}
        machine = ""
        for finding in findings:
            if finding.machine != machine:
                click.echo(f"\n{(machine := finding.machine)}")
            status = click.style(f"{finding.status:<5}", fg=colors[finding.status])
            click.echo(f"{status} {finding.name:<14} {finding.seen}")
            if finding.advice:
                click.echo(f"{'':<21}{finding.advice}")
    return int(any(finding.status == "fail" for finding in findings))


def examine(engine: EngineConfig, server: ServerConfig) -> list[Finding]:
    """Every finding, in the order to read them; of other machines last."""
    if problem := _needed():
        return problem
    found = examine_machine(engine, BUNDLED)
    found.append(_port(server.host, server.port))
    if engine.world_size > 1:
        found.append(_layout(engine))
    if engine.nodes > 1:
        from weft.serving.cli.doctor_nodes import examine_others

        found += examine_others(engine)
    elif engine.dp * engine.world_size > 1:
        found += devices(engine, [own_inventory(engine)])
    return found


def examine_machine(engine: EngineConfig, models: Collection[str] = ()) -> list[Finding]:
    """What is found on a machine; of these models beside the engine's."""
    if problem := _needed():
        return problem
    found = [
        _python(),
        _libraries(),
        _processor(),
        _kernels(),
        _cores(engine),
        _memory(),
        _shared_memory(),
        _sockets(),
        _gpu(),
        *(_model(name) for name in dict.fromkeys((*models, engine.model))),
    ]
    if engine.world_size > 1:
        found.append(_board())
    return found


def _needed() -> list[Finding]:
    """What is there of the first two findings, if one failed: nothing else can be seen then."""
    needed = [_python(), _libraries()]
    return needed if any(finding.status == "fail" for finding in needed) else []


def _python() -> Finding:
    seen = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("Python", "fail", seen, "weft runs on Linux")
    return Finding("Python", "ok", seen)


def _libraries() -> Finding:
    names = ("torch", "triton", "transformers", "tokenizers", "safetensors", "jax")
    seen = ", ".join(f"{name} {found}" for name in names if (found := _version(name)))
    if _version("torch") is None:
        return Finding("libraries", "fail", seen, "pip install torch")
    return Finding("libraries", "ok", seen)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> Finding:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    fast = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    seen = f"{facts.get('model name', platform.machine())}: {', '.join(fast) or 'no AVX'}"
    if not flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        advice = "bfloat16 is emulated: --dtype float32 is faster where the model fits"
        return Finding("processor", "warn", seen, advice)
    return Finding("processor", "ok", seen)


def _kernels() -> Finding:
    """Whether the CPU kernels that setup compiles are there, if this processor can run them."""
    import torch

    from weft.kernels.cpu import native

    if native.library() is not None:
        return Finding("CPU kernels", "ok", "compiled, for bfloat16 and int8")
    if torch.cpu._is_avx512_bf16_supported():
        advice = "install g++ 11 or newer, then weft anew: decoding gets up to 1.6 times as fast"
        seen = "compiled, but cannot be loaded" if native.FILE.exists() else "not compiled"
        return Finding("CPU kernels", "warn", f"{seen}: torch's operators are used", advice)
    return Finding("CPU kernels", "ok", "torch's operators; the compiled ones need AVX-512 BF16")


def _cores(engine: EngineConfig) -> Finding:
    usable, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    seen = f"{usable} usable, load {load:.1f}"
    ranks = engine.dp * engine.world_size
    processes = -(-ranks // engine.nodes)  # here, if machines have equally many
    if ranks > 1:
        part = f"{processes} of " if engine.nodes > 1 else ""
        seen += f"; for {part}{ranks} ranks ({engine.dp} engines of {engine.world_size})"
    if processes > usable:
        advice = "use fewer ranks, or lower --dp: those that share a core wait for each other"
        return Finding("cores", "warn", seen, advice)
    if load > usable:
        advice = "stop other programs, or set --threads to the cores that are left: sharing is slow"
        return Finding("cores", "warn", seen, advice)
    return Finding("cores", "ok", seen)


def _memory() -> Finding:
    from weft.models.memory.available import available_memory

    available = available_memory()
    seen = f"{available / GIB:.1f} GiB available to this process"
    if available < GIB:
        advice = (
            "a small model needs about 1 GiB: stop other programs, or raise the container's limit"
        )
        return Finding("memory", "fail", seen, advice)
    return Finding("memory", "ok", seen)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("/dev/shm", "fail", f"{error.strerror}", "mount a tmpfs there")
    seen = f"{free / GIB:.2f} GiB free"
    if free < GIB / 4:
        return Finding(
            "/dev/shm", "warn", seen, "several ranks need more: docker run --shm-size 1g"
        )
    return Finding("/dev/shm", "ok", seen)


def devices(engine: EngineConfig, offers: Sequence[Inventory]) -> list[Finding]:
    """What each machine has for ranks, which is an island, and which ranks get it."""
    engine = decided(engine, offers)
    kind = kind_of(engine)
    found = []
    for offer in offers:
        seen = f"island of {offer.describe(kind)}"
        if kind != "tpu":  # to ask it is to take it
            memory = min(offer.gpus, default=0) if kind == "cuda" else offer.memory
            seen += f", {memory / GIB:.1f} GiB free{' each' if kind == 'cuda' else ''}"
        found.append(Finding("devices", "ok", seen))
    try:
        slices = map_slices(engine, offers)
    except ConfigError as error:
        return [*found, Finding("slice", "fail", str(error), "choose one that fits")]
    for number, each_slice in enumerate(slices):
        whose = f"engine {number}: " if engine.dp > 1 else ""
        first, parts = 0, []
        for share in each_slice:
            last = first + len(devices_of_ranks(engine, share)) - 1
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
            if engine.backend == "jax":
                ranks += f" with {len(share.devices)} devices"
            parts.append(f"{ranks} on {share.where}")
            first = last + 1
        found.append(Finding("slice", "ok", whose + ", ".join(parts)))
    return found


def _layout(engine: EngineConfig) -> Finding:
    """Whether the model can be split like that; by its config.json."""
    from weft.serving.executor.loading import check_ranks

    try:
        check_ranks(engine)
    except WeftError as error:
        return Finding("layout", "fail", str(error), "choose sizes that work")
    seen = f"{engine.model} over {engine.world_size} ranks"
    return Finding("layout", "ok", seen)


def _board() -> Finding:
    """How fast a step gets to the ranks of a machine, through memory that has no name."""
    size = 64 << 20
    try:
        fd = os.memfd_create("weft-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        advice = "the container must allow memfd_create (see its seccomp profile)"
        return Finding("memfd", "fail", str(error.strerror), advice)
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as memory:
            data = bytes(size)
            memory[:] = data  # pages are made
            begin = time.perf_counter()
            memory[:] = data
            rate = size / (time.perf_counter() - begin)
    finally:
        os.close(fd)
    return Finding("memfd", "ok", f"{rate / 1e9:.1f} GB/s into shared memory")


def _sockets() -> Finding:
    where = tempfile.gettempdir()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="weft-") as folder,
            socket.socket(socket.AF_UNIX) as probe,
        ):
            probe.bind(os.path.join(folder, "probe"))
    except OSError as error:
        advice = "set TMPDIR to a writable local directory with a short path"
        return Finding("sockets", "fail", f"no unix socket in {where}: {error}", advice)
    return Finding("sockets", "ok", f"unix sockets work in {where}")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" for gpu in names)
        return Finding("GPU", "ok", f"{gpus}; CUDA {torch.version.cuda}")
    if Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        advice = "install a CUDA build of torch that the driver supports; see pytorch.org"
        return Finding(
            "GPU", "warn", f"there is a driver, but torch {torch.__version__} sees no GPU", advice
        )
    return Finding("GPU", "ok", "none; weft runs on the processor")


def _model(name: str) -> Finding:
    """Files, names and shapes of a checkpoint; the weights themselves are not read."""
    from weft.models.checkpoint.weights import Weights
    from weft.serving.engine.tokenizer import Tokenizer

    try:
        path = locate(name)
        spec = read_spec(path)
        Weights(path, spec)
        Tokenizer.load(path)
    except ModelError as error:
        return Finding(
            "model", "fail", f"{name}: {error}", "give the directory of a whole checkpoint"
        )
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1024**2
    return Finding("model", "ok", f"{name}: {spec.architecture}, {size:,.0f} MiB of weights")


def _port(host: str, port: int) -> Finding:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            return Finding("port", "ok", f"{host}:{port} is free")
    except OSError as error:
        advice = "choose another --host or --port, or stop what listens there"
        return Finding(
            "port", "fail", f"{host}:{port}: {str(error.strerror).split(' (')[0]}", advice
        )
