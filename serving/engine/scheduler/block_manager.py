"""The KV cache's blocks: who holds which, and which can be reused by prompts that start alike.

The memory itself belongs to the model runner; here are only numbers of
blocks. A block holds `block_size` tokens of one request. A request is known
by its slot, and `table[slot, :num_blocks[slot]]` are its blocks in order.

Prefix cache: a full block whose tokens are known and computed may be given a
key, the hash of its parent's key and its own tokens, so a key stands for the
whole prefix up to the block's end. Keys are 128-bit BLAKE2b, so equal keys
mean equal tokens. A keyed block that nobody holds keeps its contents until
its memory is needed; the one that was released longest ago goes first.

Invariants, verified by `check`:
- A block is in exactly one state: held (its reference count is the number of
  table entries that name it, at least one), cached (no reference, has a key)
  or empty (no reference, no key).
- A key names at most one block. Two requests that compute the same tokens at
  the same time keep two blocks; the first one is keyed.
- Table entries past num_blocks are 0.

Not handled: sliding-window attention that drops blocks early, and copies to
other memories.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]

ROOT_KEY = bytes(16)


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of the block that holds `tokens` (int32s) and follows the one with key `parent`."""
    return blake2b(parent + tokens, digest_size=16).digest()


def prefix_keys(token_ids: array[int], block_size: int) -> Iterator[bytes]:
    """The keys of the full blocks of int32 tokens, in order; each is made when it is asked for."""
    key = ROOT_KEY
    for end in range(block_size, len(token_ids) + 1, block_size):
        key = block_key(key, token_ids[end - block_size : end].tobytes())
        yield key


class BlockManager:
    """Blocks of the cache, the tables of those who hold them, and the prefix cache.

    Args:
        num_blocks: blocks in all.
        block_size: tokens in a block.
        max_num_seqs: slots.
        max_model_len: most tokens of a request.

    Attributes:
        table: int32[max_num_seqs, n]; see the module's text. Read-only for others.
        num_blocks: int32[max_num_seqs]; blocks in each slot's table. Read-only for others.
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
        self._cached: OrderedDict[int, None] = OrderedDict()  # released longest ago first

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._empty) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of known keys, from the first key on."""
        blocks = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(
        self, slot: int, num_tokens: int, prefix: Sequence[int] = (), *, spare: int = 0
    ) -> bool:
        """Grow the slot's table until it holds `num_tokens` tokens; all of it, or nothing.

        Args:
            slot: whose table.
            num_tokens: tokens in all, those that the table already holds included.
            prefix: blocks from `find_prefix` to begin an empty table with.
            spare: blocks that must still be available afterwards.

        Returns:
            False, with nothing changed, when there are not enough blocks.
        """
        held = int(self.num_blocks[slot])
        assert not (prefix and held), "a prefix begins a table"
        end = max(self.blocks_for(num_tokens), held)
        fresh = end - held - len(prefix)
        revived = sum(self._references[block] == 0 for block in prefix)
        if fresh + revived + spare > self.available:
            return False
        for block in prefix:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        blocks = [*prefix, *(self._take() for _ in range(fresh))]
        self.table[slot, held:end] = blocks
        self.num_blocks[slot] = end
        return True

    def append(self, slots: Slots) -> bool:
        """One more block for each of these slots; all of them, or nothing.

        Returns:
            False, with nothing changed, when there are not enough blocks.
        """
        if len(slots) > self.available:
            return False
        self.table[slots, self.num_blocks[slots]] = [self._take() for _ in range(len(slots))]
        self.num_blocks[slots] += 1
        return True

    def free(self, slot: int) -> None:
        """Release the slot's blocks; keyed ones stay in the prefix cache."""
        held = int(self.num_blocks[slot])
        # The end of a prefix first, because it is of no use without the beginning.
        for block in reversed(self.table[slot, :held].tolist()):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._key[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None
        self.table[slot, :held] = 0
        self.num_blocks[slot] = 0

    def register(self, slot: int, index: int, key: bytes) -> None:
        """Key the slot's index-th block, which is full and computed, if the key is new."""
        block = int(self.table[slot, index])
        assert index < self.num_blocks[slot], "only a held block is registered"
        if key not in self._block and self._key[block] is None:
            self._block[key] = block
            self._key[block] = key

    def forget(self, slot: int) -> None:
        """Take the slot's blocks out of the prefix cache: their contents cannot be trusted."""
        for block in self.table[slot, : self.num_blocks[slot]].tolist():
            self._drop_key(block)

    def check(self) -> None:
        """Raise AssertionError where an invariant of the module's text does not hold."""
        held: Counter[int] = Counter()
        for row, count in zip(self.table, self.num_blocks, strict=True):
            held.update(row[:count].tolist())
            assert len(set(row[:count].tolist())) == count, "a table names a block twice"
            assert not row[count:].any(), "a table has entries past its end"
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

    def _take(self) -> int:
        """An unheld block, now with one reference and no key."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._drop_key(block)
        self._references[block] = 1
        return block

    def _drop_key(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._block[key]
            self._key[block] = None
