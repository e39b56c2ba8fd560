"""Who races, and the best way known to start each on a CPU.

weft runs with its defaults but for the size of its cache; every contestant is
given the same cores, weft and vLLM the same cache. llama.cpp gets as many
slots of `_SLOT` tokens as users: one pool for all makes its attention walk
over every slot's cells (a 1,500-token prompt then took it 8.3 s, not 2.8). A
contestant that is not on this machine becomes a `Missing` that says how to get
it, and is shown as such.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.checkpoint import Checkpoint
from peers.gguf_file import GgufKind, convert

MODEL = "benchmark"  # the model's name on every server
MAX_LEN = 4096
MAX_SEQS = 64
_SLOT = 2048


@dataclass(frozen=True, slots=True)
class Contestant:
    """A program that is raced.

    Attributes:
        name: in tables.
        version: as it says itself.
        command: checkpoint, port -> argv.
        environment: besides this process's own.
        remark: what to know when reading its figures.
        starts: how often its start is timed.
        timeout: seconds that it may take to be ready.
        serves_http: else it speaks the protocol of generate.py over pipes.
        skips: loads that it is not put under; `remark` says why.
    """

    name: str
    version: str
    command: Callable[[Checkpoint, int], list[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    starts: int = 1
    timeout: float = 300.0
    serves_http: bool = True
    skips: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Missing:
    """A contestant that is not on this machine; `remedy` says how to get it."""

    name: str
    remedy: str


def weft(cache: int, quantization: str = "none") -> Contestant:
    """weft itself, as installed in this environment.

    `cache` is the bytes of its KV cache, `quantization` that of its weights.
    """
    return Contestant(
        "weft",
        importlib.metadata.version("weft"),
        lambda checkpoint, port: [
            sys.executable, "-m", "weft", "serve", str(checkpoint.path),
            "--port", str(port), "--served-model-name", MODEL, "--kv-cache-memory", str(cache),
            "--quantization", quantization,
        ],
        starts=3,
    )  # fmt: skip


def vllm(python: Path, cache: int, cores: Sequence[int]) -> Contestant | Missing:
    """vLLM from the environment that `python` belongs to; it compiles, and packs weights."""
    version = _output([str(python), "-c", _VLLM_VERSION]) if python.is_file() else None
    if version is None:
        return Missing("vLLM", "`make bench-peers` installs it; else --vllm-python names it")
    return Contestant(
        "vLLM",
        version,
        lambda checkpoint, port: [
            str(python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(checkpoint.path), "--served-model-name", MODEL, "--port", str(port),
            "--host", "127.0.0.1", "--dtype", "bfloat16",
            "--max-model-len", str(MAX_LEN), "--max-num-seqs", str(MAX_SEQS),
            "--kv-cache-memory-bytes", str(cache),
        ],
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        remark="compiled by inductor; its compile cache is kept between runs",
        timeout=600.0,
    )  # fmt: skip


_VLLM_VERSION = "from importlib.metadata import version as v; print(v('vllm-cpu'))"


def llama_cpp(
    binary: str, cores: Sequence[int], files: Path, kind: GgufKind = "BF16"
) -> Contestant | Missing:
    """llama.cpp's server.

    The checkpoint is converted to a GGUF file in `files` when it starts, with matrices of `kind`.
    """
    found = shutil.which(binary)
    if found is None:
        return Missing("llama.cpp", "put llama-server on the PATH, or name it by --llama-server")
    if importlib.util.find_spec("gguf") is None:
        return Missing("llama.cpp", "pip install gguf: it converts the checkpoint")
    version = re.search(r"version: (.+)", _output([found, "--version"]) or "")

    def command(checkpoint: Checkpoint, port: int) -> list[str]:
        model = convert(
            checkpoint.path, files / f"{checkpoint.path.resolve().name}-{kind}.gguf", kind
        )
        return [
            found, "--model", str(model), "--alias", MODEL, "--port", str(port),
            "--threads", str(len(cores)), "--threads-batch", str(len(cores)),
            "--parallel", str(MAX_SEQS), "--no-kv-unified",
            "--ctx-size", str(MAX_SEQS * _SLOT),
            "--flash-attn", "on", "--cache-ram", "0", "--no-webui",
        ]  # fmt: skip

    return Contestant(
        "llama.cpp",
        version[1] if version else "unknown",
        command,
        remark=f"GGUF in {kind}; not run with 64 users: that takes minutes and has no goal",
        starts=3,
        skips=frozenset({"crowd"}),
    )


def transformers(cores: Sequence[int]) -> Contestant:
    """transformers' `generate`, in process."""
    return Contestant(
        "transformers",
        importlib.metadata.version("transformers"),
        lambda checkpoint, port: [
            sys.executable, "-m", "peers.generate", str(checkpoint.path), str(len(cores)),
        ],
        environment={"PYTHONPATH": str(Path(__file__).parent.parent)},
        remark="one static batch in process, without HTTP, text or scheduler, which favours it; "
        "64 users and a prefix have nothing to compare",
        serves_http=False,
        skips=frozenset({"crowd"}),
    )  # fmt: skip


def _output(command: list[str]) -> str | None:
    """What a command writes, to either stream; None if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip() if done.returncode == 0 else None
