"""Grammar matchers: which tokens a request may sample next.

This is the engine core's side of structured output (docs/structured-output.md). xgrammar does the
matching (Dong et al. 2024, arXiv:2411.15100). This module adds the end of the output: the model
may end it when the grammar is complete, and must end it when nothing else can follow.

Matchers are made in threads, because xgrammar takes seconds to import, half a second to read a
large vocabulary, and tens of ms to compile a grammar. Meanwhile the engine core serves other
requests. The API process checks each grammar (compiler.py) and sends it once; the core keeps it
while there is room. Slow grammars have a separate thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from weft.errors import RequestError
from weft.models.interface import Int32
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.grammar.cache import LruCache
from weft.serving.engine.grammar.compiler import ROOM
from weft.serving.engine.grammar.utf8 import Utf8Rules
from weft.serving.engine.protocol import Add, Compiled
from weft.serving.engine.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import xgrammar

MAX_SECONDS = 1.0
"""CPU time that one token may take, and that a request may use beyond SECONDS_A_TOKEN."""
SECONDS_A_TOKEN = 0.005
"""CPU time for each token that a request may take in the long run; 0.0001 is usual."""

NO_TEXT = b"\xff"
"""A byte that never occurs in UTF-8."""

logger = logging.getLogger(__name__)


class Matcher(Protocol):
    """Follows one request, and knows its allowed next tokens.

    Attributes:
        mask: int32[ceil(V / 32)]; allowed next tokens, see StepInput.token_mask.
    """

    mask: Int32

    @property
    def ended(self) -> bool:
        """True if nothing can follow, and there is no end token to sample."""

    def advance(self, token: int) -> str | None:
        """Accept the next token (no end token); returns an error, if any.

        An error only concerns this request.
        """


class GrammarMatcher:
    """Follows one request through its grammar; see Matcher.

    Args:
        matcher: a new xgrammar.GrammarMatcher; its stop tokens are among `end_token_ids`.
        vocab_size: V, number of columns of the model's logits.
        end_token_ids: tokens that end the request.
        min_tokens: minimum number of tokens before an end token, unless nothing else can follow.
        unwanted: end tokens that must not occur, unless nothing else can follow.
        utf8: rules against invalid UTF-8; None if no token could make it.

    Raises:
        RequestError: no token can come first.

    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        end_token_ids: Collection[int],
        min_tokens: int = 0,
        unwanted: Collection[int] = (),
        utf8: Utf8Rules | None = None,
    ) -> None:
        self._matcher = matcher
        self._utf8 = utf8
        self._newest: int | None = None
        self._min_tokens = min_tokens
        self._count = 0
        self._seconds = MAX_SECONDS  # left to use; each token adds some
        self._all = mask_of(range(vocab_size), vocab_size)
        self._but_ends = ~mask_of(end_token_ids, vocab_size)
        self._but_unwanted = ~mask_of(unwanted, vocab_size)
        self.ended = False
        self.mask: Int32
        self._fill()

    def advance(self, token: int) -> str | None:
        """Accept the request's next token; see Matcher."""
        started = time.thread_time()
        try:
            if not self._matcher.accept_token(token):
                return f"token {token} does not follow in the grammar"
            self._count += 1
            self._newest = token
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
        # A new array, because steps in flight may still use the last one.
        mask = np.full_like(self._but_ends, -1)
        self._matcher.fill_next_token_bitmask(mask[None])
        # xgrammar does not clear the bits beyond the vocabulary; neither mask has them.
        mask &= self._all if self._utf8 is None else self._utf8.after(self._newest)
        if not mask.any():
            if not self._matcher.is_completed():
                raise RequestError("none of the model's tokens can follow in the grammar")
            self.ended = True
        wanted = mask & (self._but_ends if self._count < self._min_tokens else self._but_unwanted)
        self.mask = wanted if wanted.any() else mask


