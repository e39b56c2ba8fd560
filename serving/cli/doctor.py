"""`weft doctor`: checks before serving, with advice on each problem.

Each check is a function that returns a Finding. Checks change nothing and load no model. "warn"
means slower or limited serving, "fail" means no serving.

With `--nodes` above 1, the other nodes run `weft join`. Each node checks itself, and then its links
to the others.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import mmap
import os
import platform
import shutil
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from weft.errors import ConfigError, ModelError, WeftError
from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.config.sources import Settings
from weft.serving.executor.nodes.inventory import own_inventory
from weft.serving.executor.nodes.messages import (
    CheckResults,
    End,
    Finding,
    LinkSpeed,
    RunChecks,
    Unreachable,
    differences,
    versions,
)
from weft.serving.executor.placement import (
    Inventory,
    decided,
    devices_of_ranks,
    kind_of,
    map_slices,
)

if TYPE_CHECKING:
    from weft.serving.executor.nodes.curve import Context
    from weft.serving.executor.nodes.remote import JoinedNode

GIB = 1024**3

JOIN_SECONDS = 60.0
"""Time for the other nodes to join."""

CHECK_SECONDS = 120.0
"""Time for a node to check itself."""

SEND_SECONDS = 0.3
"""Time to send over each link."""

ANSWER_SECONDS, MAX_HEALTH = 5.0, 4096
"""Time and bytes for the answer of a server on the port."""

SLOW_LINK = 1e9
"""Bytes per second; do not split layers over a slower link."""


@click.command(cls=TopicCommand)
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@takes(EngineConfig, ServerConfig, model=True)
def doctor(settings: Settings, as_json: bool) -> int:
    """Check that this machine can serve.

    Checks versions, processor, memory, models, GPUs and the port. Exits with 1 if something
    prevents serving. With --nodes, checks the other machines and the links between them, too.

    \b
    weft doctor
    weft doctor Qwen/Qwen3-0.6B --tp 2
    """
    return run(settings.build(EngineConfig), settings.build(ServerConfig), as_json=as_json)


def run(engine: EngineConfig, server: ServerConfig, *, as_json: bool = False) -> int:
    """Print all findings; return 1 if one is "fail", else 0."""
    findings = examine(engine, server)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
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
    """Check this node, and with `nodes` the other ones after it."""
    from weft.models.checkpoint.locate import BUNDLED

    if problem := _prerequisites():
        return problem
    found = examine_machine(engine, BUNDLED)
    found.append(_port(server.host, server.port))
    if engine.world_size > 1:
        found.append(_layout(engine))
    if engine.nodes > 1:
        found += examine_others(engine)
    elif engine.dp * engine.world_size > 1:
        found += devices(engine, [own_inventory(engine)])
    return found


def examine_machine(engine: EngineConfig, models: Collection[str] = ()) -> list[Finding]:
    """Check this node, and besides the engine's model these `models`."""
    if problem := _prerequisites():
        return problem
    others = [name for name in models if name != engine.model]
    found = [
        _python(),
        _libraries(),
        _processor(),
        _kernels(),
        _cores(engine),
        _memory(),
        _shared_memory(),
        _sockets(),
        _zeromq(engine),
        _gpu(),
        *(_model(EngineConfig(model=name)) for name in others),
        _model(engine),
    ]
    if engine.world_size > 1:
        found.append(_memfd())
    return found


def _prerequisites() -> list[Finding]:
    """Check Python and libraries; empty if both are fine. Without them no other check can run."""
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
    from weft.kernels.cpu import native

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    fast = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    seen = f"{facts.get('model name', platform.machine())}: {', '.join(fast) or 'no AVX'}"
    if not flags & {"avx512_bf16", "amx_bf16", "bf16"} and native.library() is None:
        advice = "bfloat16 is emulated: --dtype float32 is faster where the model fits"
        return Finding("processor", "warn", seen, advice)
    return Finding("processor", "ok", seen)


def _kernels() -> Finding:
    """Check that the CPU kernels are compiled, if this processor can run them."""
    import torch

    from weft.kernels.cpu import native

    if native.library() is not None:
        return Finding("CPU kernels", "ok", "compiled, for bfloat16, int8 and int4")
    if torch.cpu._is_avx2_supported():
        advice = (
            "install g++ 11 or newer, then reinstall weft: decoding gets up to 1.6 times as fast"
        )
        seen = "compiled, but fail to load" if native.FILE.exists() else "not compiled"
        return Finding("CPU kernels", "warn", f"{seen}: torch's operators are used", advice)
    return Finding("CPU kernels", "ok", "torch's operators; the compiled ones need AVX2")


