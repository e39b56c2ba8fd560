"""The KV cache's blocks under random use, against a model that is too simple to be wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.scheduler.block_manager import BlockManager

BLOCK = 4
SLOTS = 4
BLOCKS = 12


def keys_of(tokens: list[int]) -> list[bytes]:
    """Keys of the full blocks of `tokens`."""
    return pack_prompt(tokens, BLOCK).block_keys()


class KVCacheMachine(RuleBasedStateMachine):
    """`contents` says what each block holds; a prefix hit must hold just the tokens asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = BlockManager(BLOCKS, BLOCK, SLOTS, max_model_len=10 * BLOCK)
        self.tokens: dict[int, list[int]] = {}
        self.contents: dict[int, list[int]] = {}

    @precondition(lambda self: len(self.tokens) < SLOTS)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6 * BLOCK),
        spare=st.integers(0, 3),
    )
    def admit(self, tokens: list[int], spare: int) -> None:
        slot = min(set(range(SLOTS)) - set(self.tokens))
        prefix = self.kv.find_prefix(keys_of(tokens[:-1]))
        for i, block in enumerate(prefix):
            assert self.contents[block] == tokens[: (i + 1) * BLOCK]
        before = self.kv.available
        if self.kv.can_allocate(slot, len(tokens), prefix, spare=spare):
            self.kv.allocate(slot, len(tokens), prefix)
            assert self.kv.available >= spare
            self.tokens[slot] = tokens
            self._fill(slot, len(prefix))
        else:
            assert self.kv.available == before
            assert before < self.kv.blocks_for(len(tokens)) + spare

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        tokens = self.tokens[slot] + more
        if len(tokens) > 10 * BLOCK or not self.kv.can_allocate(slot, len(tokens)):
            return
        self.kv.allocate(slot, len(tokens))
        first = len(self.tokens[slot]) // BLOCK
        self.tokens[slot] = tokens
        self._fill(slot, first)

    @precondition(lambda self: self.tokens)
    @rule(token=st.integers(0, 1))
    def grow_all_that_are_full(self, token: int) -> None:
        full = [
            slot
            for slot, tokens in self.tokens.items()
            if len(tokens) % BLOCK == 0 and len(tokens) < 10 * BLOCK
        ]
        slots = np.array(full, np.intp)
        assert self.kv.can_append(slots) == (len(full) <= self.kv.available)
        if not self.kv.can_append(slots):
            return
        self.kv.append_block(slots)
        for slot in full:
            self.tokens[slot] = [*self.tokens[slot], token]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), evict=st.booleans())
    def free(self, data: st.DataObject, evict: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        if evict:
            self.kv.evict(slot)
            assert not self.kv.find_prefix(keys_of(self.tokens[slot])) or self._shared(slot)
        self.kv.free(slot)
        del self.tokens[slot]

    @invariant()
    def intact(self) -> None:
        self.kv.check()
        held: set[int] = set()
        for slot, tokens in self.tokens.items():
            assert self.kv.num_blocks[slot] == self.kv.blocks_for(len(tokens))
            held.update(self.kv.table[slot, : self.kv.num_blocks[slot]].tolist())
        assert self.kv.available == BLOCKS - len(held)

    def _fill(self, slot: int, first: int) -> None:
        """Compute the slot's full blocks from `first` on, and put them into the prefix cache."""
        tokens = self.tokens[slot]
        keys = keys_of(tokens)[first:]
        for i in range(first, first + len(keys)):
            self.contents[int(self.kv.table[slot, i])] = tokens[: (i + 1) * BLOCK]
        self.kv.cache_blocks(slot, first, keys)

    def _shared(self, slot: int) -> bool:
        """Whether a block elsewhere holds the slot's first block's tokens."""
        first = self.tokens[slot][:BLOCK]
        own = int(self.kv.table[slot, 0])
        return any(b != own and text == first for b, text in self.contents.items())


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(TestKVCache.settings, max_examples=60, stateful_step_count=40)


def test_the_key_depends_on_the_whole_prefix() -> None:
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != keys_of([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert keys_of([1, 2, 3, 4])[0] == keys_of([1, 2, 3, 4, 5])[0]


def test_the_block_released_longest_ago_is_reused_first() -> None:
    kv = BlockManager(4, BLOCK, 2, 4 * BLOCK)
    old, new = keys_of([1] * 8), keys_of([2] * 8)
    for slot, keys in enumerate((old, new)):
        kv.allocate(slot, 8)
        kv.cache_blocks(slot, 0, keys)
    kv.free(0)
    kv.free(1)
    kv.allocate(0, BLOCK)
    assert len(kv.find_prefix(old)) == 1, "the end of a prefix goes before its beginning"
    assert len(kv.find_prefix(new)) == 2


def test_check_finds_a_leak() -> None:
    kv = BlockManager(4, BLOCK, 2, 4 * BLOCK)
    kv.allocate(0, 8)
    kv.num_blocks[0] = 1
    kv.table[0, 1] = 0
    with pytest.raises(AssertionError, match="references"):
        kv.check()
