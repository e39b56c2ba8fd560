"""A step without CUDA graphs, and a step of transformers, over weft's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness.report import Case, Figure
from harness.timing import Times, ratio

from model.model import Scale
from model.steps import alone, steps_of, time_of


def graphs(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Steps without CUDA graphs over those with them."""
    for users in scale.users:
        yield Case(f"{users} users", partial(_graphs, scale, users, repetitions))


def _graphs(scale: Scale, users: int, repetitions: int) -> Figure:
    times: dict[bool, Times] = {}
    for recorded in (False, True):
        runner = alone(scale, users, graph_sizes=None if recorded else ())
        times[recorded] = time_of(scale, repetitions, steps_of(scale, runner, users))
        runner.close()
    details = {"ms with": 1e3 * times[True].median, "ms without": 1e3 * times[False].median}
    return Figure(*ratio(times[False], times[True]), details=details)


def peer(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Tokens a second over those of transformers."""
    for users in scale.users:
        yield Case(f"{users} users", partial(_peer, scale, users, repetitions))


def _peer(scale: Scale, users: int, repetitions: int) -> Figure:
    runner = alone(scale, users)
    ours = time_of(scale, repetitions, steps_of(scale, runner, users))
    runner.close()
    del runner
    if not scale.tiny:
        torch.cuda.empty_cache()
    theirs = time_of(scale, repetitions, _their_steps(scale, users))
    rates = {"tokens/s": users / ours.median, "transformers'": users / theirs.median}
    return Figure(*ratio(theirs, ours), details=rates)


def _their_steps(scale: Scale, users: int) -> Callable[[], object]:
    """Steps of transformers' model, each user's last token again and again, as of ours."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    left_out = ("architectures", "model_type", "torch_dtype")
    config = LlamaConfig(**{k: v for k, v in scale.config.items() if k not in left_out})
    dtype: torch.dtype = getattr(torch, scale.dtype)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(scale.device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
    before = torch.ones(users, scale.context - 1, dtype=torch.int64, device=scale.device)
    with torch.inference_mode():
        cache = DynamicCache()
        some = 1 if scale.tiny else 256  # tokens of each user at a time
        for start in range(0, scale.context - 1, some):
            model(before[:, start : start + some], past_key_values=cache, logits_to_keep=1)
    tokens = before[:, :1]

    @torch.inference_mode()
    def step() -> object:
        nonlocal tokens
        logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
        tokens = logits[:, -1:].argmax(-1)
        result = tokens.cpu()  # as a server has to know them
        cache.crop(-1)  # and the next step begins as this one did
        return result

    return step