def _cores(engine: EngineConfig) -> Finding:
    usable, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    seen = f"{usable} usable, load {load:.1f}"
    ranks = engine.dp * engine.world_size
    processes = -(-ranks // engine.nodes)  # on this node, if all nodes run equally many
    if ranks > 1:
        part = f"{processes} of " if engine.nodes > 1 else ""
        seen += f"; for {part}{ranks} ranks ({engine.dp} engines of {engine.world_size})"
    if processes > usable:
        advice = "use fewer ranks, or lower --dp: ranks on one core wait for each other"
        return Finding("cores", "warn", seen, advice)
    if load > usable:
        advice = (
            "stop other programs, or set --threads to the number of idle cores: sharing is slow"
        )
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
    """Report each node's devices, which form an island, and the ranks assigned to them."""
    try:
        engine = decided(engine, offers)
    except ModelError:  # of a model that is not here yet; its size may ask for more devices
        engine = decided(dataclasses.replace(engine, tp=engine.tp_size), offers)
    kind = kind_of(engine)
    found = []
    for offer in offers:
        seen = f"island of {offer.describe(kind)}"
        if kind != "tpu":  # asking a TPU for its memory would occupy it
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
    """Check that the model can be split over the ranks; reads only config.json."""
    from weft.serving.executor.loading import check_ranks

    try:
        check_ranks(engine)
    except WeftError as error:
        return Finding("layout", "fail", str(error), "choose sizes that work")
    seen = f"{engine.model} over {engine.world_size} ranks"
    return Finding("layout", "ok", seen)


def _memfd() -> Finding:
    """Measure writes to anonymous shared memory, which carries steps to the node's ranks."""
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
            memory[:] = data  # allocates the pages
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


def _zeromq(engine: EngineConfig) -> Finding:
    """Check libzmq's encryption for messages between nodes."""
    import zmq

    from weft.serving.executor.nodes.curve import check_curve

    try:
        check_curve()
    except ConfigError as error:
        return Finding("zeromq", "fail" if engine.nodes > 1 else "warn", *str(error).split(": ", 1))
    return Finding("zeromq", "ok", f"libzmq {zmq.zmq_version()} with CURVE")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" for gpu in names)
        return Finding("GPU", "ok", f"{gpus}; CUDA {torch.version.cuda}")
    if Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        advice = "install a CUDA build of torch for this driver; see pytorch.org"
        return Finding(
            "GPU",
            "warn",
            f"a driver is installed, but torch {torch.__version__} sees no GPU",
            advice,
        )
    return Finding("GPU", "ok", "none; weft runs on the processor")


def _model(config: EngineConfig) -> Finding:
    """Check a checkpoint's files, tensor names and shapes, without reading the weights."""
    from weft.models.checkpoint.locate import find_files, locate, read_spec, remote
    from weft.models.checkpoint.weights import Weights
    from weft.serving.engine.generation_config import load_generation_config
    from weft.serving.engine.tokenizer import load_tokenizer
    from weft.serving.executor.fetch import is_here

    try:
        if not is_here(config):
            source = remote(config.model, config.revision)
            if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "on", "true", "yes"):
                advice = "unset HF_HUB_OFFLINE, or copy the hub's cache from another machine"
                return Finding("model", "fail", f"{source} is not on this machine", advice)
            advice = "weft serve downloads it at its first start, if the name is right"
            return Finding("model", "warn", f"{source} is not on this machine", advice)
        path = locate(config.model, config.revision)
        spec = read_spec(path)
        Weights(path, spec)
        load_tokenizer(config)
        load_generation_config(config)
    except (ConfigError, ModelError) as error:
        return Finding(
            "model",
            "fail",
            f"{config.model}: {error}",
            "correct the setting, or give a complete checkpoint: a directory or a GGUF file",
        )
    size = sum(file.stat().st_size for file in find_files(path)) / 1024**2
    return Finding(
        "model", "ok", f"{config.model}: {spec.architecture}, {size:,.0f} MiB of weights"
    )


