"""Requests that wait until another request has computed their prompt's beginning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from weft.serving.engine.scheduler.request import Request


class PrefixWait:
    """Decides which requests should wait for a prefix that is being computed.

    When prompts that start alike arrive together, the first one is admitted. The others wait until
    its blocks are in the prefix cache, so the common part is computed once.

    Args:
        worth_waiting: a request waits if at least this many tokens are being computed for it.
        block_size: number of tokens in a block.
    """

    def __init__(self, worth_waiting: int, block_size: int) -> None:
        self._worth_waiting = worth_waiting
        self._block_size = block_size
        self._coming: dict[bytes, Request] = {}  # keys of blocks, and the request that computes it

    def is_worth_it(self, keys: Sequence[bytes]) -> bool:
        """Return whether a request should wait.

        Args:
            keys: keys of the blocks that the request lacks, in order.
        """
        coming = takewhile(self._coming.__contains__, keys)
        return sum(self._block_size for _ in coming) >= self._worth_waiting

    def expect(self, request: Request, keys: Iterable[bytes]) -> None:
        """Note that a request is going to compute the blocks with these keys."""
        self._coming.update(dict.fromkeys(keys, request))

    def arrived(self, keys: Iterable[bytes]) -> None:
        """Note that the blocks with these keys are computed."""
        for key in keys:
            self._coming.pop(key, None)

    def cancel(self, request: Request, keys: Iterable[bytes]) -> None:
        """Note that a request is not going to compute the blocks with these keys after all."""
        for key in keys:
            if self._coming.get(key) is request:
                del self._coming[key]
