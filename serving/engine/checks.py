"""Checks of a request against the model, before the engine queues it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from weft.errors import RequestError
from weft.serving.engine.protocol import EngineInfo
from weft.serving.engine.sampling_params import SamplingDefaults, SamplingParams

if TYPE_CHECKING:
    from weft.models.spec.pooling import PoolingKind


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that the model can serve; made by `AsyncEngine.validate`.

    Attributes:
        prompt_token_ids: plain integers, at least one.
        params: with `seed` and all fields in `SamplingDefaults` filled in, and n = 1.
        pooling: how the prompt's hidden states become an embedding; None generates tokens.
        allowed: `params.allowed_token_ids` as a mask; empty if all tokens are allowed.
        banned: `params.bad_words` as token sequences.
        cache_salt: only requests with the same salt share the prefix cache.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    pooling: PoolingKind | None = None
    allowed: bytes = b""
    banned: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""

    def answer(self, i: int) -> CheckedRequest:
        """Return the request for the i-th answer to this prompt, which has its own seed."""
        return dataclasses.replace(self, params=self.params.answer(i)) if i else self


def check_requests(
    prompts: Iterable[Sequence[int]],
    params: SamplingParams,
    defaults: SamplingDefaults,
    info: EngineInfo,
    draw_seed: Callable[[], int],
    encode: Callable[[str], list[int]],
    cache_salt: str = "",
) -> list[CheckedRequest]:
    """Check requests for tokens against the model. Their common settings are checked once.

    Args:
        prompts: each request's prompt.
        params: their sampling settings; `n` is ignored.
        defaults: values for settings that are None.
        info: sizes of the model and its KV cache.
        draw_seed: called for each request, if the settings have no seed.
        encode: converts a bad word to token ids.
        cache_salt: see CheckedRequest.

    Raises:
        RequestError: a request cannot be served.
    """
    _check_types(params)
    for param, token_ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        _check_ids(param, token_ids, info.vocab_size)
    allowed, banned = _allowed(params, info.vocab_size), _banned(params, encode, info.vocab_size)
    chosen = msgspec.structs.asdict(params.chosen(defaults))
    checked = []
    for prompt in prompts:
        ids = _check_tokens(prompt, info.vocab_size)
        seed = draw_seed() if params.seed is None else params.seed
        filled = chosen | {"max_tokens": _max_tokens(len(ids), params, defaults, info)}
        settings = msgspec.structs.replace(params, n=1, seed=seed, **filled)
        checked.append(
            CheckedRequest(ids, settings, allowed=allowed, banned=banned, cache_salt=cache_salt)
        )
    return checked


def check_pooled(
    prompt_token_ids: Sequence[int], pooling: PoolingKind, info: EngineInfo
) -> CheckedRequest:
    """Check a request for an embedding against the model.

    Raises:
        RequestError: the request cannot be served.
    """
    ids = _check_tokens(prompt_token_ids, info.vocab_size)
    tokens, capacity = len(ids), info.num_blocks * info.block_size
    if tokens > info.max_model_len:
        raise RequestError(
            f"the prompt has {tokens} tokens; the context is {info.max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )
    if tokens > capacity:
        raise RequestError(
            f"the prompt has {tokens} tokens; the KV cache holds {capacity}: serve with a larger "
            "--kv-cache-memory",
            param="prompt",
        )
    return CheckedRequest(ids, SamplingParams(max_tokens=1, seed=0), pooling)


def check_dimensions(dimensions: int | None, info: EngineInfo) -> None:
    """Raise RequestError unless the model has embeddings of this size; None is the full size."""
    if dimensions is not None and not 1 <= dimensions <= info.hidden_size:
        raise RequestError(
            f"dimensions is {dimensions}; it must be in [1, {info.hidden_size}], because the "
            f"model's embeddings have {info.hidden_size}",
            param="dimensions",
        )


def _check_types(params: SamplingParams) -> None:
    """Raise RequestError for a wrong type: Python users may pass any, the core reads only these."""
    try:
        msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise RequestError(f"a sampling setting has the wrong type: {error}") from None


def _check_tokens(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """Return the prompt's token ids as plain integers."""
    import numpy as np  # not at the top: the engine process starts before NumPy is imported

    if not len(prompt):
        raise RequestError("the prompt is empty", param="prompt")
    ids = np.asarray(prompt)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise RequestError("the prompt must be text or a list of token ids", param="prompt")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise RequestError(
            f"the prompt has token {wrong}; token ids are in [0, {vocab_size})", param="prompt"
        )
    token_ids: list[int] = ids.tolist()
    return token_ids


def _allowed(params: SamplingParams, vocab_size: int) -> bytes:
    """Return the allowed tokens as a mask; it is smaller than a list."""
    from weft.serving.engine.grammar.matcher import mask_of  # not at the top: it needs NumPy

    if params.allowed_token_ids is None:
        return b""
    return mask_of(params.allowed_token_ids, vocab_size).tobytes()


def _banned(
    params: SamplingParams, encode: Callable[[str], list[int]], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the bad words' tokens, at a text's beginning and after a space.

    Source: vLLM's `SamplingParams.update_from_tokenizer`.
    """
    banned: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        bare = word.lstrip() or word
        first, spaced = (tuple(encode(prefix + bare)) for prefix in ("", " "))
        banned[first] = None
        if spaced[:1] != first[:1] and len(spaced) == len(first):
            banned[spaced] = None
    banned.pop((), None)
    alone = {sequence[0] for sequence in banned if len(sequence) == 1}
    if params.allowed_token_ids is not None and alone.issuperset(params.allowed_token_ids):
        raise RequestError(
            "bad_words forbids all of allowed_token_ids", param="bad_words", code="contradiction"
        )
    return tuple(sequence for sequence in banned if all(token < vocab_size for token in sequence))


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param} has token {token}; token ids are in [0, {vocab_size})", param=param
            )


def _max_tokens(
    prompt: int, params: SamplingParams, defaults: SamplingDefaults, info: EngineInfo
) -> int:
    """Return the maximum number of output tokens after a prompt with this length."""
    room = _room(prompt, params, info)
    if params.max_tokens is None and defaults.max_tokens is not None:
        room = min(room, max(defaults.max_tokens, params.min_tokens))
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens is {params.min_tokens}; after this prompt there is room for {room}",
            param="min_tokens",
        )
    return room


def _room(prompt: int, params: SamplingParams, info: EngineInfo) -> int:
    """Return the maximum number of output tokens: as requested, within the context."""
    if prompt >= info.max_model_len:
        raise RequestError(
            f"the prompt has {prompt} tokens; the context is {info.max_model_len}, "
            "and at least one token is for the output",
            param="prompt",
            code="context_length_exceeded",
        )
    capacity = info.num_blocks * info.block_size + 1  # the last token is never computed
    room = min(info.max_model_len, capacity) - prompt
    if params.max_tokens is None and room > 0:
        return room
    wanted = min(params.max_tokens or 1, info.max_model_len - prompt)
    if wanted > room:
        raise RequestError(
            f"the prompt has {prompt} tokens and max_tokens is {wanted}; the KV cache holds "
            f"{capacity}: lower max_tokens, or serve with a larger --kv-cache-memory",
            param="max_tokens",
        )
    return wanted
