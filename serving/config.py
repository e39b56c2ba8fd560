"""Every setting of weft, in frozen and validated dataclasses.

The command line, a configuration file and the environment all end here (see
cli.py for which wins); nothing below this file reads argv or the environment.
A setting is written once, as a field: its flag, file key, environment variable
and help text are all derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from weft.errors import ConfigError

Dtype = Literal["auto", "bfloat16", "float32"]


def setting(default: Any, help: str) -> Any:
    """A dataclass field with its one-line help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs. Memory sizes are in bytes, times in seconds."""

    model: str = setting("weft-demo", "a checkpoint's directory, or the name of a bundled model")
    tokenizer: str | None = setting(None, "the tokenizer's directory, when it is not the model's")
    dtype: Dtype = setting("auto", "compute type; auto is the checkpoint's")
    max_model_len: int | None = setting(
        None, "most tokens of a request, prompt and output; the model's own limit if not set"
    )
    threads: int | None = setting(None, "CPU threads of the model; all cores if not set")
    block_size: int = setting(32, "tokens in one block of the KV cache")
    kv_cache_memory: int | None = setting(
        None, "bytes for the KV cache (4G, 512M); what is left, if not set"
    )
    memory_fraction: float = setting(0.8, "share of the free memory that weft may take")
    prefix_caching: bool = setting(
        True, "keep the cache of prompts for later prompts that start alike"
    )
    max_num_seqs: int = setting(128, "most requests that run at once")
    max_num_batched_tokens: int = setting(2048, "most tokens of one step")
    max_queue: int = setting(1024, "most requests that wait; more get a 429")
    seed: int = setting(0, "of requests that bring none")
    stall_timeout: float = setting(
        60.0, "with work at hand and no step done for so long, the engine counts as stuck"
    )

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

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 picks a free one")
    served_model_name: str | None = setting(
        None, "the model's name in the API; its path's last part if not set"
    )
    drain_timeout: float = setting(30.0, "seconds that running requests get to finish at shutdown")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must be in [0, 65535]")
        if self.drain_timeout < 0:
            raise ConfigError(f"--drain-timeout is {self.drain_timeout}; it must be at least 0")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} is {value}; it must be at least {low}")
