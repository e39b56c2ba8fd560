"""Token ids to text, a few at a time, exactly as if decoded all at once.

Two stages. The first turns tokens into characters as soon as they are certain:
a token may hold a part of a character, and what it stands for may depend on
its neighbours. The second looks for stop strings with an Aho-Corasick
automaton (Aho and Corasick 1975): its state after each character is the
longest ending of the text that begins a stop string, and just that much text is
held back. Both take constant time per token, whatever the length of the text.

The stop string that is *complete* first ends the text; of two that end at the
same character, the longer one. So the answer does not depend on how the text
was cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from weft.serving.engine.tokenizer import Tokenizer, fallback_byte


class Detokenizer:
    """The text of one answer, as it grows.

    Args:
        tokenizer: of the model.
        stop: strings that end the text; they and what follows are left out.
        skip_special_tokens: leave out tokens that are no text, such as the end of a turn.
        visible: of those, the ones to keep even so.

    Attributes:
        stopped: the stop string that ended the text, if one did.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
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
        self.stopped: str | None = None

    def push(self, token_ids: Iterable[int], *, may_stop: bool = True) -> str:
        """Add tokens; returns the text that is certain now. Empty once `stopped` is set.

        Without `may_stop`, which may only precede all else, stop strings are let through.
        """
        if self.stopped is not None:
            return ""
        text = self._decoder.push(token_ids)
        return self._released(text) if may_stop else text

    def flush(self) -> str:
        """End the text; returns what was held back. To be called once, after the last push."""
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
        return text


class _Decoder(Protocol):
    """Tokens to characters. The texts that are returned join to `tokenizer.decode` of all."""

    def push(self, token_ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteDecoder:
    """Byte-level BPE: the tokens' bytes are the text; a character may span tokens."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip
        # Like `tokenizers`, it writes one U+FFFD for each maximal part of an invalid sequence.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in self._skip])
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceDecoder:
    """SentencePiece and the like: pieces of text, and single bytes for rare characters.

    A run of byte pieces is valid or invalid as a whole, so it waits for its end. A leading space
    may be dropped at the start of the text only, so the start waits until there is some text.
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
    """Lets text through up to the first stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._automaton = _automaton(stop)
        self._state = 0
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; returns what is certain to be kept, and the stop string if one is complete."""
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
    """Aho-Corasick over characters; a state is a beginning of a stop string, 0 the empty one.

    Attributes:
        depth: length of each state's text.
        match: the longest stop string that the state's text ends with, if any.
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
        """The state after one more character."""
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
        """Breadth first: point each state to its longest proper ending that is a state too."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], char)
                if self.match[following] is None:
                    self.match[following] = self.match[self._fallback[following]]
                queue.append(following)


@lru_cache(maxsize=8)
def _automaton(stop: tuple[str, ...]) -> _Automaton:
    """The answers of one request, and often all requests, share their stop strings."""
    return _Automaton(stop)
