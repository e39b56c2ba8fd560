"""What crosses between the API process and the engine process.

Encoded with msgspec as MessagePack over ZeroMQ; nothing is ever unpickled. The
front (serving/engine/engine.py) works in text, the engine core in token ids: only
ids cross.
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
        config: of the engine.
        address: the front's, see channel.py.
        load_model: "module:function" that loads the model.
    """

    config: EngineConfig
    address: str
    load_model: str


class Add(msgspec.Struct, frozen=True, tag=True):
    """Front -> core: a new request (one answer; n answers are n requests).

    Attributes:
        request_id: unique among live requests.
        prompt: at least one token, each in [0, vocab_size).
        params: checked; `max_tokens` and `seed` are filled in, `n` is 1, `grammar` is left out.
        end_token_ids: tokens that end the output (the model's own unless ignored, and
            params.stop_token_ids); with a grammar the model's own even then.
        priority: lower is served first; among equals, first come.
        arrival: time.monotonic() at the front, for the queueing time.
        grammar: the key of its compiled grammar, which came before; none if empty.
        pooling: what of its hidden states is wanted in the place of tokens, if that is so.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    end_token_ids: tuple[int, ...]
    priority: int = 0
    arrival: float = 0.0
    grammar: bytes = b""
    pooling: PoolingKind | None = None


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """Front -> core: a grammar that requests will name.

    Attributes:
        key: its name.
        data: as xgrammar writes it.
    """

    key: bytes
    data: bytes


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front -> core: forget these requests; unknown ones are ignored."""

    request_ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front -> core: end. With `drain`, finish what is running and waiting first."""

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
        token_ids: the tokens since the last output; an end token is included.
        finish_reason: None while it runs. "stop": an end token; "length": max_tokens or the
            context; "abort": aborted; "error": this request failed, see `error`.
        stop_token_id: the end token that ended it, if one did.
        logprobs: one per token, when asked for.
        prompt_logprobs: on the first output, when asked for: one per prompt token from the
            second on (nothing precedes the first).
        cached_tokens: prompt tokens that came from the prefix cache.
        queued: on the first output, seconds from arrival until it first ran.
        embedding: float32[hidden], the pooled hidden states of a request that asked for them.
        faulty_grammar: the error is the fault of the request's grammar.
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
    """A request was taken into the batch (`running`), or preempted, at a time.monotonic()."""

    request_id: str
    running: bool
    at: float


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot of the core: what /metrics and the scheduler's tests look at.

    Attributes:
        running, waiting: requests.
        kv_blocks_used: held by requests; what only the prefix cache keeps is not counted.
        prefix_queries: tokens of admitted requests that were looked up in the prefix cache.
        prefix_hits: of these, tokens that were found.
        preemptions: times that a request gave its blocks back to one ranked before it.
        steps: steps that have come back.
        step_seconds: time they took on the device.
        prompt_tokens, generation_tokens: of admitted requests, and sampled.
        rank_seconds: that each rank has spent in steps; empty where there is one.
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
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rank_seconds: tuple[float, ...] = ()

    def __add__(self, other: EngineStats) -> EngineStats:
        """Of two cores together; ranks of the first come first."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return EngineStats(*(mine + theirs for mine, theirs in pairs))

    def counted(self) -> EngineStats:
        """What stays of it when the core has ended: what it has counted."""
        return replace(
            self, running=0, waiting=0, kv_blocks_used=0, kv_blocks_total=0, rank_seconds=()
        )


class EngineInfo(msgspec.Struct, frozen=True):
    """What the front must know of the model that the core has loaded.

    Attributes:
        hidden_size: of the model; numbers in an embedding.
        num_blocks: of the KV cache of each copy of attention.
        max_num_seqs: of all copies together.
    """

    max_model_len: int
    vocab_size: int
    hidden_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    load_seconds: float


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Core -> front: machines of its slice may connect to it; see executor/hosts.py."""

    port: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Core -> front: loaded and warm."""

    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Core -> front: what one step produced, and how the core stands.

    Also sent without outputs, as a heartbeat: `stats.steps` advances while work exists.
    """

    outputs: list[TokenOutput]
    stats: EngineStats
    moves: list[Move] = []


ToCore = Compiled | Add | Abort | Shutdown
FromCore = Waiting | Ready | Outputs | Failed
