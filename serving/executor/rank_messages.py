"""Messages between a controller and its rank processes: steps, outputs and errors.

The encoding is MessagePack by msgspec, without pickle. An array is encoded as its dtype, shape and
bytes. A step's arrays are joined into one, because the overhead per array is as large as the
cost to copy all their bytes.
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
    """Rank 0 -> controller: the port where the ranks meet."""

    port: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Rank -> controller: the rank is ready for its first step."""

    info: ModelInfo


class Done(msgspec.Struct, frozen=True, tag=True):
    """First rank of an attention group -> controller: the group's output for one step."""

    output: StepOutput | None


FromRank = RendezvousPort | Loaded | Done | Failed


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise TypeError(f"{type(value)} cannot be sent between processes")


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
"""A StepInput with its arrays joined into `numbers`, followed by all other fields."""


def pack(step: StepInput) -> msgspec.Struct:
    """Join a step's arrays for encoding."""
    arrays = _arrays_of(step)
    numbers = b"".join([np.ascontiguousarray(array).data for array in arrays])
    return Packed([array.size for array in arrays], numbers, *_others_of(step))


def unpack(packed: Any) -> StepInput:
    """Restore a packed step. Its arrays are writable, as torch requires.

    Raises:
        ValueError: the packed arrays were not int32.
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
    """Decode a message from a rank. A malformed message counts as that rank's failure."""
    try:
        message: FromRank = _rank_decoder.decode(data)
        return message
    except msgspec.DecodeError as error:
        return Failed.of(EngineError(f"it sent an invalid message: {error}"))


def encode_step(step: Step) -> bytes:
    """Encode a step for all ranks, with the batch sizes of all attention groups."""
    inputs = [batch or NOTHING for batch in step]
    if len(step) > 1:
        sizes = tuple(batch.size for batch in inputs)
        inputs = [replace(batch, group_sizes=sizes) for batch in inputs]
    return encoder.encode([pack(batch) for batch in inputs])


def decode_step(data: bytes | memoryview, group: int) -> StepInput:
    """Decode the input for one attention group and skip the others."""
    return unpack(step_decoder.decode(parts_decoder.decode(data)[group]))
