"""The network to train: a small Qwen3 or Qwen3-MoE, in plain torch.

Its forward pass equals `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` in `transformers`. This compact
module trains faster on a CPU, because one parameter holds all experts of a layer. Batches are
padded on the right, so the causal mask alone hides padding.

Does not handle: a KV cache, dropout, biases, sliding windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Shape:
    """Dimensions of the network; with `experts == 0`, a dense MLP has the width `intermediate`."""

    vocab: int = 1536
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    experts: int = 0
    experts_per_token: int = 2
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


def rope_table(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for the rotary embedding, [length, head_dim] each."""
    inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [batch, heads, length, head_dim], halves convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size] -> the same shape, float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with a norm on each query and key head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RmsNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RmsNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within x [batch, length, hidden] -> the same shape."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Mlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the MLP to x [batch, length, hidden] -> the same shape, and a zero balance loss."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out, x.new_zeros(())


class MoeMlp(nn.Module):
    """A mixture of SwiGLU experts: `experts_per_token` for each token, and no token is dropped."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide = (shape.experts, shape.intermediate, shape.hidden)
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(wide))
        self.up_proj = nn.Parameter(torch.empty(wide))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.intermediate))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route x [batch, length, hidden] -> the same shape, and the balance loss, 1 if uniform."""
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(tokens.float(), self.gate.weight).softmax(-1)
        weight, expert = scores.topk(self.shape.experts_per_token, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        source = order // self.shape.experts_per_token
        counts = expert.flatten().bincount(minlength=self.shape.experts)
        parts = torch.split(tokens[source], counts.tolist())
        weights = zip(
            parts,
            self.gate_proj.unbind(),
            self.up_proj.unbind(),
            self.down_proj.unbind(),
            strict=True,
        )
        outs = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in weights
        ]
        scaled = torch.cat(outs).float() * weight.flatten()[order, None]
        out = torch.zeros_like(tokens, dtype=torch.float32).index_add(0, source, scaled)
        # Switch Transformer's loss: experts * sum(fraction of tokens * mean probability).
        balance = self.shape.experts * (counts / counts.sum() * scores.mean(0)).sum()
        return out.view(x.shape), balance


class Layer(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.mlp = MoeMlp(shape) if shape.experts else Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Transform x [batch, length, hidden] -> the same shape, and the balance loss."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + out, balance


class Body(nn.Module):
    """Everything below the language-model head; checkpoints call it `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_eps)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Transform ids [batch, length] -> states [batch, length, hidden], mean balance loss."""
        cos, sin = rope_table(ids.shape[1], self.shape)
        x, balances = self.embed_tokens(ids), []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()


class Network(nn.Module):
    """A causal language model with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # The two projections that write to the residual stream start at zero.
                last = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                nn.init.normal_(parameter, std=0.0 if last else parameter.shape[-1] ** -0.5)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)

    def loss(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return summed cross-entropy at targets [batch, length] (-100: none), and balance loss."""
        states, balance = self.model(ids)
        chosen = targets != -100
        logits = F.linear(states[chosen], self.model.embed_tokens.weight)
        return F.cross_entropy(logits.float(), targets[chosen], reduction="sum"), balance

    def last_answers(self, ids: Tensor, targets: Tensor) -> int:
        """Count rows that predict every target in their last run of targets."""
        states, _ = self.model(ids)
        likeliest = F.linear(states, self.model.embed_tokens.weight).argmax(-1)
        wrong = (likeliest != targets) & (targets != -100)
        # The last answer is at the positions after the last gap between targets.
        place = torch.arange(ids.shape[1])
        end = torch.where(targets != -100, place, -1).amax(1, keepdim=True)
        gap = torch.where((targets == -100) & (place < end), place, -1).amax(1, keepdim=True)
        return int((~(wrong & (place > gap)).any(1)).sum())
