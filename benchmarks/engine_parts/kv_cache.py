"""The KV cache's book-keeping alone: microseconds to take, give back, find and key blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from engine_parts.measure import Case, per_call
from weft.serving.engine.scheduler.block_manager import ROOT_KEY, BlockManager, block_key

BLOCK_SIZE = 32
BLOCKS = 32  # of one request: 1,024 tokens
TOKENS = BLOCKS * BLOCK_SIZE


def _make(num_blocks: int) -> BlockManager:
    return BlockManager(
        num_blocks, BLOCK_SIZE, max_num_seqs=2, max_model_len=num_blocks * BLOCK_SIZE
    )


def _keys() -> Callable[[], list[bytes]]:
    tokens = np.arange(TOKENS, dtype=np.int32).reshape(BLOCKS, BLOCK_SIZE)

    def keys() -> list[bytes]:
        key, found = ROOT_KEY, []
        for block in tokens:
            key = block_key(key, block.tobytes())
            found.append(key)
        return found

    return keys


def _allocate_and_free() -> Callable[[], None]:
    kv = _make(4 * BLOCKS)

    def turn() -> None:
        kv.allocate(0, TOKENS)
        kv.free(0)

    return turn


def _append() -> Callable[[], None]:
    """The first block of a slot, then one more again and again, as a growing answer has it."""
    kv = _make(BLOCKS)

    def turn() -> None:
        for blocks in range(1, BLOCKS + 1):
            kv.allocate(0, blocks * BLOCK_SIZE)
        kv.free(0)

    return turn


def _filled(keys: list[bytes]) -> BlockManager:
    """A cache whose slot 0 holds blocks with these keys."""
    kv = _make(4 * BLOCKS)
    kv.allocate(0, TOKENS)
    for index, key in enumerate(keys):
        kv.register(0, index, key)
    return kv


def _share() -> Callable[[], None]:
    """Look a prefix up that another slot holds, take it, and give it back."""
    keys = _keys()()
    kv = _filled(keys)

    def turn() -> None:
        assert kv.allocate(1, TOKENS, kv.find_prefix(keys))
        kv.free(1)

    return turn


def _evict() -> Callable[[], None]:
    """Fill, key and release blocks in a cache that is full of keyed ones."""
    kv = _make(BLOCKS)
    numbers = count()

    def turn() -> None:
        kv.allocate(0, TOKENS)
        for index in range(BLOCKS):
            kv.register(0, index, next(numbers).to_bytes(16))
        kv.free(0)

    return turn


@contextmanager
def cases() -> Iterator[list[Case]]:
    """See the module's text."""

    def case(name: str, call: Callable[[], object]) -> Case:
        return Case(f"{name}, {BLOCKS} blocks", "us", lambda seconds: per_call(call, seconds) * 1e6)

    yield [
        case("allocate and free", _allocate_and_free()),
        case("append one at a time, and free", _append()),
        case("hash the keys of", _keys()),
        case("find a prefix, share it and free", _share()),
        case("evict, allocate, key and free", _evict()),
    ]
