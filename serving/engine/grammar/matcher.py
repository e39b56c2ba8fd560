"""Where one request is in its grammar, and which tokens may come next.

The engine core's side of structured output (docs/structured-output.md). xgrammar does the
matching (Dong et al. 2024, arXiv:2411.15100); here are the ends: when the grammar is complete
the model may end its output, and when nothing else can follow it must.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import RequestError
from weft.models.interface import Int32
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.grammar.compiler import ROOM, LruCache
from weft.serving.engine.protocol import Add, Compiled
from weft.serving.engine.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import xgrammar

MAX_SECONDS = 1.0
"""Of the processor's time for one token, and for all that is beyond SECONDS_A_TOKEN."""
SECONDS_A_TOKEN = 0.005
"""Of the processor's time that a request may take in the long run; a usual token takes 0.0001."""

NO_TEXT = b"\xff"
"""A byte that is in no UTF-8."""

logger = logging.getLogger(__name__)


class GrammarMatcher:
    """One request's place in its grammar.

    Args:
        matcher: an xgrammar.GrammarMatcher, new, whose stop tokens are among `end_token_ids`.
        vocab_size: V, columns of the model's logits.
        end_token_ids: tokens that end the request.
        min_tokens: none of them may come before so many tokens, unless nothing else can.
        unwanted: those of them that may never come, unless nothing else can.

    Raises:
        RequestError: there is no token to begin with.

    Attributes:
        mask: int32 [ceil(V / 32)]; the tokens that may come next, see StepInput.token_mask.
        ended: nothing may come next; there is no end token to say so.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        end_token_ids: Collection[int],
        min_tokens: int = 0,
        unwanted: Collection[int] = (),
    ) -> None:
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._count = 0
        self._seconds = MAX_SECONDS  # that are left; each token brings some
        self._all = _all_but(range(vocab_size, -(-vocab_size // 32) * 32), vocab_size)
        self._but_ends = _all_but(end_token_ids, vocab_size)
        self._but_unwanted = _all_but(unwanted, vocab_size)
        self.ended = False
        self.mask: Int32
        self._fill()

    def advance(self, token: int) -> str | None:
        """Take the request's next token, which is no end token; what went wrong, if anything did.

        Whatever it is: it is this request's alone.
        """
        started = time.thread_time()
        try:
            if not self._matcher.accept_token(token):
                return f"token {token} does not follow in the grammar"
            self._count += 1
            self._fill()
        except RequestError as error:
            return error.message
        except Exception as error:
            logger.warning("a grammar's matcher failed", exc_info=error)
            return f"the grammar's matcher failed: {error}"
        seconds = time.thread_time() - started
        self._seconds = min(MAX_SECONDS, self._seconds + SECONDS_A_TOKEN - seconds)
        if self._seconds < 0:
            return (
                f"the grammar took {seconds:.3f} s for token {self._count}, and more than "
                f"{SECONDS_A_TOKEN} s for many before; make it less ambiguous"
            )
        return None

    def _fill(self) -> None:
        # A new one: steps under way may hold the last one.
        mask = np.full_like(self._but_ends, -1)
        self._matcher.fill_next_token_bitmask(mask[None])
        mask &= self._all  # it leaves the bits beyond the vocabulary as they were
        if not mask.any():
            if not self._matcher.is_completed():
                raise RequestError("no token of the model's can follow in the grammar")
            self.ended = True
        wanted = mask & (self._but_ends if self._count < self._min_tokens else self._but_unwanted)
        self.mask = wanted if wanted.any() else mask


def _all_but(token_ids: Collection[int], vocab_size: int) -> Int32:
    """A mask of all tokens but these."""
    mask = np.full(-(-vocab_size // 32), -1, np.int32)
    ids = np.array([t for t in token_ids if 0 <= t < 32 * len(mask)], np.int64)
    bits = np.left_shift(1, ids % 32).astype(np.uint32).view(np.int32)
    np.bitwise_and.at(mask, ids // 32, ~bits)
    return mask


class GrammarMatchers:
    """Makes them, in one thread.

    Args:
        config: names the tokenizer.
        vocab_size: columns of the model's logits.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-matchers")  # starts when used
        self._tokens: xgrammar.TokenizerInfo | None = None
        self._control: frozenset[int] = frozenset()
        self._compiled: LruCache[Future[Any]] = LruCache(ROOM)

    def keep(self, message: Compiled) -> None:
        """Take a compiled grammar in."""
        loading = self._thread.submit(self._load, message.data)
        self._compiled.put(message.key, loading, len(message.data))

    def make(self, add: Add) -> Future[GrammarMatcher]:
        """Return a matcher for a request whose grammar has been taken in."""
        loading = self._compiled.get(add.grammar)
        assert loading is not None, "the front knows what is here"
        return self._thread.submit(partial(self._make, add, loading))

    def close(self) -> None:
        """Wait for what is under way."""
        self._thread.shutdown(cancel_futures=True)

    def _load(self, data: bytes) -> xgrammar.CompiledGrammar:
        import xgrammar

        if self._tokens is None:
            tokenizer = load_tokenizer(self._config)
            self._tokens = tokens_of(tokenizer, self._vocab_size)
            self._control = control_tokens(tokenizer)
        return xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._tokens)

    def _make(self, add: Add, loading: Future[Any]) -> GrammarMatcher:
        import xgrammar

        grammar = loading.result()  # of this thread, earlier
        # Others are text, which a grammar may well have before its end.
        stop = [t for t in add.end_token_ids if t in self._control and t < self._vocab_size]
        matcher = xgrammar.GrammarMatcher(
            grammar,
            override_stop_tokens=stop or None,
            terminate_without_stop_token=not stop,
        )
        params = add.params
        unwanted = set(add.end_token_ids) - set(params.stop_token_ids) if params.ignore_eos else ()
        return GrammarMatcher(
            matcher, self._vocab_size, add.end_token_ids, params.min_tokens, unwanted
        )


def tokens_of(tokenizer: Tokenizer, vocab_size: int) -> xgrammar.TokenizerInfo:
    """The bytes that each token adds to a text.

    Control tokens add none, so no grammar takes them. Of these, the marks of calls and thoughts are
    bytes that no text has: a grammar takes them where it names them.

    Args:
        tokenizer: of the model.
        vocab_size: columns of the model's logits.
    """
    import xgrammar

    control = control_tokens(tokenizer)
    words = [b"" if i in control else tokenizer.token_bytes(i) for i in range(vocab_size)]
    for text, token in tokenizer.mark_tokens.items():
        if token < vocab_size:
            words[token] = NO_TEXT + text.encode()
    ends = [token for token in tokenizer.eos_token_ids if token < vocab_size]
    return xgrammar.TokenizerInfo(words, xgrammar.VocabType.RAW, stop_token_ids=ends)


def control_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that add nothing to a text."""
    return tokenizer.special_token_ids | frozenset(tokenizer.eos_token_ids)
