"""Converts token ids to text, a few at a time, exactly as if decoded all at once.

There are two stages. The first one turns tokens into characters as soon as they are certain: a
token may contain part of a character, and its text may depend on its neighbours. The second stage
looks for stop strings with an Aho-Corasick automaton (Aho and Corasick 1975). Its state after each
character is the longest end of the text that begins a stop string; exactly this text is held back.
Both stages take constant time for each token, however long the text is.

The stop string that is *complete* first ends the text. If two end at the same character, the
longer one counts. So the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from weft.serving.engine.tokenizer import Tokenizer, fallback_byte


class Detokenizer:
    """Produces one answer's text as it grows.

    Args:
        tokenizer: the model's tokenizer.
        stop: strings that end the text; the text is cut before them.
        keep_stop: cut the text after the stop string instead.
        skip_special_tokens: omit control tokens, such as the end of a turn.
        visible: special tokens to keep nevertheless.

    Attributes:
        stopped: the stop string that ended the text; None before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        skip = tokenizer.special_token_ids - visible if skip_special_tokens else frozenset()
        self._decoder: _Decoder = (
            _ByteDecoder(tokenizer, skip)
            if tokenizer.is_byte_level
            else _PieceDecoder(tokenizer, skip)
        )
        self._matcher = _StopMatcher(tuple(stop)) if stop else None
        self._keep_stop = keep_stop
        self.stopped: str | None = None

    def push(self, token_ids: Iterable[int], *, may_stop: bool = True) -> str:
        """Add tokens; returns the text that is now certain, nothing once `stopped` is set.

        Without `may_stop`, stop strings do not end the text. Such calls must come first.
        """
        if self.stopped is not None:
            return ""
        text = self._decoder.push(token_ids)
        return self._released(text) if may_stop else text

    def flush(self) -> str:
        """End the text; returns the rest. Call it once, after the last push."""
        if self.stopped is not None:
            return ""
        text = self._released(self._decoder.flush())
        if self._matcher is not None and self.stopped is None:
            text += self._matcher.held
        return text

    def _released(self, text: str) -> str:
        if self._matcher is None:
            return text
        text, self.stopped = self._matcher.push(text)
        return text + self.stopped if self.stopped is not None and self._keep_stop else text


class _Decoder(Protocol):
    """Converts tokens to characters; the results join to `tokenizer.decode` of all tokens."""

    def push(self, token_ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteDecoder:
    """Decodes byte-level BPE: the tokens' bytes are the text; a character may span tokens."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip
        # Like `tokenizers`, this writes one U+FFFD for each maximal part of an invalid sequence.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in self._skip])
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceDecoder:
    """Decodes SentencePiece and similar: pieces of text, and single bytes for rare characters.

    A run of byte pieces is valid or invalid as a whole, so it waits for its end. Only the text's
    start may lose a leading space, so the start waits until there is some text.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._waiting: list[str] = []
        self._at_start = True

    def push(self, token_ids: Iterable[int]) -> str:
        id_to_token = self._tokenizer.backend.id_to_token
        pieces = [id_to_token(i) for i in token_ids if i not in self._skip]
        waited = len(self._waiting)
        self._waiting += [piece for piece in pieces if piece is not None]
        for certain in range(len(self._waiting), waited, -1):
            if fallback_byte(self._waiting[certain - 1]) is None:
                return self._take(certain)
        return ""

    def flush(self) -> str:
        return self._take(len(self._waiting))

    def _take(self, count: int) -> str:
        if count == 0:
            return ""
        text = self._tokenizer.pieces_to_text(self._waiting[:count], first=self._at_start)
        if text or not self._at_start:
            self._at_start = False
            del self._waiting[:count]
        return text


class _StopMatcher:
    """Passes text on up to the first stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._automaton = _automaton(stop)
        self._state = 0
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns text that is certain to stay, and a stop string if one is complete."""
        automaton = self._automaton
        state = self._state
        for end, char in enumerate(text, start=1):
            state = automaton.step(state, char)
            if (match := automaton.match[state]) is not None:
                seen = self.held + text[:end]
                self.held = ""
                return seen[: len(seen) - len(match)], match
        self._state = state
        seen = self.held + text
        keep = len(seen) - automaton.depth[state]
        self.held = seen[keep:]
        return seen[:keep], None


class _Automaton:
    """An Aho-Corasick automaton. A state is the beginning of a stop string; 0 is the empty one.

    Attributes:
        depth: length of each state's text.
        match: the longest stop string at the end of each state's text; None without one.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for text in stop:
            self.match[self._add(text)] = text
        self._link()

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while (following := self._next[state].get(char)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return following

    def _add(self, text: str) -> int:
        state = 0
        for depth, char in enumerate(text, start=1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(depth)
                self.match.append(None)
            state = self._next[state][char]
        return state

    def _link(self) -> None:
        """Link each state to its longest proper ending that is a state too; breadth first."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], char)
                if self.match[following] is None:
                    self.match[following] = self.match[self._fallback[following]]
                queue.append(following)


@lru_cache(maxsize=8)
def _automaton(stop: tuple[str, ...]) -> _Automaton:
    """Return an automaton; one request's answers, and often all requests, share stop strings."""
    return _Automaton(stop)
