"""Guides for requests, made in a thread: until one is ready, the engine core goes on with others.

xgrammar takes seconds to import, a large vocabulary half a second to take in, and a grammar
some tens of ms. What is compiled comes from the front (compiler.py), once, and is
kept as long as there is room.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.serving.config.settings import EngineConfig
from weft.serving.engine.grammar.compiler import ROOM
from weft.serving.engine.grammar.lru import LruCache
from weft.serving.engine.grammar.matcher import GrammarMatcher
from weft.serving.engine.protocol import Add, Compiled
from weft.serving.engine.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import xgrammar

NO_TEXT = b"\xff"
"""A byte that is in no UTF-8."""


class GrammarMatchers:
    """Makes them, in one thread.

    Args:
        config: names the tokenizer.
        vocab_size: columns of the model's logits.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-guides")  # starts when used
        self._tokens: xgrammar.TokenizerInfo | None = None
        self._control: frozenset[int] = frozenset()
        self._compiled: LruCache[Future[Any]] = LruCache(ROOM)

    def keep(self, message: Compiled) -> None:
        """Take a compiled grammar in."""
        loading = self._thread.submit(self._load, message.data)
        self._compiled.put(message.key, loading, len(message.data))

    def make(self, add: Add) -> Future[GrammarMatcher]:
        """A guide for a request whose grammar has been taken in."""
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
