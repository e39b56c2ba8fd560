"""API keys, and their limits on concurrent requests and on tokens per minute.

Keys are stored as SHA-256 digests. A client's key is compared with all of them in constant time.

Each key has a bucket of tokens, which refills continuously. When a request is admitted, its prompt
tokens are taken from the bucket, even if the client leaves before they are computed. Output tokens
are taken as they come. While the bucket is empty, new requests are refused. Output lengths
therefore need no estimate, and running requests always finish.

This module is apart from auth.py because the server reads its keys before it imports FastAPI.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ConfigError, RequestError
from weft.serving.config.settings import ServerConfig

_SHORTEST = 8  # characters; a shorter key is a mistake


@dataclass
class Key:
    """A key and its current use.

    Attributes:
        name: the key's name in logs and errors.
        digest: SHA-256 of the key.
        running: number of running requests.
        tokens: tokens left in its bucket, negative after overuse; None without a limit.
        refilled: time.monotonic() of the last refill.
    """

    name: str
    digest: bytes
    running: int = 0
    tokens: float | None = None
    refilled: float = 0.0

    def spend(self, tokens: int) -> None:
        """Take tokens from the bucket."""
        if self.tokens is not None:
            self.tokens -= tokens


class Keyring:
    """All keys of a server. Without keys, the server is open to everybody.

    Args:
        config: sources of the keys, and the limits of each.

    Raises:
        ConfigError: the file cannot be read, or a key is invalid.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._keys: dict[bytes, Key] = {}
        self.reload()
        for setting in ("max_requests_per_key", "tokens_per_minute_per_key"):
            if getattr(config, setting) is not None and not self:
                flag = "--" + setting.replace("_", "-")
                raise ConfigError(f"{flag} needs keys: set --api-key or --api-key-file")

    def __bool__(self) -> bool:
        return bool(self._keys)

    def reload(self) -> None:
        """Read the keys again; a key that stays keeps its bucket and its running requests."""
        keys: dict[bytes, Key] = {}
        for name, key, source in self._listed():
            if len(key) < _SHORTEST or not (key.isascii() and key.isprintable()):
                raise ConfigError(
                    f"{source} has an invalid key: a key is {_SHORTEST} or more printable ASCII "
                    "characters"
                )
            digest = hashlib.sha256(key.encode()).digest()
            budget = self._config.tokens_per_minute_per_key
            keys[digest] = self._keys.get(digest) or Key(
                name, digest, tokens=budget, refilled=time.monotonic()
            )
            keys[digest].name = name
        if self._config.api_key_file is not None and not keys:
            raise ConfigError(f"--api-key-file {self._config.api_key_file} has no key")
        self._keys = keys

    def find(self, presented: str) -> Key | None:
        """Return the key that a client presents, in constant time."""
        digest = hashlib.sha256(presented.encode()).digest()
        found = None
        for key in self._keys.values():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def check(self, key: Key) -> None:
        """Raise RequestError with status 429 unless the key may make another request now."""
        most = self._config.max_requests_per_key
        if most is not None and key.running >= most:
            raise RequestError(
                f"key {key.name} has {key.running} running requests; the maximum is {most}",
                code="too_many_requests_of_key",
                status=429,
                retry_after=1,
            )
        if (wait := self._seconds_to_wait(key)) > 0:
            raise RequestError(
                f"key {key.name} has used up its {self._config.tokens_per_minute_per_key} tokens "
                f"per minute; try again in {wait} s",
                code="token_rate_exceeded",
                status=429,
                retry_after=wait,
            )

    def _seconds_to_wait(self, key: Key) -> int:
        """Refill the bucket, and return the seconds until it has a token."""
        budget = self._config.tokens_per_minute_per_key
        if budget is None or key.tokens is None:
            return 0
        now = time.monotonic()
        key.tokens = min(budget, key.tokens + (now - key.refilled) * budget / 60)
        key.refilled = now
        return 0 if key.tokens > 0 else max(1, math.ceil(-key.tokens * 60 / budget))

    def _listed(self) -> Iterator[tuple[str, str, str]]:
        """Yield (name, key, source)."""
        for i, key in enumerate((self._config.api_key or "").split(",")):
            if self._config.api_key is not None:
                yield f"key-{i + 1}", key.strip(), "--api-key"
        if self._config.api_key_file is None:
            return
        file = Path(self._config.api_key_file)
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"--api-key-file {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--api-key-file {file} is not text") from None
        for number, line in enumerate(lines, 1):
            key, _, name = line.strip().partition(" ")
            if key and not key.startswith("#"):
                yield name.strip() or f"line-{number}", key, f"--api-key-file {file}:{number}"
