"""Packed prompts, and their blocks' keys in the prefix cache.

A key hashes the previous block's key and the block's own tokens, so it stands for the whole prefix
up to the block's end. The first block's parent is a root key, computed from the request's
`cache_salt`. Keys are 128-bit BLAKE2b: equal keys mean equal tokens.

The API process packs each prompt and computes its keys. This work would delay every running
request if the engine core did it, because the model waits for the core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import pack

import msgspec

TOKEN_BYTES = 4
KEY_BYTES = 16
ROOT_KEY = bytes(KEY_BYTES)
"""The parent key for a prompt's first block, unless the prompt has a salt."""


class Prompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A packed prompt.

    Attributes:
        tokens: int32 tokens.
        keys: keys of its full blocks, concatenated; empty if nobody needs them.
        root: the parent key for the first block.
    """

    tokens: bytes
    keys: bytes = b""
    root: bytes = ROOT_KEY

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    def block_keys(self) -> list[bytes]:
        """Return its full blocks' keys in order; an empty list if nobody computed them."""
        import numpy as np  # not above: the server imports this module before the engine runs

        keys: list[bytes] = np.frombuffer(self.keys, f"V{KEY_BYTES}").tolist()
        return keys


def pack_prompt(token_ids: Sequence[int], block_size: int | None, salt: str = "") -> Prompt:
    """Pack a prompt.

    Args:
        token_ids: its tokens.
        block_size: number of tokens in a block; None if there is no prefix cache.
        salt: only prompts with the same salt have keys in common.
    """
    tokens = pack(f"{len(token_ids)}i", *token_ids)
    root = blake2b(salt.encode(), digest_size=KEY_BYTES).digest() if salt else ROOT_KEY
    keys = b"" if block_size is None else b"".join(block_keys(tokens, block_size, root))
    return Prompt(tokens, keys, root)


def block_keys(tokens: bytes, block_size: int, parent: bytes = ROOT_KEY) -> Iterator[bytes]:
    """Yield each full block's key, in order.

    Args:
        tokens: int32 tokens that start at a block's beginning.
        block_size: number of tokens in a block.
        parent: key of the block before.
    """
    size = block_size * TOKEN_BYTES
    for end in range(size, len(tokens) + 1, size):
        parent = blake2b(parent + tokens[end - size : end], digest_size=KEY_BYTES).digest()
        yield parent
