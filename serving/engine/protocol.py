"""Messages between the API process and the engine core.

They are MessagePack, encoded with msgspec and sent over ZeroMQ; nothing is ever unpickled. The API
process (serving/engine/engine.py) works in text, the engine core in token ids. Messages carry
token ids only.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import astuple, replace

from weft.models.spec.pooling import PoolingKind
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.prefix_keys import Prompt
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.executor.child_process import Failed

FinishReason = Literal["stop", "length", "abort", "error"]


class Orders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line on the core's stdin.

    Attributes:
        config: the engine's settings.
        address: base address of the API process's sockets, see core_channel.py.
        load_model: "module:function" that loads the model.
    """

    config: EngineConfig
    address: str
    load_model: str


class Add(msgspec.Struct, frozen=True, tag=True):
    """API process -> core: a new request for one answer; n answers are n requests.

    Attributes:
        request_id: unique among live requests.
        prompt: at least one token, each in [0, vocab_size).
        params: checked; `max_tokens` and `seed` are filled in, `n` is 1, `grammar` is left out.
        end_token_ids: tokens that end the output: params.stop_token_ids, and the model's own
            unless ignored. A request with a grammar always has the model's own.
        priority: lower is served first; equal priorities are served in order of arrival.
        arrival: time.monotonic() in the API process, for the queueing time.
        grammar: key of the compiled grammar, which was sent before; empty without a grammar.
        pooling: which hidden states make the embedding; None for a request that generates tokens.
        allowed: int32[ceil(V / 32)], a mask with the allowed tokens; empty for all.
        banned: forbidden token sequences.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    end_token_ids: tuple[int, ...]
    priority: int = 0
    arrival: float = 0.0
    grammar: bytes = b""
    pooling: PoolingKind | None = None
    allowed: bytes = b""
    banned: tuple[tuple[int, ...], ...] = ()


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """API process -> core: a grammar for later requests.

    The core compiles it once more. In xgrammar's serialized form, the grammar for a schema with 400
    properties takes 90 MB, and reading it takes longer than compiling.

    Attributes:
        key: the name that requests use.
        text: the grammar as xgrammar's structural tag.
        size: the compiled grammar's bytes in memory.
        slow: compiling takes long.
    """

    key: bytes
    text: str
    size: int
    slow: bool


class Abort(msgspec.Struct, frozen=True, tag=True):
    """API process -> core: end these requests; unknown ones are ignored."""

    request_ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """API process -> core: shut down. With `drain`, finish running and waiting requests first."""

    drain: bool = True


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log probability, its rank (1 = most likely), and the most likely alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request.

    Attributes:
        token_ids: tokens since the last output, including an end token.
        finish_reason: None while the request runs. "stop": an end token; "length": max_tokens or
            the context; "abort": aborted; "error": this request failed, see `error`.
        stop_token_id: the end token, if one ended the request.
        logprobs: one for each token, if requested.
        prompt_logprobs: on the first output, if requested: one for each prompt token from the
            second on (nothing precedes the first).
        cached_tokens: number of prompt tokens that came from the prefix cache.
        queued: on the first output, seconds from arrival until the first admission.
        embedding: float32[hidden]; the pooled hidden states, if requested.
        faulty_grammar: the request's grammar caused the error.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    error: str | None = None
    queued: float | None = None
    embedding: bytes | None = None
    faulty_grammar: bool = False


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request was admitted (`running`) or preempted at a time.monotonic()."""

    request_id: str
    running: bool
    at: float


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot of the core, for /metrics and for tests of the scheduler.

    Attributes:
        running, waiting: number of requests.
        kv_blocks_used: blocks that requests hold; blocks in the prefix cache alone do not count.
        prefix_queries: tokens of admitted requests that were looked up in the prefix cache.
        prefix_hits: number of these tokens that were found.
        preemptions: number of times that a request lost its blocks to an earlier one.
        steps: number of finished steps.
        step_seconds: time that finished steps took on the device.
        compilations: kernels or programs compiled during these steps.
        busiest_expert_rows, mean_expert_rows: rows for experts on the rank with the most, and on a
            rank on average, where they are counted.
        prompt_tokens, generation_tokens: prompt tokens of admitted requests, and sampled tokens.
        rank_seconds: seconds that each rank has spent in steps; empty with one rank.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    compilations: int = 0
    busiest_expert_rows: float = 0.0
    mean_expert_rows: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rank_seconds: tuple[float, ...] = ()

    def __add__(self, other: EngineStats) -> EngineStats:
        """Return the sum for two cores; the first core's ranks come first."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return EngineStats(*(mine + theirs for mine, theirs in pairs))

    def counted(self) -> EngineStats:
        """Return the counts alone, for a core that has ended."""
        return replace(
            self, running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=0, rank_seconds=()
        )


class EngineInfo(msgspec.Struct, frozen=True):
    """The loaded model's properties for the API process.

    Attributes:
        hidden_size: the model's hidden size, which is the length of an embedding.
        num_blocks: number of KV cache blocks in each attention group.
        max_num_seqs: maximum number of running requests, in all attention groups together.
        memory_fraction: fraction of the free memory that the engine may use.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_fraction: float
    dtype: str
    load_seconds: float


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Core -> API process: other nodes in the engine's slice may now connect to this port.

    See executor/nodes/multi_node_executor.py.
    """

    port: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Core -> API process: the model is loaded and warm."""

    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Core -> API process: a step's outputs, with statistics.

    The core also sends it without outputs, as a heartbeat. `stats.steps` grows while work exists.
    """

    outputs: list[TokenOutput]
    stats: EngineStats
    moves: list[Move] = []


ToCore = Compiled | Add | Abort | Shutdown
FromCore = Waiting | Ready | Outputs | Failed
