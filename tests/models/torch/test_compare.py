"""Perplexity and divergence are those of transformers' log probabilities."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from transformers import AutoModelForCausalLM

from weft.models.torch.compare import Comparison, compare


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "granite"])
def test_numbers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """The copy has other norms in its layers, but the same final norm and LM head."""
    paths = [make_checkpoint(tmp_path / name, family) for name in ("original", "copy")]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths]
    with torch.no_grad():
        for name, parameter in models[1].named_parameters():
            if ".layers." in name:
                parameter *= 1.1
    models[1].save_pretrained(paths[1])
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in (100, 70, 1)]
    told: list[int] = []
    actual = compare(*paths, windows, told.append)
    logs = []
    for window in windows:
        with torch.no_grad():
            logits = [model.eval()(torch.tensor([window])).logits[0, :-1] for model in models]
        p, q = (each.log_softmax(-1) for each in logits)
        following = torch.tensor(window[1:], dtype=torch.int64)[:, None]
        divergence = (p.exp() * (p - q)).sum(-1, keepdim=True)
        logs.append(torch.cat([p.gather(1, following), q.gather(1, following), divergence], dim=1))
    before, after, divergence = torch.cat(logs).mean(0).tolist()
    expected = Comparison(168, math.exp(-before), math.exp(-after), divergence)
    assert actual.tokens == expected.tokens
    assert actual.before == pytest.approx(expected.before, rel=1e-3)
    assert actual.after == pytest.approx(expected.after, rel=1e-3)
    assert actual.divergence == pytest.approx(expected.divergence, rel=1e-3)
    assert actual.divergence > 1e-4
    assert told == [100, 70, 1] * 2


def test_a_model_does_not_differ_from_itself(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    same = compare(path, path, [list(range(3, 90))], lambda tokens: None)
    assert (same.before, same.divergence) == (same.after, 0.0)
