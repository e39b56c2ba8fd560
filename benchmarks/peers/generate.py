"""transformers' `generate` in a process of its own: batches in on stdin, times out on stdout.

    python -m peers.generate CHECKPOINT THREADS

Prints {"ready": true} when the model is loaded; then answers each line
{"prompts": [[ids]], "output_tokens": n} with {"steps": [s]}: the seconds from
the start of the call to each token of the batch. One static batch, greedy,
bfloat16, prompts of one length; no HTTP, no text, no scheduler.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TextIO

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import StoppingCriteria


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes when each token is known; never stops anything."""

    def __init__(self, rows: int) -> None:
        self.start = time.perf_counter()
        self.steps: list[float] = []
        self._never = torch.zeros(rows, dtype=torch.bool)

    def __call__(self, *_: object, **__: object) -> torch.Tensor:
        self.steps.append(time.perf_counter() - self.start)
        return self._never


def serve(model: PreTrainedModel, replies: TextIO) -> None:
    """Answer batches until stdin ends."""
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        prompts = torch.tensor(job["prompts"])
        count = job["output_tokens"]
        clock = _Clock(len(prompts))
        with torch.inference_mode():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                stopping_criteria=[clock],
            )
        print(json.dumps({"steps": clock.steps}), file=replies, flush=True)


def main() -> None:
    """Keep stdout for replies: libraries that print must not break the protocol."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    model.generation_config.pad_token_id = 0
    serve(model.eval(), replies)


if __name__ == "__main__":
    main()