def mask_of(token_ids: Collection[int], vocab_size: int) -> Int32:
    """Return a mask with exactly these tokens; ids beyond the vocabulary are left out."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    bits[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class GrammarMatchers:
    """Makes requests' matchers, in two threads: one of them for slow grammars.

    Args:
        config: settings that name the tokenizer.
        vocab_size: number of columns of the model's logits.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self.vocab_size = vocab_size
        self._quick, self._slow = (
            ThreadPoolExecutor(1, thread_name_prefix="weft-matchers") for _ in range(2)
        )  # they start when used
        self._lock = threading.Lock()
        self._tokens: xgrammar.TokenizerInfo | None = None
        self._control: frozenset[int] = frozenset()
        self._utf8: Utf8Rules | None = None
        self._compiled: LruCache[tuple[ThreadPoolExecutor, Future[Any]]] = LruCache(ROOM)

    def keep(self, message: Compiled) -> None:
        """Keep a grammar for later requests."""
        thread = self._slow if message.slow else self._quick
        compiling = thread.submit(self._compile, message.text)
        self._compiled.put(message.key, (thread, compiling), message.size)

    def make(self, add: Add) -> Future[GrammarMatcher]:
        """Return a future matcher for a request; its grammar must have arrived before."""
        kept = self._compiled.get(add.grammar)
        assert kept is not None, "the API process knows which grammars are here"
        thread, compiling = kept
        return thread.submit(partial(self._make, add, compiling))

    def close(self) -> None:
        """Wait for the current work and cancel the rest."""
        self._quick.shutdown(cancel_futures=True)
        self._slow.shutdown(cancel_futures=True)

    def _compile(self, text: str) -> xgrammar.CompiledGrammar:
        import xgrammar

        with self._lock:
            if self._tokens is None:
                tokenizer = load_tokenizer(self._config)
                words = words_of(tokenizer, self.vocab_size)
                self._utf8 = Utf8Rules(words)
                self._tokens = tokens_of(tokenizer, words)
                self._control = control_tokens(tokenizer)
        compiler = xgrammar.GrammarCompiler(self._tokens, max_threads=1, cache_enabled=False)
        return compiler.compile_structural_tag(text)

    def _make(self, add: Add, compiling: Future[Any]) -> GrammarMatcher:
        import xgrammar

        grammar = compiling.result()  # done earlier by this thread
        # Only control tokens; a grammar may contain other end tokens as text.
        stop = [t for t in add.end_token_ids if t in self._control and t < self.vocab_size]
        matcher = xgrammar.GrammarMatcher(
            grammar,
            override_stop_tokens=stop or None,
            terminate_without_stop_token=not stop,
        )
        params = add.params
        unwanted = set(add.end_token_ids) - set(params.stop_token_ids) if params.ignore_eos else ()
        return GrammarMatcher(
            *(matcher, self.vocab_size, add.end_token_ids, params.min_tokens, unwanted, self._utf8)
        )


def words_of(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each token adds to a text.

    Control tokens add none, so no grammar accepts them. Tokens around tool calls and thoughts get
    bytes that never occur in text, so a grammar accepts them only where it names them.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of columns of the model's logits.
    """
    control = control_tokens(tokenizer)
    words = [b"" if i in control else tokenizer.token_bytes(i) for i in range(vocab_size)]
    for text, token in tokenizer.mark_tokens.items():
        if token < vocab_size:
            words[token] = NO_TEXT + text.encode()
    return words


def tokens_of(tokenizer: Tokenizer, words: list[bytes]) -> xgrammar.TokenizerInfo:
    """Return xgrammar's form of a vocabulary.

    Args:
        tokenizer: the model's tokenizer.
        words: from `words_of`.
    """
    import xgrammar

    ends = [token for token in tokenizer.eos_token_ids if token < len(words)]
    return xgrammar.TokenizerInfo(words, xgrammar.VocabType.RAW, stop_token_ids=ends)


def control_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that add nothing to a text."""
    return tokenizer.special_token_ids | frozenset(tokenizer.eos_token_ids)
