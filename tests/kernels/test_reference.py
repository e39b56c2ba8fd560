"""The oracles, against torch and transformers."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from weft.kernels import reference


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 24), torch.randn(24)
    torch.testing.assert_close(
        reference.rms_norm(x, weight, 1e-6), functional.rms_norm(x, (24,), weight, 1e-6)
    )


def test_rope_is_that_of_transformers() -> None:
    x, positions = torch.randn(6, 3, 8), torch.tensor([0, 1, 2, 900, 7, 7])
    inv_freq = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    angles = positions[:, None] * inv_freq
    angles = torch.cat([angles, angles], dim=-1)[None]
    heads_first = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, angles.cos(), angles.sin())
    torch.testing.assert_close(
        reference.rope(x, positions, inv_freq), expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5
    )


def test_attention_of_one_request_in_order_is_causal_attention() -> None:
    tokens, heads, kv_heads, dim, block_size = 13, 6, 2, 8, 4
    q, k, v = (torch.randn(tokens, h, dim) for h in (heads, kv_heads, kv_heads))
    padded = [functional.pad(x, (0, 0, 0, 0, 0, 3)) for x in (k, v)]
    keys, values = (x.view(4, block_size, kv_heads, dim).transpose(1, 2) for x in padded)
    got = reference.paged_attention(
        q, keys, values, [0, tokens], [tokens], [[0, 1, 2, 3]], scale=0.3
    )
    expected = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got, expected.transpose(0, 1))


def test_moe_with_one_expert_is_an_mlp() -> None:
    x, gate, up, down = (
        torch.randn(shape) for shape in ((5, 8), (1, 12, 8), (1, 12, 8), (1, 8, 12))
    )
    got = reference.moe(x, gate, up, down, torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
    expected = (functional.silu(x @ gate[0].T) * (x @ up[0].T)) @ down[0].T
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # sums that cancel


def test_sampling_distribution() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    cases = (
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.45}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
    )
    for settings, expected in cases:
        got = reference.sampling_distribution(logits, **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(got, torch.tensor(expected).double(), msg=str(settings))
