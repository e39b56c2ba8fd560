"""KV cache blocks: their owners, the prefix cache, and eviction.

The model runner owns the memory; this module handles block numbers only. A block holds
`block_size` tokens. A request is known by its slot, and `table[slot, :num_blocks[slot]]` lists its
blocks in order.

Prefix cache: a full block gets a key (see prefix_keys.py) once its tokens are known and computed.
A keyed block stays cached after its last owner freed it, until its memory is needed. The block
freed longest ago is evicted first.

Invariants, verified by `check`:
- A block is in exactly one state: held (its reference count is the number of table entries with
  its number, at least one), cached (no reference, has a key) or empty (no reference, no key).
- A key belongs to at most one block. If two requests compute the same tokens at the same time,
  both keep their blocks; the first one gets the key.
- Table entries past num_blocks are 0.

Not handled: freeing blocks early with sliding-window attention, and copies to other memories.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]


class BlockManager:
    """Allocates blocks to slots and keeps the prefix cache.

    Args:
        num_blocks: number of blocks in the cache.
        block_size: number of tokens in a block.
        max_num_seqs: number of slots.
        max_model_len: maximum number of tokens in a request.

    Attributes:
        table: int32[max_num_seqs, n]; the blocks of each slot. Read-only for others.
        num_blocks: int32[max_num_seqs]; number of blocks in each slot's row. Read-only for others.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.total = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        width = min(self.blocks_for(max_model_len), num_blocks)
        self.table = np.zeros((max_num_seqs, width), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self._references = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._block: dict[bytes, int] = {}
        self._empty = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # freed longest ago first

    @property
    def available(self) -> int:
        """Number of blocks without an owner."""
        return len(self._empty) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """Return cached blocks for the longest run of keys, from the first key on."""
        blocks: list[int] = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_allocate(
        self, slot: int, num_tokens: int, prefix: Sequence[int] = (), *, spare: int = 0
    ) -> bool:
        """Return whether `allocate` has enough blocks and leaves `spare` blocks available."""
        new = self.blocks_for(num_tokens) - int(self.num_blocks[slot]) - len(prefix)
        revived = [self._references[block] for block in prefix].count(0)
        return max(new, 0) + revived + spare <= self.available

    def allocate(self, slot: int, num_tokens: int, prefix: Sequence[int] = ()) -> None:
        """Extend the slot's row until it holds `num_tokens` tokens; `can_allocate` must agree.

        Args:
            slot: whose row.
            num_tokens: total number of tokens, including those that the row already holds.
            prefix: blocks from `find_prefix` for the beginning of an empty row.
        """
        held = int(self.num_blocks[slot])
        assert not (prefix and held), "a prefix begins a row"
        references = self._references
        for block in prefix:
            if references[block] == 0:
                del self._cached[block]
            references[block] += 1
        end = max(self.blocks_for(num_tokens), held)
        self.table[slot, held:end] = [*prefix, *self._take(end - held - len(prefix))]
        self.num_blocks[slot] = end

    def can_append(self, slots: Slots) -> bool:
        """Return whether each slot can get one more block."""
        return len(slots) <= self.available

    def append_block(self, slots: Slots) -> None:
        """Give each slot one more block; `can_append` must agree."""
        if len(slots):
            self.table[slots, self.num_blocks[slots]] = self._take(len(slots))
            self.num_blocks[slots] += 1

    def free(self, slot: int) -> None:
        """Free the slot's blocks; keyed blocks stay in the prefix cache."""
        held = int(self.num_blocks[slot])
        references, keys = self._references, self._key
        empty, cached = self._empty, self._cached
        # The end of a prefix is evicted first, because it is useless without the beginning.
        for block in reversed(self.table[slot, :held].tolist()):
            references[block] -= 1
            if references[block] == 0:
                if keys[block] is None:
                    empty.append(block)
                else:
                    cached[block] = None
        self.table[slot, :held] = 0
        self.num_blocks[slot] = 0

    def cache_blocks(self, slot: int, first: int, keys: Sequence[bytes]) -> None:
        """Put computed, full blocks of a slot into the prefix cache, unless another has the key.

        Args:
            slot: whose blocks.
            first: index of the first block in the slot's row.
            keys: key of this block and of the blocks after it.
        """
        end = first + len(keys)
        assert end <= self.num_blocks[slot], "only held blocks are cached"
        block_of, key_of = self._block, self._key
        for block, key in zip(self.table[slot, first:end].tolist(), keys, strict=True):
            if block_of.setdefault(key, block) == block:
                key_of[block] = key

    def evict(self, slot: int) -> None:
        """Remove the slot's blocks from the prefix cache: their contents cannot be trusted."""
        for block in self.table[slot, : self.num_blocks[slot]].tolist():
            if (key := self._key[block]) is not None:
                del self._block[key]
                self._key[block] = None

    def check(self) -> None:
        """Raise AssertionError where an invariant of the module's text does not hold."""
        held: Counter[int] = Counter()
        for row, count in zip(self.table, self.num_blocks, strict=True):
            held.update(row[:count].tolist())
            assert len(set(row[:count].tolist())) == count, "a row names a block twice"
            assert not row[count:].any(), "a row has entries past its end"
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is empty twice"
        for block in range(self.total):
            assert self._references[block] == held[block], f"references of block {block}"
            states = (held[block] > 0) + (block in empty) + (block in cached)
            assert states == 1, f"block {block} is in {states} states"
            key = self._key[block]
            assert block not in empty or key is None, f"empty block {block} has a key"
            assert block not in cached or key is not None, f"cached block {block} has no key"
            assert key is None or self._block[key] == block, f"key of block {block}"
        assert len(self._block) == sum(key is not None for key in self._key), "a key is lost"

    def _take(self, count: int) -> list[int]:
        """Return blocks without an owner, now with one reference and no key."""
        start = max(len(self._empty) - count, 0)
        blocks = self._empty[start:]
        del self._empty[start:]
        oldest, key_of, block_of = self._cached.popitem, self._key, self._block
        for _ in range(count - len(blocks)):
            block, _ = oldest(last=False)
            key = key_of[block]
            assert key is not None, "a cached block has a key"
            del block_of[key]
            key_of[block] = None
            blocks.append(block)
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks
