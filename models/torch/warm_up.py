"""Steps with all kernels: after them, Triton compiles nothing while a server serves.

A kernel's constants depend on a step's numbers in three ways:

- Products' tiles are chosen for buckets: up to 16 rows, and up to each power of two
  (kernels/gpu/tuning). Each tile has two variants: for multiples of its rows, and for others.
  Overlapped kernels count one rank's rows.
- Attention has other tiles for few queries, and one variant for decodes alone.
- Decodes' keys are split among 1, 2, 4, ... programs, by the context. Recorded decodes keep the
  number from their recording.

`tests/models/torch/test_warm_up.py` compares their kernels with those in many other steps.
"""

from __future__ import annotations


def prompts(max_tokens: int) -> list[int]:
    """Return the lengths of prompts to compute, ascending.

    Args:
        max_tokens: maximum number of tokens in a step.
    """
    found = {2, max_tokens}
    bucket = 4
    while bucket < 2 * max_tokens:
        found |= {bucket, bucket * 3 // 4 + 1}
        bucket *= 2
    return sorted(each for each in found if each <= max_tokens)


def contexts(max_model_len: int) -> list[int]:
    """Return the contexts of single decodes to compute, ascending: powers of two, and the longest.

    Args:
        max_model_len: maximum number of tokens in a request.
    """
    powers = (1 << exponent for exponent in range(8, max_model_len.bit_length()))
    return sorted({max_model_len, *powers})
