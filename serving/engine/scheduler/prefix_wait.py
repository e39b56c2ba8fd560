"""Lets requests wait for a prefix, until another request has computed it."""

from __future__ import annotations

from collections.abc import Sequence

from weft.serving.engine.scheduler.request import Request


class PrefixWait:
    """Decides which requests should wait for a prefix.

    If prompts with a common prefix arrive together, the first one is admitted. The others wait
    until its blocks are in the prefix cache, so the prefix is computed once.

    Args:
        worth_waiting: a request waits if at least this many tokens are being computed for it.
        block_size: number of tokens in a block.
    """

    def __init__(self, worth_waiting: int, block_size: int) -> None:
        self._num_blocks = max(1, -(-worth_waiting // block_size))
        self._computing: dict[Request, int] = {}  # and the number of its blocks

    def is_worth_it(self, keys: Sequence[bytes], cached: int) -> bool:
        """Return whether a request should wait.

        Args:
            keys: keys of the blocks that it can take from the prefix cache, in order.
            cached: number of these blocks that are in the prefix cache already.
        """
        # A key stands for a whole prefix, so comparing the last necessary block is enough.
        last = cached + self._num_blocks - 1
        return last < len(keys) and any(
            last < num_blocks and request.known_keys[last] == keys[last]
            for request, num_blocks in self._computing.items()
        )

    def expect(self, request: Request, num_blocks: int) -> None:
        """Expect a request to compute its first blocks; it must know their keys."""
        self._computing[request] = num_blocks

    def computed(self, request: Request, num_blocks: int) -> None:
        """Expect nothing more from a request once its first blocks are in the prefix cache."""
        if num_blocks >= self._computing.get(request, num_blocks + 1):
            del self._computing[request]

    def cancel(self, request: Request) -> None:
        """Expect nothing more from a request."""
        self._computing.pop(request, None)
