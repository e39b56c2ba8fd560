"""Every setting of weft, in frozen dataclasses that check themselves.

Settings come from the command line, a configuration file and the environment; sources.py decides
the precedence. This module reads neither argv nor the environment. Each setting is defined once, as
a field: the flag, file key, environment variable, help text, type and range all come from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from weft.errors import ConfigError
from weft.serving.config.fields import Help, check
from weft.serving.config.logs import LogFormat
from weft.serving.config.slices import Slice, parse

Backend = Literal["auto", "torch", "jax"]
Dtype = Literal["auto", "bfloat16", "float16", "half", "float32"]
Quantization = Literal["none", "int8", "int4"]
KvCacheDtype = Literal["auto", "fp8"]
Device = Literal["auto", "cpu", "cuda", "tpu"]
Kernels = Literal["auto", "overlapped", "plain"]
Placing = Literal["processes", "ray"]
PoolingChoice = Literal["auto", "mean", "last"]
ToolParser = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "functiongemma",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "hermes",
    "hunyuan_a13b",
    "kimi_k2",
    "llama3_json",
    "llama4_pythonic",
    "minimax_m2",
    "mistral",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
]
ReasoningParser = Literal[
    "auto",
    "none",
    "gemma4",
    "granite",
    "hunyuan_a13b",
    "mistral",
    "openai_gptoss",
    "seed_oss",
    "think",
]
MAX_RANKS = 64
"""Maximum ranks per engine, on all its machines together."""
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")
_HOST_NAME = re.compile(r"\*|[a-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Replica:
    """One of the `dp` engines, with its share of the machine.

    Attributes:
        number: index, from 0.
        memory: free bytes that this engine may count on; None for all free bytes.
        engines: how many engines share the cores of the machine.
        slice: devices for this engine's ranks, on all machines.
        group: name shared by exactly the engines behind one API process; for Ray.
    """

    number: int = 0
    memory: int | None = None
    engines: int = 1
    slice: Slice = ()
    group: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """An engine's largest steps and its memory. The defaults depend on the kind of device.

    Attributes:
        max_num_seqs: maximum number of concurrent requests, for each attention group.
        max_num_batched_tokens: maximum number of tokens in a step, for each attention group.
        memory_fraction: fraction of the free memory.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    memory_fraction: float


CAPACITY = Capacity(128, 2048, 0.8)
"""Defaults on CPUs and TPUs."""

