"""Steps and what they produce as bytes, for ranks in other processes.

MessagePack by msgspec; an array is its dtype, shape and bytes. Nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from weft.models.interface import StepInput, StepOutput
from weft.serving.loading import ModelInfo
from weft.serving.messages import Failed


class Address(msgspec.Struct, frozen=True, tag=True):
    """First rank -> controller: where the ranks meet."""

    port: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Rank -> controller: ready for its first step."""

    info: ModelInfo


class Done(msgspec.Struct, frozen=True, tag=True):
    """First rank -> controller: what a step has produced."""

    output: StepOutput


FromRank = Address | Loaded | Done | Failed


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise TypeError(f"{type(value)} does not go between processes")


def _decode(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape).copy()  # torch wants to own what it is given


encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
step_decoder = msgspec.msgpack.Decoder(StepInput, dec_hook=_decode)
rank_decoder = msgspec.msgpack.Decoder(FromRank, dec_hook=_decode)
