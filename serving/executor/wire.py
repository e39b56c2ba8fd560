"""Steps and what they produce as bytes, for ranks in other processes.

MessagePack by msgspec; an array is its dtype, shape and bytes. Nothing is unpickled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from weft.models.interface import NOTHING, Step, StepInput, StepOutput
from weft.serving.loading import ModelInfo
from weft.serving.messages import Failed


class Address(msgspec.Struct, frozen=True, tag=True):
    """First rank -> controller: where the ranks meet."""

    port: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Rank -> controller: ready for its first step."""

    info: ModelInfo


class Done(msgspec.Struct, frozen=True, tag=True):
    """First rank of a copy of attention -> controller: what a step has produced there."""

    output: StepOutput | None


FromRank = Address | Loaded | Done | Failed


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise TypeError(f"{type(value)} does not go between processes")


def _decode(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape).copy()  # torch wants to own what it is given


encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
parts_decoder = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...])
step_decoder = msgspec.msgpack.Decoder(StepInput, dec_hook=_decode)
rank_decoder = msgspec.msgpack.Decoder(FromRank, dec_hook=_decode)


def encode_step(step: Step) -> bytes:
    """A step for all ranks, with what each must know of the copies of attention it is not in."""
    if len(step) > 1:
        inputs = [batch or NOTHING for batch in step]
        sizes = tuple(batch.size for batch in inputs)
        step = tuple(replace(batch, copies=sizes) for batch in inputs)
    return encoder.encode(step)


def decode_step(data: bytes, copy: int) -> StepInput:
    """The input of a copy of attention; those of the others are not looked at."""
    return step_decoder.decode(parts_decoder.decode(data)[copy])