GPU_CAPACITY = Capacity(512, 8192, 0.9)
"""Defaults on GPUs."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings for the engine. Memory sizes are in bytes, times in seconds.

    Every field except `replica` is a setting. The API process fills in `replica` for each engine.
    """

    model: Annotated[
        str,
        Help(
            "OWNER/NAME on the Hugging Face hub, a directory, a GGUF file, a bundled model, or a "
            "URL with hf://, s3:// or gs://"
        ),
    ] = "weft-demo"
    revision: Annotated[
        str | None, Help("branch, tag or commit of a model on the hub; else main")
    ] = None
    tokenizer: Annotated[
        str | None, Help("tokenizer's directory, or a model on the hub; else the model's")
    ] = None
    chat_template: Annotated[
        str | None, Help("file with a Jinja chat template; else the model's")
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        Help(
            "JSON object with arguments for the chat template, such as "
            '{"enable_thinking": false}; a request may override them'
        ),
    ] = None
    generation_config: Annotated[
        str,
        Help(
            "sampling defaults: model (its generation_config.json), none, or a path to such a file"
        ),
    ] = "model"
    backend: Annotated[
        Backend, Help("torch or jax; auto is jax where all machines have TPUs, else torch")
    ] = "auto"
    compile_cache: Annotated[
        str | None,
        Help("folder for compiled steps; else ~/.cache/weft/jax, or Triton's own on GPUs"),
    ] = None
    dtype: Annotated[
        Dtype,
        Help("compute type; auto uses the checkpoint's; bfloat16 replaces float16 (half)"),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Help(
            "rounds weights when loading: int8 with one scale per output channel, int4 with one "
            "per group of 32 inputs; not on TPUs"
        ),
    ] = "none"
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Help(
            "fp8 (e4m3) stores keys and values in one byte per number, for twice the tokens; GPUs "
            "only, from compute capability 8.9; auto is the compute type"
        ),
    ] = "auto"
    compress_weights: Annotated[
        bool,
        Help("store bfloat16 matrices losslessly in 12 bits per number, with compiled CPU kernels"),
    ] = True
    tp: Annotated[
        int | None,
        Help(
            "tensor-parallel size: ranks (or jax devices) that share each layer; else the fewest "
            "GPUs or TPUs with room for the model",
            ge=1,
            le=MAX_RANKS,
        ),
    ] = None
    ep: Annotated[
        int,
        Help(
            "expert-parallel size; if larger than --tp x --cp, attention runs data-parallel",
            ge=1,
            le=MAX_RANKS,
        ),
    ] = 1
    redundant_experts: Annotated[
        int,
        Help(
            "slots for copies of experts with many tokens, on all ranks of --ep together; needs "
            "overlapped kernels, and --tp and --cp of 1",
            ge=0,
        ),
    ] = 0
    dp: Annotated[
        int,
        Help(
            "number of engines, each with its own ranks and a whole model; they share the requests",
            ge=1,
            le=MAX_RANKS,
        ),
    ] = 1
    cp: Annotated[
        int,
        Help(
            "context-parallel size: ranks that share each KV head, split by position",
            ge=1,
            le=MAX_RANKS,
        ),
    ] = 1
    pp: Annotated[
        int,
        Help("pipeline-parallel size: number of stages, each with some layers", ge=1, le=MAX_RANKS),
    ] = 1
    device: Annotated[
        Device,
        Help("device type; auto uses TPUs, or GPUs if there is one for each rank, else CPUs"),
    ] = "auto"
    kernels: Annotated[
        Kernels,
        Help(
            "overlapped hides communication between ranks behind matrix products (on CPUs: "
            "interpreted, slow); plain does not; auto is overlapped on GPUs where possible, "
            "and in part on TPUs"
        ),
    ] = "auto"
    cuda_graphs: Annotated[bool, Help("record small steps as CUDA graphs when loading")] = True
    executor: Annotated[Placing, Help("how to start ranks: as processes, or on a Ray cluster")] = (
        "processes"
    )
    nodes: Annotated[
        int,
        Help("number of nodes (machines); run weft join on the other ones", ge=1, le=MAX_RANKS),
    ] = 1
    devices: Annotated[
        str | None,
        Help(
            "devices for each engine: 8 (any), 2x4 (four on each of two nodes or "
            "NVLink domains), 4+1, nvlink:8; else all --nodes are used"
        ),
    ] = None
    node_address: Annotated[
        str | None,
        Help("this machine's IP address for traffic between ranks; else the one used to join"),
    ] = None
    node_port: Annotated[
        int, Help("port where other machines join; used if --nodes is above 1", ge=0, le=65535)
    ] = 7333
    node_token: Annotated[
        str | None,
        Help(
            "secret for joining, at least 16 characters; else weft serve makes one",
            secret=True,
        ),
    ] = None
    node_token_file: Annotated[str | None, Help("file with the --node-token")] = None
    node_ranks: Annotated[
        int | None,
        Help("maximum ranks on this machine's CPUs; else no limit", ge=1),
    ] = None
    max_model_len: Annotated[
        int | None,
        Help("maximum tokens per request, prompt plus output; else the model's limit", ge=1),
    ] = None
    threads: Annotated[int | None, Help("CPU threads for the model; else all cores", ge=1)] = None
    block_size: Annotated[
        int | None,
        Help("tokens in a KV cache block on one rank; else 16, or more on TPUs", ge=1),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        Help("KV cache memory for each rank; else all that remains", ge=1, unit="bytes"),
    ] = None
    memory_fraction: Annotated[
        float | None,
        Help(
            "fraction of the free memory that weft may use; else 0.8 on CPUs and TPUs, 0.9 on GPUs",
            gt=0,
            le=1,
        ),
    ] = None
    prefix_caching: Annotated[bool, Help("reuse the KV cache for prompts with the same prefix")] = (
        True
    )
    pooling: Annotated[
        PoolingChoice,
        Help(
            "embedding pooling: mean (all tokens) or last (token); auto follows the "
            "checkpoint, else last"
        ),
    ] = "auto"
    max_num_seqs: Annotated[
        int | None,
        Help(
            "maximum concurrent requests, for each engine and attention group; else 128 on CPUs "
            "and TPUs, 512 on GPUs",
            ge=1,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Help(
            "maximum tokens in a step, for each engine and attention group; else 2048 on CPUs and "
            "TPUs, 8192 on GPUs",
            ge=1,
        ),
    ] = None
    max_queue: Annotated[int, Help("maximum waiting requests; further ones get a 429", ge=1)] = 1024
    grammar_timeout: Annotated[
        float, Help("maximum seconds of processor time to compile a request's grammar", gt=0)
    ] = 10.0
    seed: Annotated[int, Help("random seed for requests without one")] = 0
    stall_timeout: Annotated[
        float,
        Help(
            "the engine fails if it has work but finishes no step for this many seconds",
            gt=0,
        ),
    ] = 60.0
    load_stall_timeout: Annotated[
        float,
        Help("give up loading if no rank makes progress for this many seconds", gt=0),
    ] = 300.0
    log_format: Annotated[
        LogFormat, Help("log format on stderr: text for people, json for programs")
    ] = "text"
    step_log: Annotated[
        str | None,
        Help("file for a line about each step, for weft plan --calibrate"),
    ] = None
    replica: Replica = Replica()

    def __post_init__(self) -> None:
        check(self)
        _ = self.template_arguments
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
        if problem := self._redundancy_problem():
            raise ConfigError(f"--redundant-experts is {self.redundant_experts}; {problem}")
        if self.world_size > MAX_RANKS:
            raise ConfigError(
                f"--tp is {self.tp_size}, --cp {self.cp}, --ep {self.ep} and --pp {self.pp}: "
                f"{self.world_size} ranks; there can be at most {MAX_RANKS}"
            )

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The value of `default_chat_template_kwargs`; ConfigError if it is no JSON object."""
        text = self.default_chat_template_kwargs
        try:
            return {} if text is None else msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
            raise ConfigError(
                f"--default-chat-template-kwargs is {text}; it must be a JSON object: {error}"
            ) from None

    def _redundancy_problem(self) -> str:
        """Return why these settings cannot copy experts; empty if they can."""
        if not self.redundant_experts:
            return ""
        if self.backend == "jax":
            return "with --backend jax it must be 0"
        if self.kernels == "plain":
            return "with --kernels plain it must be 0: only overlapped kernels choose among copies"
        if self.tp_size * self.cp > 1:
            flag = f"--tp {self.tp}" if self.tp_size > 1 else f"--cp {self.cp}"
            return f"with {flag} it must be 0: all ranks have all tokens there"
        if self.ep == 1:
            return "with --ep 1 it must be 0: a rank alone has all experts"
        if self.redundant_experts % self.ep:
            return f"it must be a multiple of --ep, {self.ep}"
        return ""

    @property
    def tp_size(self) -> int:
        """The value of `tp`; 1 until it is set or decided."""
        return self.tp or 1

    @property
    def capacity(self) -> Capacity:
        """The set values, else the device's defaults; a CPU's while `device` is still auto."""
        default = GPU_CAPACITY if self.device == "cuda" else CAPACITY
        return Capacity(
            default.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs,
            default.max_num_batched_tokens
            if self.max_num_batched_tokens is None
            else self.max_num_batched_tokens,
            default.memory_fraction if self.memory_fraction is None else self.memory_fraction,
        )

    @property
    def stage_size(self) -> int:
        """Ranks per stage."""
        return max(self.tp_size * self.cp, self.ep)

    @property
    def world_size(self) -> int:
        """Ranks per engine. The model is split over them."""
        return self.stage_size * self.pp

    @property
    def attention_groups(self) -> int:
        """Data-parallel attention groups. Each has its own requests and KV cache."""
        return max(1, self.ep // (self.tp_size * self.cp))


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings for the API process."""

    host: Annotated[str, Help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Help("port to listen on; 0 picks a free one", ge=0, le=65535)] = 8000
    served_model_name: Annotated[
        str | None, Help("model name in the API; else the last part of its path")
    ] = None
    tool_parser: Annotated[
        ToolParser,
        Help("how the model writes tool calls; auto detects it from the chat template"),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Help("how the model marks its reasoning; auto detects it from the chat template"),
    ] = "auto"
    drain_timeout: Annotated[
        float, Help("seconds that running requests get to finish at shutdown", ge=0)
    ] = 30.0
    page: Annotated[bool, Help("serve the playground, a web page, at /")] = True
    restart: Annotated[
        bool, Help("restart the engine if it fails; requests get a 503 meanwhile")
    ] = False
    state_dir: Annotated[
        str | None,
        Help(
            "folder for uploaded files and batches, which continue after a restart; else temporary"
        ),
    ] = None
    response_memory: Annotated[
        int,
        Help(
            "memory for stored responses (/v1/responses); the least recently used go first; "
            "0 stores none",
            ge=0,
            unit="bytes",
        ),
    ] = 256 << 20
    log_stats: Annotated[
        bool, Help("log a line with the throughput every 10 seconds, while there is work")
    ] = True
    log_requests: Annotated[bool, Help("log a line for each request, without its prompt")] = False
    log_prompts: Annotated[
        bool, Help("log a line for each request, with its prompt as the model gets it")
    ] = False
    vllm_metrics: Annotated[
        bool,
        Help("repeat metrics under vLLM's names, for autoscalers and endpoint pickers"),
    ] = False
    otlp_endpoint: Annotated[
        str | None,
        Help("OpenTelemetry collector for traces, such as http://127.0.0.1:4318"),
    ] = None
    api_key: Annotated[
        str | None,
        Help(
            "keys that clients may use, separated by commas; WEFT_API_KEY hides them from `ps`",
            secret=True,
        ),
    ] = field(default=None, repr=False)
    api_key_file: Annotated[
        str | None, Help("file with an API key and its name on each line; reread on SIGHUP")
    ] = None
    open_metrics: Annotated[bool, Help("serve /metrics without an API key")] = False
    max_requests_per_key: Annotated[
        int | None, Help("maximum concurrent requests per API key; further ones get a 429", ge=1)
    ] = None
    tokens_per_minute_per_key: Annotated[
        int | None,
        Help("prompt and output tokens granted to each API key per minute", ge=1),
    ] = None
    request_timeout: Annotated[
        float | None,
        Help("maximum seconds for a request, including its wait in the queue; then a 504", gt=0),
    ] = None
    write_timeout: Annotated[
        float, Help("disconnect a client that does not read its answer for this many seconds", gt=0)
    ] = 60.0
    ssl_certfile: Annotated[
        str | None, Help("PEM file with the certificate chain; enables HTTPS; reread on SIGHUP")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Help("PEM file with the private key, if not in --ssl-certfile")
    ] = None
    ssl_keyfile_password: Annotated[
        str | None, Help("password for the private key", secret=True)
    ] = field(default=None, repr=False)
    ssl_ca_certs: Annotated[
        str | None,
        Help("PEM file with certificate authorities; clients then need a certificate from one"),
    ] = None
    cors_origins: Annotated[
        str | None,
        Help("web origins allowed by CORS, such as https://a.example,https://b.example; or *"),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Help(
            "host names of this server besides localhost, separated by commas; or *. Checked by "
            "default on loopback without API keys"
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is given without --ssl-certfile")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--cors-origins has {origin!r}; an origin is such as https://app.example, "
                    "with a port if it has one, without a path"
                )
        for name in self.host_names:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"--allowed-hosts has {name!r}; a name is such as llm.example.com, without a "
                    "port"
                )

    @property
    def origins(self) -> frozenset[str]:
        """The entries in `cors_origins`."""
        return _entries(self.cors_origins)

    @property
    def host_names(self) -> frozenset[str]:
        """The entries in `allowed_hosts`, in lower case."""
        return frozenset(name.lower() for name in _entries(self.allowed_hosts))


def _entries(text: str | None) -> frozenset[str]:
    return frozenset() if text is None else frozenset(each.strip() for each in text.split(","))


TOPICS: dict[str, tuple[str, ...]] = {
    "Model": (
        *("model", "revision", "tokenizer", "chat_template", "default_chat_template_kwargs"),
        *("generation_config", "dtype", "quantization", "compress_weights", "pooling", "seed"),
    ),
    "Server": (
        *("host", "port", "served_model_name", "tool_parser", "reasoning_parser", "page"),
        *("response_memory",),
    ),
    "Security": (
        *("api_key", "api_key_file", "open_metrics"),
        *("max_requests_per_key", "tokens_per_minute_per_key"),
        *("cors_origins", "allowed_hosts"),
        *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"),
    ),
    "Engine and scheduling": (
        *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("max_queue", "threads", "grammar_timeout"),
    ),
    "Cache and memory": (
        *("memory_fraction", "kv_cache_memory", "kv_cache_dtype", "block_size"),
        "prefix_caching",
    ),
    "Parallelism": ("tp", "ep", "redundant_experts", "cp", "pp", "dp", "devices"),
    "Several machines": (
        *("nodes", "executor", "node_address", "node_port", "node_token", "node_token_file"),
        "node_ranks",
    ),
    "Backend and kernels": ("backend", "device", "kernels", "cuda_graphs", "compile_cache"),
    "Reliability": (
        *("restart", "drain_timeout", "request_timeout", "write_timeout"),
        *("stall_timeout", "load_stall_timeout"),
    ),
    "Batches, logs, metrics and tracing": (
        *("state_dir", "log_format", "log_stats", "log_requests", "log_prompts"),
        *("vllm_metrics", "otlp_endpoint", "step_log"),
    ),
}
"""Topic -> names of its settings, in the order of the help and of docs/configuration.md."""
