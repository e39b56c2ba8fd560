"""Compiles a grammar on trial, before an engine core does.

A compiled grammar may still be slow to match, because some grammars can read one text in very many
ways. So each grammar is first compiled for a 256-byte vocabulary, and walked through at random. The
walk counts the matcher's work, not its time, so every machine refuses the same grammars. This
sample proves nothing, so matcher.py limits the time as well.

Then the grammar is compiled for the model's vocabulary, as the core will do it.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from weft.errors import RequestError
from weft.serving.engine.grammar.matcher import NO_TEXT, control_tokens, tokens_of, words_of
from weft.serving.engine.grammar.messages import Answer, Vocabulary
from weft.serving.engine.grammar.structural_tag import (
    as_format,
    preceded,
    tag_of,
    tokens_replaced,
)
from weft.serving.engine.sampling_params import Grammar
from weft.serving.engine.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import xgrammar

MAX_COMPILED = 32 << 20  # a compiled grammar's bytes in memory
SLOW = 0.1  # seconds processor time; a core must not let others wait for more
MARKS = 256  # tokens in the small vocabulary for tokens named in a structural tag
END = 256 + MARKS  # the small vocabulary's end token
WALKS, STEPS = 4, 256
MAX_ITEMS = 1 << 18  # Earley items in a walk; usual are 5,000, and 1e5 if wide
MAX_CHAINS = 1 << 14  # see `_chains`, at one byte; usual are 10, and 1,000 if wide
MAX_SECONDS = 8.0  # processor time for all walks; the last resort: usual are 0.05

# In xgrammar's account for a byte: one rule begins another.
_PREDICTION = re.compile(rb"The rule (\d+): \S+ predict the new rule (\d+): ")


class Compiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._tokenizer = load_tokenizer(vocabulary.config)
        self._never = control_tokens(self._tokenizer) - set(self._tokenizer.mark_tokens.values())
        small = xgrammar.TokenizerInfo(
            [*(bytes([i]) for i in range(256)), *(NO_TEXT + bytes([i]) for i in range(MARKS)), b""],
            xgrammar.VocabType.RAW,
            stop_token_ids=[END],
        )
        words = words_of(self._tokenizer, vocabulary.size)
        self._for_tokens, self._for_bytes = (
            xgrammar.GrammarCompiler(each, max_threads=1, cache_enabled=False)
            for each in (tokens_of(self._tokenizer, words), small)
        )

    def compile(self, grammar: Grammar) -> Answer:
        """Compile a grammar; the answer reports any error."""
        param = grammar.param
        try:
            form = as_format(grammar, self._token_id)
            marks: dict[int, int] = {}
            bytewise = tokens_replaced(form, lambda t: marks.setdefault(t, 256 + len(marks)))
            if len(marks) > MARKS:
                raise RequestError(f"{param} names {len(marks)} tokens; the maximum is {MARKS}")
            with _warnings() as said:
                compiled = self._for_bytes.compile_structural_tag(tag_of(bytewise))
            if said:
                raise RequestError(f"{param} is not supported: {said[0]}")
            with _stderr() as stderr:
                _walk(compiled, param, stderr)
            tag = tag_of(preceded(form, grammar.before))
            begin = time.thread_time()
            size = self._for_tokens.compile_structural_tag(tag).memory_size_bytes
            slow = time.thread_time() - begin > SLOW
            if size > MAX_COMPILED:
                raise RequestError(
                    f"{param} has {size} bytes when compiled; the maximum is {MAX_COMPILED}"
                )
        except RequestError as error:
            return _rejected(error.message)
        except OSError as error:
            return Answer(fault=str(error))
        except RecursionError:
            return _rejected(f"{param} is nested too deeply; simplify it")
        except MemoryError:
            return _rejected(f"{param} takes too much memory to compile")
        except Exception as error:  # noqa: BLE001  xgrammar raises many kinds
            if "bad_alloc" in str(error):
                return _rejected(f"{param} takes too much memory to compile")
            reason = _brief(str(error)) or "xgrammar gives no reason"
            return _rejected(f"{param} cannot be compiled: {reason}")
        return Answer(tag=tag, size=size, slow=slow)

    def _token_id(self, token: str | int) -> int | None:
        """Return a token's id; None if a grammar must not name the token."""
        number = self._tokenizer.backend.token_to_id(token) if isinstance(token, str) else token
        return None if number in self._never else number


def _walk(grammar: xgrammar.CompiledGrammar, param: str, stderr: BinaryIO) -> None:
    """Take some random ways through a grammar, a byte a step.

    Raises:
        RequestError: there is none, or matching takes too much work.
    """
    import numpy as np
    import xgrammar

    rng = random.Random(0)
    mask = np.empty((1, END // 32 + 1), np.int32)
    begin = time.thread_time()
    for walk in range(WALKS):
        matcher = xgrammar.GrammarMatcher(grammar)
        token = END
        items = 0
        for _ in range(STEPS):
            mask.fill(-1)
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: END + 1])
            if not len(allowed):
                raise RequestError(f"{param} allows no text, or it has dead ends")
            if allowed[0] == END:
                break
            # Half the walks stay in a repetition for as long as they can.
            if walk % 2 or not bits[token] or token == END:
                token = int(rng.choice(allowed[allowed < END]))
            account = _accept(matcher, token, stderr)
            items += account.count(b"\n")
            seconds = time.thread_time() - begin
            if items > MAX_ITEMS or _chains(account) > MAX_CHAINS or seconds > MAX_SECONDS:
                raise RequestError(
                    f"{param} is too slow to match: it can read one text in too many ways, "
                    "for example by repetitions within repetitions"
                )


def _accept(matcher: xgrammar.GrammarMatcher, token: int, stderr: BinaryIO) -> bytes:
    """Take a token, and return the matcher's account for it: about one line for each item."""
    stderr.truncate(0)
    stderr.seek(0)
    matcher.accept_token(token, debug_print=True)
    stderr.seek(0)
    return stderr.read()


def _chains(account: bytes) -> int:
    """Count pairs of predictions at one byte: one begins a rule, and this rule begins another.

    For a usual grammar the number does not grow with the text. When a rule begins itself in many
    places it grows with the square of the text's length, and a byte's time with the cube.
    """
    begins: Counter[bytes] = Counter()
    begun: Counter[bytes] = Counter()
    for rule, other in _PREDICTION.findall(account):
        begins[rule] += 1
        begun[other] += 1
    return sum(count * begun[rule] for rule, count in begins.items())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect xgrammar's warnings about ignored parts from stderr; complete after the block."""
    said: list[str] = []
    with _stderr() as stderr:
        yield said
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").splitlines()
    said += [_brief(line) for line in lines if "warning" in line.lower()]


@contextmanager
def _stderr() -> Iterator[BinaryIO]:
    """A file for all this process's stderr."""
    sys.stderr.flush()
    with open(os.memfd_create("stderr"), "w+b", buffering=0) as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _rejected(error: str) -> Answer:
    return Answer(error=error.encode(errors="replace").decode())  # it may end inside a character


def _brief(message: str) -> str:
    """Return xgrammar's message without its place in the source."""
    text = message.strip().partition("\n")[0]
    for words in ("Check failed: ", "Warning: "):
        text = text.rpartition(words)[2]
    for mark in (" is false: ", ".cc:", ".h:"):
        text = text.partition(mark)[2] or text
    return re.sub(r"^\d+: ", "", text)[:300]
