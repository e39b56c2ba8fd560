"""API keys: who may ask, and how much each may ask for at once and in a minute.

Keys are kept as SHA-256 digests, and what a client presents is compared with all of them in
constant time. A key's tokens are a bucket that refills all the time. Those of a prompt are taken
from it when the request gets its place, though its client may go before they are computed, those of
an answer as they come; while it is empty, new requests are refused. So nothing has to be guessed
beforehand, and what runs gets to its end.
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
    """A key and what it has in use.

    Attributes:
        name: as logs and errors have it.
        digest: SHA-256 of the key.
        running: requests under way.
        tokens: left in its bucket, below zero when more were used; None if it has no limit.
        refilled: time.monotonic() when that was so.
    """

    name: str
    digest: bytes
    running: int = 0
    tokens: float | None = None
    refilled: float = 0.0

    def spend(self, tokens: int) -> None:
        """Take tokens that are computed for it."""
        if self.tokens is not None:
            self.tokens -= tokens


class Keyring:
    """All keys of a server; without any, everybody may ask.

    Args:
        config: says where the keys are, and what each may have.

    Raises:
        ConfigError: the file cannot be read, or a key cannot be one.
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
        """Read the keys again; those that stay keep what they have in use."""
        keys: dict[bytes, Key] = {}
        for name, key, source in self._listed():
            if len(key) < _SHORTEST or not (key.isascii() and key.isprintable()):
                raise ConfigError(
                    f"{source} has a key that is no {_SHORTEST} or more printable ASCII characters"
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
        """The key that a client presents; takes as long however much of it is right."""
        digest = hashlib.sha256(presented.encode()).digest()
        found = None
        for key in self._keys.values():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def check(self, key: Key) -> None:
        """Raise RequestError, 429, unless the key may have another request now."""
        most = self._config.max_requests_per_key
        if most is not None and key.running >= most:
            raise RequestError(
                f"{key.running} requests of key {key.name} are under way, of at most {most}",
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
        """Until its bucket has a token, which it is refilled for first."""
        budget = self._config.tokens_per_minute_per_key
        if budget is None or key.tokens is None:
            return 0
        now = time.monotonic()
        key.tokens = min(budget, key.tokens + (now - key.refilled) * budget / 60)
        key.refilled = now
        return 0 if key.tokens > 0 else max(1, math.ceil(-key.tokens * 60 / budget))

    def _listed(self) -> Iterator[tuple[str, str, str]]:
        """(name, key, where it is from)."""
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