def _port(host: str, port: int) -> Finding:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family):
            return Finding("port", "ok", f"{host}:{port} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE and (status := _running_weft(host, port)):
            seen = f"{host}:{port}: a weft server already answers there; its engine is {status}"
            return Finding("port", "ok", seen)
        advice = "choose another --host or --port, or stop the program that listens there"
        return Finding(
            "port", "fail", f"{host}:{port}: {str(error.strerror).split(' (')[0]}", advice
        )


def _running_weft(host: str, port: int) -> str | None:
    """Return the engine status from a weft server at an address; None if there is none."""
    from weft.serving.api.openai.replies import Health

    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    unverified = ssl._create_unverified_context()  # this only asks for the server's status
    for connection in (
        HTTPConnection(host, port, timeout=ANSWER_SECONDS),
        HTTPSConnection(host, port, timeout=ANSWER_SECONDS, context=unverified),
    ):
        with closing(connection), suppress(OSError, HTTPException, msgspec.MsgspecError):
            connection.request("GET", "/health")
            health = msgspec.json.decode(connection.getresponse().read(MAX_HEALTH), type=Health)
            return health.engine
    return None


def examine_others(config: EngineConfig) -> list[Finding]:
    """Check the nodes that join, and the links between all nodes.

    Raises:
        ConfigError: these settings do not allow nodes to join.
    """
    import zmq

    from weft.serving.executor.nodes.join_listener import JoinListener
    from weft.serving.executor.nodes.link import LINGER
    from weft.serving.executor.nodes.multi_node_executor import (
        check_addresses,
        check_nodes,
        own_address,
    )
    from weft.serving.executor.nodes.probe import measure_links

    if config.executor == "ray":
        raise ConfigError(
            "--executor is ray; weft doctor checks nodes that run weft join, without Ray: leave "
            "out --executor, and run weft join on the nodes during the check"
        )
    check_nodes(config)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    others: list[JoinedNode] = []
    context: Context = zmq.Context()
    try:
        with JoinListener(context, config, strict=False) as listener:
            listener.log_join_command(config.nodes - 1)
            others += listener.wait_for(config.nodes - 1, JOIN_SECONDS)
        missing = config.nodes - 1 - len(others)
        present = ", ".join(["this one", *(joined.where for joined in others)])
        if missing:
            advice = (
                f"{missing} more must run weft join, and reach --node-port {listener.port} here"
            )
            return [Finding("machines", "fail", present, advice)]
        found = [Finding("machines", "ok", present)]
        own = own_address(config, others)
        check_addresses([own, *(joined.hello.address for joined in others)])
        for source, target, speed in measure_links(own, others, SEND_SECONDS):
            found.append(_link(source, target, speed))
        offers = [own_inventory(config), *(joined.hello.inventory for joined in others)]
        found += devices(config, offers)
        for joined in others:
            found += _node(config, joined)
        return found
    finally:
        for joined in others:
            with suppress(OSError):  # the node has left
                joined.link.send(End(0.0))
            joined.link.close()
        context.destroy(LINGER)  # the last messages have left then


def _link(source: str, target: str, speed: LinkSpeed | Unreachable) -> Finding:
    between = f"{source} to {target}"
    if isinstance(speed, Unreachable):
        advice = "open all ports between the nodes, or give each its --node-address"
        return Finding("link", "fail", f"{between}: {speed.reason}", advice)
    seen = (
        f"{between}: {speed.bandwidth / 1e9:.2f} GB/s, {1e6 * speed.round_trip:.0f} us round trip"
    )
    if speed.bandwidth < SLOW_LINK:
        advice = "slow for --tp and --ep: use --pp, with each stage on one node"
        return Finding("link", "warn", seen, advice)
    return Finding("link", "ok", seen)


def _node(config: EngineConfig, joined: JoinedNode) -> list[Finding]:
    """Compare a node's versions with ours, and have the node check itself."""
    where = joined.where
    if wrong := differences(versions(), joined.versions):
        advice = "install the same versions on all nodes"
        found = [Finding("versions", "fail", "; ".join(wrong), advice)]
    else:
        same = ", ".join(f"{name} {number}" for name, number in versions().items())
        found = [Finding("versions", "ok", f"{same} as here")]
    asked = dataclasses.replace(config, node_token=None, node_token_file=None)
    with suppress(OSError):
        joined.link.send(RunChecks(asked))
        match joined.link.wait(CHECK_SECONDS):
            case CheckResults(findings):
                found += findings
                return [dataclasses.replace(finding, machine=where) for finding in found]
    advice = "see the log of weft join on that node"
    found.append(Finding("machine", "fail", "it does not answer", advice))
    return [dataclasses.replace(finding, machine=where) for finding in found]
