"""The KV cache's book-keeping alone: microseconds to take, give back, find and key blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from engine_parts.measure import Case, per_call
from weft.serving.engine.prefix_keys import block_keys, pack_prompt
from weft.serving.engine.scheduler.block_manager import BlockManager

BLOCK_SIZE = 32
BLOCKS = 32  # of one request: 1,024 tokens
TOKENS = BLOCKS * BLOCK_SIZE


def _make(num_blocks: int) -> BlockManager:
    return BlockManager(
        num_blocks, BLOCK_SIZE, max_num_seqs=2, max_model_len=num_blocks * BLOCK_SIZE
    )


def _keys() -> Callable[[], list[bytes]]:
    tokens = pack_prompt(range(TOKENS), None).tokens
    return lambda: list(block_keys(tokens, BLOCK_SIZE))


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
    kv.cache_blocks(0, 0, keys)
    return kv


def _share() -> Callable[[], None]:
    """Look a prefix up that another slot holds, take it, and give it back."""
    keys = _keys()()
    kv = _filled(keys)

    def turn() -> None:
        prefix = kv.find_prefix(keys)
        assert kv.can_allocate(1, TOKENS, prefix)
        kv.allocate(1, TOKENS, prefix)
        kv.free(1)

    return turn


def _evict() -> Callable[[], None]:
    """Fill, key and release blocks in a cache that is full of keyed ones."""
    kv = _make(BLOCKS)
    numbers = count()

    def turn() -> None:
        kv.allocate(0, TOKENS)
        kv.cache_blocks(0, 0, [next(numbers).to_bytes(16) for _ in range(BLOCKS)])
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
