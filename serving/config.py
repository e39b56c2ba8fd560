"""Every setting of weft, in frozen and validated dataclasses.

The command line, a configuration file and the environment all end here (see
cli.py for which wins); nothing below this file reads argv or the environment.
A setting is written once, as a field: its flag, file key, environment variable
and help text are all derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from weft.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class Help:
    """What `--help` says of the field it annotates.

    Attributes:
        text: one line.
        unit: "bytes" lets a text value be written as 512M or 4GiB.
    """

    text: str
    unit: Literal["bytes"] | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs. Memory sizes are in bytes, times in seconds."""

    model: Annotated[str, Help("a checkpoint's directory, or the name of a bundled model")] = (
        "weft-demo"
    )
    tokenizer: Annotated[
        str | None, Help("the tokenizer's directory, when it is not the model's")
    ] = None
    dtype: Annotated[Dtype, Help("compute type; auto is the checkpoint's")] = "auto"
    max_model_len: Annotated[
        int | None,
        Help("most tokens of a request, prompt and output; the model's own limit if not set"),
    ] = None
    threads: Annotated[int | None, Help("CPU threads of the model; all cores if not set")] = None
    block_size: Annotated[int, Help("tokens in one block of the KV cache")] = 32
    kv_cache_memory: Annotated[
        int | None,
        Help("bytes for the KV cache (4G, 512M); what is left, if not set", unit="bytes"),
    ] = None
    memory_fraction: Annotated[float, Help("share of the free memory that weft may take")] = 0.8
    prefix_caching: Annotated[
        bool, Help("keep the cache of prompts for later prompts that start alike")
    ] = True
    max_num_seqs: Annotated[int, Help("most requests that run at once")] = 128
    max_num_batched_tokens: Annotated[int, Help("most tokens of one step")] = 2048
    max_queue: Annotated[int, Help("most requests that wait; more get a 429")] = 1024
    seed: Annotated[int, Help("random seed of requests that bring none")] = 0
    stall_timeout: Annotated[
        float, Help("with work at hand and no step done for so long, the engine counts as stuck")
    ] = 60.0

    def __post_init__(self) -> None:
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("threads", self.threads, 1)
        _at_least("block_size", self.block_size, 1)
        _at_least("kv_cache_memory", self.kv_cache_memory, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_queue", self.max_queue, 1)
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"--memory-fraction is {self.memory_fraction}; it must be in (0, 1]")
        if not self.stall_timeout > 0.0:
            raise ConfigError(f"--stall-timeout is {self.stall_timeout}; it must be above 0")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the API process needs besides the engine."""

    host: Annotated[str, Help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Help("port to listen on; 0 picks a free one")] = 8000
    served_model_name: Annotated[
        str | None, Help("the model's name in the API; its path's last part if not set")
    ] = None
    drain_timeout: Annotated[
        float, Help("seconds that running requests get to finish at shutdown")
    ] = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be in [0, 65535]")
        if not self.drain_timeout >= 0.0:
            raise ConfigError(f"--drain-timeout is {self.drain_timeout}; it must be at least 0")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} is {value}; it must be at least {low}")
