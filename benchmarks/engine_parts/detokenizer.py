"""The incremental detokenizer, alone and behind a `RequestStream`: tokens per second.

The tokenizer is a byte-level BPE of 151,936 tokens; the text is letters,
accents, Chinese characters and emoji, so that many characters span tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from make_checkpoint import make_tokenizer

from engine_parts.measure import Case, per_call
from engine_parts.mock import VOCAB_SIZE
from weft.serving.engine.detokenizer import Detokenizer
from weft.serving.engine.protocol import TokenOutput
from weft.serving.engine.request_stream import RequestStream
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.timeline import Timeline
from weft.serving.engine.tokenizer import Tokenizer

TEXT = "The weft crosses the warp; là où naît l'étoffe: 经线与纬线, 🧵 and all. " * 20
STOP = ("\n\nUser:", "</answer>", "###", "the end")


def load_tokenizer() -> Tokenizer:
    """The benchmark's tokenizer, as a checkpoint brings it."""
    with tempfile.TemporaryDirectory() as directory:
        make_tokenizer(VOCAB_SIZE).save(str(Path(directory) / "tokenizer.json"))
        return Tokenizer.load(directory)


def _detokenize(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> Callable[[], None]:
    def turn() -> None:
        detokenizer = Detokenizer(tokenizer, stop=stop)
        text = "".join([detokenizer.push((token,)) for token in ids]) + detokenizer.flush()
        assert text == TEXT

    return turn


def _stream(tokenizer: Tokenizer, ids: list[int]) -> Callable[[], None]:
    """What the core sends, taken in and taken out, one token at a time."""
    outputs = [TokenOutput("0", [token]) for token in ids]
    params = SamplingParams(max_tokens=len(ids))

    def turn() -> None:
        stream = RequestStream(tokenizer, params, Timeline("0", 1, [("prefill", 0.0)]))
        for output in outputs:
            stream.push(output)
            try:
                stream.next().send(None)  # it is there, so nothing is awaited
            except StopIteration:
                continue
            raise AssertionError("the stream had news and waits")

    return turn


@contextmanager
def cases() -> Iterator[list[Case]]:
    """See the module's text."""
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(TEXT)

    def case(name: str, turn: Callable[[], object]) -> Case:
        return Case(name, "tokens/s", lambda seconds: len(ids) / per_call(turn, seconds))

    yield [
        case("no stop strings", _detokenize(tokenizer, ids, ())),
        case("4 stop strings", _detokenize(tokenizer, ids, STOP)),
        case("in a stream, pushed and taken", _stream(tokenizer, ids)),
    ]
