"""Steps and what they produce as bytes, for ranks in other processes.

MessagePack by msgspec; an array is its dtype, shape and bytes. Nothing is unpickled. The
arrays of a step go as one, for each of them costs as much as all of their bytes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import replace

from weft.errors import EngineError
from weft.models.interface import NOTHING, Int32, Step, StepInput, StepOutput
from weft.serving.executor.child_process import Failed
from weft.serving.executor.loading import ModelInfo


class RendezvousPort(msgspec.Struct, frozen=True, tag=True):
    """First rank -> controller: where the ranks meet."""

    port: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Rank -> controller: ready for its first step."""

    info: ModelInfo


class Done(msgspec.Struct, frozen=True, tag=True):
    """First rank of a copy of attention -> controller: what a step has produced there."""

    output: StepOutput | None


FromRank = RendezvousPort | Loaded | Done | Failed


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise TypeError(f"{type(value)} does not go between processes")


def _decode(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


_HINTS = get_type_hints(StepInput)
_ARRAYS = tuple(name for name in StepInput.__struct_fields__ if _HINTS[name] == Int32)
_OTHERS = tuple(name for name in StepInput.__struct_fields__ if name not in _ARRAYS)
_arrays_of, _others_of = attrgetter(*_ARRAYS), attrgetter(*_OTHERS)

Packed = msgspec.defstruct(
    "Packed",
    [
        ("sizes", list[int]),
        ("numbers", bytearray),
        *((name, _HINTS[name]) for name in _OTHERS),
    ],
    array_like=True,
)
"""A StepInput: its arrays one after the other, then what is no array."""


def pack(step: StepInput) -> msgspec.Struct:
    """What to encode for a step."""
    arrays = _arrays_of(step)
    numbers = b"".join([np.ascontiguousarray(array).data for array in arrays])
    return Packed([array.size for array in arrays], numbers, *_others_of(step))


def unpack(packed: Any) -> StepInput:
    """The step that was packed; its arrays may be written to, as torch wants it.

    Raises:
        ValueError: its arrays were not of int32.
    """
    numbers = np.frombuffer(packed.numbers, np.int32)
    parts = dict(zip(_OTHERS, _others_of(packed), strict=True))
    start = 0
    for name, size in zip(_ARRAYS, packed.sizes, strict=True):
        end = start + size
        parts[name] = numbers[start:end]
        start = end
    if start != len(numbers):
        raise ValueError(f"{len(numbers)} numbers for arrays of {start}; all must be of int32")
    for name, rows in (("block_table", len(parts["slot"])), ("token_mask", len(parts["masked"]))):
        parts[name] = parts[name].reshape(rows, parts[name].size // max(rows, 1))
    return StepInput(**parts)


encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
parts_decoder = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...])
step_decoder = msgspec.msgpack.Decoder(Packed)
_rank_decoder = msgspec.msgpack.Decoder(FromRank, dec_hook=_decode)


def decode_rank_message(data: bytes) -> FromRank:
    """What a rank says; if that makes no sense, that it has failed."""
    try:
        said: FromRank = _rank_decoder.decode(data)
        return said
    except msgspec.DecodeError as error:
        return Failed.of(EngineError(f"what it says makes no sense: {error}"))


def encode_step(step: Step) -> bytes:
    """A step for all ranks, with what each must know of the copies of attention it is not in."""
    inputs = [batch or NOTHING for batch in step]
    if len(step) > 1:
        sizes = tuple(batch.size for batch in inputs)
        inputs = [replace(batch, copies=sizes) for batch in inputs]
    return encoder.encode([pack(batch) for batch in inputs])


def decode_step(data: bytes | memoryview, copy: int) -> StepInput:
    """The input of a copy of attention; those of the others are not looked at."""
    return unpack(step_decoder.decode(parts_decoder.decode(data)[copy]))
