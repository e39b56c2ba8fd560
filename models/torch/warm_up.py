"""Steps with all kernels: after them, Triton compiles nothing while a server serves.

A kernel's constants depend on a step's numbers in three ways:

- Products' tiles are chosen for buckets: up to 16 rows, and up to each power of two
  (kernels/gpu/tuning). Each tile has two variants: for multiples of its rows, and for others.
  Overlapped kernels count one rank's rows.
- Attention has other tiles for few queries, and one variant for decodes alone.
- Decodes' keys are split among 1, 2, 4, ... programs, by the context and the number of requests.
  Recorded decodes keep the number from their recording.

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


def decodes(max_requests: int, max_model_len: int) -> list[tuple[int, int]]:
    """Return the numbers of requests with one token each, and their contexts, to compute.

    Args:
        max_requests: maximum number of requests in a step.
        max_model_len: maximum number of tokens in a request.
    """
    lengths = {max_model_len, *(1 << n for n in range(8, max_model_len.bit_length()))}
    requests = {1 << n for n in range(max_requests.bit_length())}
    alone = [(1, length) for length in sorted(lengths)]
    return alone + [(number, max_model_len) for number in sorted(requests - {1})]
