"""Every setting of weft, in frozen dataclasses that check themselves.

The command line, a configuration file and the environment all end here (see
settings.py for which wins); nothing below reads argv or the environment. A
setting is written once, as a field: its flag, file key, environment variable,
help text, type and range are all taken from that line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from weft.errors import ConfigError
from weft.serving.config.fields import Help, check
from weft.serving.config.logs import LogFormat
from weft.serving.config.slices import Slice, parse

Backend = Literal["auto", "torch", "jax"]
Dtype = Literal["auto", "bfloat16", "float32"]
Quantization = Literal["none", "int8"]
Device = Literal["auto", "cpu", "cuda", "tpu"]
Kernels = Literal["auto", "overlapped", "plain"]
Placing = Literal["processes", "ray"]
PoolingChoice = Literal["auto", "mean", "last"]
MAX_RANKS = 64
"""Of one engine, on all its machines together."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Which of the `dp` engine cores a configuration is for, and its share of the machine.

    Attributes:
        number: from 0.
        memory: bytes that count as free for it; None for all that are.
        engines: how many share the machine's cores.
        slice: the devices of its ranks, on all machines.
        group: a name that all cores of one front have, and no others; for Ray.
    """

    number: int = 0
    memory: int | None = None
    engines: int = 1
    slice: Slice = ()
    group: str = ""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine needs. Memory sizes are in bytes, times in seconds.

    All fields are settings but `replica`, which the front fills in for each engine core.
    """

    model: Annotated[str, Help("a checkpoint's directory, or a bundled model's name")] = "weft-demo"
    tokenizer: Annotated[str | None, Help("the tokenizer's directory, if not the model's")] = None
    backend: Annotated[
        Backend, Help("what runs the model; auto is jax where it finds TPUs, else torch")
    ] = "auto"
    compile_cache: Annotated[
        str | None, Help("folder that keeps what jax has compiled; else ~/.cache/weft/jax")
    ] = None
    dtype: Annotated[Dtype, Help("compute type; auto is the checkpoint's")] = "auto"
    quantization: Annotated[
        Quantization, Help("of the weights at load: int8 has a scale per output channel")
    ] = "none"
    compress_weights: Annotated[
        bool, Help("keep bfloat16 matrices in 12 bits a number, without loss, to read fewer bytes")
    ] = True
    tp: Annotated[
        int,
        Help(
            "ranks that share each layer (tensor parallel): processes, or devices of jax",
            ge=1,
            le=MAX_RANKS,
        ),
    ] = 1
    ep: Annotated[
        int,
        Help(
            "parts of the experts (expert parallel); beyond --tp, attention has --ep / --tp copies",
            ge=1,
            le=MAX_RANKS,
        ),
    ] = 1
    dp: Annotated[
        int,
        Help("engines, each with ranks of its own, that share the requests", ge=1, le=MAX_RANKS),
    ] = 1
    cp: Annotated[
        int,
        Help("ranks that share each KV head, by position (context parallel)", ge=1, le=MAX_RANKS),
    ] = 1
    pp: Annotated[
        int,
        Help(
            "stages of some layers each (pipeline parallel), of so many ranks", ge=1, le=MAX_RANKS
        ),
    ] = 1
    device: Annotated[
        Device,
        Help("what ranks compute on; auto is TPUs, or GPUs where there is one for each rank"),
    ] = "auto"
    kernels: Annotated[
        Kernels,
        Help(
            "overlapped hides the ranks' traffic in products (auto on GPUs, in part on TPUs; on "
            "CPUs interpreted, slow); plain does not"
        ),
    ] = "auto"
    cuda_graphs: Annotated[
        bool, Help("record steps of decodes at the start, and replay them, on GPUs")
    ] = True
    executor: Annotated[
        Placing, Help("who starts ranks: weft itself, or a Ray cluster on the nodes it has")
    ] = "processes"
    nodes: Annotated[
        int,
        Help("machines that the ranks are dealt out to; others run weft join", ge=1, le=MAX_RANKS),
    ] = 1
    devices: Annotated[
        str | None,
        Help(
            "each engine's slice: 8 (any), 2x4 (of two islands four each), 4+1, nvlink:8; else "
            "all --nodes take part"
        ),
    ] = None
    node_address: Annotated[
        str | None,
        Help("this machine's IP address for ranks of others; else where these have reached it"),
    ] = None
    node_port: Annotated[
        int, Help("port at which machines join, with --nodes above 1", ge=0, le=65535)
    ] = 7333
    node_token: Annotated[
        str | None,
        Help(
            "what machines must know to join, 16 characters or more; else the head makes one",
            secret=True,
        ),
    ] = None
    node_ranks: Annotated[
        int | None,
        Help("most ranks that share this machine's cores; else as many as are dealt to it", ge=1),
    ] = None
    max_model_len: Annotated[
        int | None,
        Help("most tokens of a request, prompt and output; else the model's limit", ge=1),
    ] = None
    threads: Annotated[int | None, Help("CPU threads of the model; else all cores", ge=1)] = None
    block_size: Annotated[int, Help("tokens of a block of the KV cache on one rank", ge=1)] = 16
    kv_cache_memory: Annotated[
        int | None,
        Help("memory for a rank's KV cache; else what is left", ge=1, unit="bytes"),
    ] = None
    memory_fraction: Annotated[
        float, Help("share of the free memory that weft may take", gt=0, le=1)
    ] = 0.8
    prefix_caching: Annotated[
        bool, Help("keep the KV cache of finished requests for prompts that start alike")
    ] = True
    pooling: Annotated[
        PoolingChoice,
        Help(
            "tokens that an embedding is of: the mean of all, or the last; auto is the "
            "checkpoint's, else last"
        ),
    ] = "auto"
    max_num_seqs: Annotated[
        int, Help("most requests that run at once, on each copy of attention", ge=1)
    ] = 128
    max_num_batched_tokens: Annotated[
        int, Help("most tokens of one step, for each copy of attention", ge=1)
    ] = 2048
    max_queue: Annotated[int, Help("most requests that wait; more get a 429", ge=1)] = 1024
    grammar_timeout: Annotated[
        float, Help("seconds that a request's grammar may take to compile", gt=0)
    ] = 10.0
    seed: Annotated[int, Help("random seed of requests that bring none")] = 0
    stall_timeout: Annotated[
        float,
        Help("seconds without a step, with work at hand, until the engine counts as stuck", gt=0),
    ] = 60.0
    load_stall_timeout: Annotated[
        float,
        Help("seconds in which no rank gets on with loading, until they count as stuck", gt=0),
    ] = 300.0
    log_format: Annotated[
        LogFormat, Help("of what goes to stderr: text for people, json for programs")
    ] = "text"
    replica: Replica = Replica()

    def __post_init__(self) -> None:
        check(self)
        kind = None if self.devices is None else parse(self.devices).kind
        if kind is not None and self.device not in ("auto", kind):
            raise ConfigError(
                f"--device is {self.device}; with --devices {self.devices} it must be {kind}, or "
                "auto"
            )
        if kind == "cuda" and self.backend == "jax":
            raise ConfigError(
                f"--devices is {self.devices}; with --backend jax it must be such as 8, 2x4 or 4+1"
            )
        if self.device == "tpu" and self.backend == "torch":
            raise ConfigError("--device is tpu; with --backend torch it must be auto, cpu or cuda")
        if self.world_size > MAX_RANKS:
            raise ConfigError(
                f"--tp is {self.tp}, --cp {self.cp}, --ep {self.ep} and --pp {self.pp}: "
                f"{self.world_size} ranks; there can be at most {MAX_RANKS}"
            )

    @property
    def stage_size(self) -> int:
        """Ranks of a stage."""
        return max(self.tp * self.cp, self.ep)

    @property
    def world_size(self) -> int:
        """Ranks: processes that the model is split over. With `dp`, of each engine."""
        return self.stage_size * self.pp

    @property
    def cache_block(self) -> int:
        """Tokens in a block of the KV cache: --block-size on each rank that has a part of it."""
        return self.block_size * self.cp

    @property
    def copies(self) -> int:
        """Of attention: each has requests and a KV cache of its own."""
        return max(1, self.ep // (self.tp * self.cp))


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the API process needs besides the engine."""

    host: Annotated[str, Help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Help("port to listen on; 0 picks a free one", ge=0, le=65535)] = 8000
    served_model_name: Annotated[
        str | None, Help("the model's name in the API; else the last part of its path")
    ] = None
    tool_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral", "pythonic"],
        Help("how the model writes calls of tools; auto: as its chat template does"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "mistral"],
        Help("how the model marks its reasoning; auto: as its chat template does"),
    ] = "auto"
    drain_timeout: Annotated[
        float, Help("seconds that running requests get to finish at shutdown", ge=0)
    ] = 30.0
    page: Annotated[bool, Help("serve a playground for browsers at /")] = True
    restart: Annotated[
        bool, Help("start an engine that fails again, and answer 503 until it serves")
    ] = False
    state_dir: Annotated[
        str | None,
        Help("folder of uploaded files and batches, which go on at the next start; else temporary"),
    ] = None
    log_requests: Annotated[
        bool, Help("a line in the log for each request, without its prompt")
    ] = False
    log_prompts: Annotated[
        bool, Help("--log-requests with the prompts, as the model sees them")
    ] = False
    otlp_endpoint: Annotated[
        str | None,
        Help("OpenTelemetry collector that gets traces, such as http://127.0.0.1:4318"),
    ] = None
    api_key: Annotated[
        str | None,
        Help(
            "what clients must send, several with commas between; WEFT_API_KEY hides it from `ps`",
            secret=True,
        ),
    ] = field(default=None, repr=False)
    api_key_file: Annotated[
        str | None, Help("file of API keys, one a line, then its name; SIGHUP reads it again")
    ] = None
    open_metrics: Annotated[bool, Help("let /metrics be read without an API key")] = False
    max_requests_per_key: Annotated[
        int | None, Help("most requests of an API key under way; more get a 429", ge=1)
    ] = None
    tokens_per_minute_per_key: Annotated[
        int | None,
        Help("tokens, of prompts and answers, that an API key is granted in a minute", ge=1),
    ] = None
    request_timeout: Annotated[
        float | None, Help("seconds that a request may take, waiting included; then a 504", gt=0)
    ] = None
    write_timeout: Annotated[
        float, Help("seconds in which a client must read what is sent, or it is cut off", gt=0)
    ] = 60.0
    ssl_certfile: Annotated[
        str | None, Help("PEM file of the certificate chain: serve HTTPS; SIGHUP reads it again")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Help("PEM file of its private key, if not in --ssl-certfile")
    ] = None
    ssl_keyfile_password: Annotated[
        str | None, Help("that the private key is encrypted with", secret=True)
    ] = field(default=None, repr=False)
    ssl_ca_certs: Annotated[
        str | None, Help("PEM file of authorities; clients must have a certificate of one of them")
    ] = None
    cors_origins: Annotated[
        str | None,
        Help("web pages whose scripts may ask, such as https://a.example,https://b.example; or *"),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is given without --ssl-certfile")


TOPICS: dict[str, tuple[str, ...]] = {
    "Model": (
        *("model", "tokenizer", "dtype", "quantization", "compress_weights", "pooling", "seed"),
    ),
    "Server": (*("host", "port", "served_model_name", "tool_parser", "reasoning_parser", "page"),),
    "Security": (
        *("api_key", "api_key_file", "open_metrics"),
        *("max_requests_per_key", "tokens_per_minute_per_key", "cors_origins"),
        *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"),
    ),
    "Engine and scheduling": (
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("max_queue", "threads", "grammar_timeout"),
    ),
    "Cache and memory": (*("memory_fraction", "kv_cache_memory", "block_size", "prefix_caching"),),
    "Parallelism": ("tp", "ep", "cp", "pp", "dp", "devices"),
    "Several machines": (
        *("nodes", "executor", "node_address", "node_port", "node_token", "node_ranks"),
    ),
    "Backend and kernels": ("backend", "device", "kernels", "cuda_graphs", "compile_cache"),
    "Reliability": (
        *("restart", "drain_timeout", "request_timeout", "write_timeout"),
        *("stall_timeout", "load_stall_timeout"),
    ),
    "Batches, logs and tracing": (
        *("state_dir", "log_format", "log_requests", "log_prompts", "otlp_endpoint"),
    ),
}
"""Topic -> names of its settings, in the order of the help and of docs/configuration.md."""
