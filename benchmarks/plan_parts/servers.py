"""One server's steps, measured in a process of its own.

python -m plan_parts.servers CHECKPOINT TP QUANTIZATION      prints one JSON object
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import msgspec

from plan_parts.steps import Case, Steps, Timed
from weft.models.checkpoint.locate import locate, read_spec
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core import start_executor
from weft.serving.executor import loading

CACHE = 256 << 20
"""Bytes of KV cache, in all ranks together."""
MOST_CACHED = 9000
"""Tokens in the cache at once."""
CONTEXTS = (0.125, 0.5, 1.0)
"""Contexts of decodes, as shares of the longest."""
LONGEST = 1000
"""Tokens of context."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One server's steps.

    Attributes:
        model: its checkpoint.
        tp: ranks.
        quantization: of the matrices.
        steps: all cases.
    """

    model: str
    tp: int
    quantization: str
    steps: list[Timed]


def cases(longest: int) -> list[Case]:
    """Return decodes, prompts and mixed steps with up to `longest` tokens of context."""
    contexts = [int(share * longest) for share in CONTEXTS]
    decodes = [Case(n, context) for n in (1, 2, 4, 8, 16, 32, 64) for context in contexts]
    half = longest // 2
    prompts = [
        *(Case(prompts=1, tokens=tokens) for tokens in (16, 64, 128, half, longest)),
        *(Case(prompts=1, tokens=tokens, before=half) for tokens in (32, 128)),
        *(Case(prompts=prompts, tokens=16) for prompts in (4, 16)),
    ]
    mixed = [Case(n, half, 1, tokens) for n, tokens in ((8, 64), (4, 128), (8, half))]
    return [case for case in decodes + prompts + mixed if case.cached <= MOST_CACHED]


def measure(model: str, tp: int, quantization: str) -> Measured:
    """Load a model and time its steps."""
    longest = min(LONGEST, read_spec(locate(model)).max_model_len)
    config = EngineConfig(
        model=model,
        tp=tp,
        quantization=quantization,  # type: ignore[arg-type]
        kv_cache_memory=CACHE // tp,
        max_num_seqs=64,
        max_num_batched_tokens=max(1024, longest),
        max_model_len=longest,
    )
    executor = start_executor(config, loading.load_model, lambda port: None)
    try:
        loaded = executor.model
        steps = Steps(executor, loaded.block_size, loaded.vocab_size)
        steps.fill(min(loaded.num_blocks, 2 * MOST_CACHED // loaded.block_size))
        return Measured(model, tp, quantization, [steps.time(case) for case in cases(longest)])
    finally:
        executor.close()


if __name__ == "__main__":
    print(msgspec.json.encode(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])).decode())
