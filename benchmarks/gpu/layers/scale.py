"""How large everything is, on a GPU and in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.gpu.attention.tile import Tile


class Batch(NamedTuple):
    """A step's requests, all alike.

    Attributes:
        queries, context: of each request; its context includes them.
        fp8: keys and values are e4m3.
    """

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    requests: int
    queries: int
    context: int
    fp8: bool = False

    def __str__(self) -> str:
        step = f"{self.requests} x {self.queries} queries, {self.context} tokens"
        return f"{self.model} {step}{', fp8' if self.fp8 else ''}"


class Experts(NamedTuple):
    """A product of the experts that a rank has.

    Attributes:
        experts: of the rank.
        n, k: of each expert's weight.
        rows: of all of them together.
        even: as many rows for each; else all for one.
    """

    model: str
    experts: int
    n: int
    k: int
    rows: int
    even: bool

    def __str__(self) -> str:
        routing = "even" if self.even else "all to one"
        return f"{self.model} {self.experts} x {self.n} x {self.k}, {self.rows} rows, {routing}"


class Exchange(NamedTuple):
    """One layer's exchange: tokens of a rank, of so many numbers, each for top_k of the experts."""

    model: str
    tokens: int
    width: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.model} {self.tokens} tokens x {self.width}, {self.top_k} of {self.experts}"


class Rows(NamedTuple):
    """Rows of a layer, and of the heads that its attention has."""

    rows: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is.

    Attributes:
        device, dtype: of the tensors.
        page: tokens in a block of the cache.
        product: m, n and k of the product whose rate is the tensor cores'.
        decodes, prefills, latents, sequences, products, exchanges, rows: that are timed. Of latents
            head_dim is their width; of sequences queries are those of all ranks.
        decode_tiles, prefill_tiles, latent_tiles, splits, blocks: that are tried besides the op's
            own; blocks with warps and stages, of the experts' products.
        logits: rows and columns of draws; top_k, of which some keep so many.
        sorted: tokens, experts of each, and experts of sort_by_expert.
        world: ranks of `exchange` and `sequence`.
        gpus: numbers of ranks of `nccl`.
    """

    tiny: bool
    device: str
    dtype: torch.dtype
    page: int
    product: tuple[int, int, int]
    decodes: tuple[Batch, ...]
    prefills: tuple[Batch, ...]
    latents: tuple[Batch, ...]
    sequences: tuple[Batch, ...]
    decode_tiles: tuple[Tile, ...]
    prefill_tiles: tuple[Tile, ...]
    latent_tiles: tuple[Tile, ...]
    splits: tuple[int, ...]
    products: tuple[Experts, ...]
    blocks: tuple[tuple[tuple[int, int, int], int, int], ...]
    exchanges: tuple[Exchange, ...]
    world: int
    gpus: tuple[int, ...]
    rows: tuple[Rows, ...]
    logits: tuple[tuple[int, int], ...]
    top_k: int
    sorted: tuple[int, int, int]

    def random(self, *shape: int) -> Tensor:
        """Not zeros: a GPU is faster on those."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    @property
    def processors(self) -> int:
        """That one rank may fill."""
        return 2 if self.tiny else torch.cuda.get_device_properties(0).multi_processor_count


def _of_model(
    model: str, experts: int, hidden: int, inner: int, tokens: tuple[int, ...]
) -> list[Experts]:
    """Both products, with 8 experts for each of so many tokens."""
    return [
        Experts(f"{model} {name}", experts, n, k, 8 * count, even)
        for name, n, k in (("gate, up", 2 * inner, hidden), ("down", hidden, inner))
        for count in tokens
        for even in (True, False)
    ]


LLAMA, QWEN = ("Llama-8B", 32, 8, 128), ("Qwen3-30B-A3B", 32, 4, 128)
DEEPSEEK = ("DeepSeek-V3", 128, 1, 576)


def full() -> Scale:
    """For the GPU that this process has."""
    return Scale(
        tiny=False,
        device="cuda:0",
        dtype=torch.bfloat16,
        page=16,
        product=(8192, 8192, 8192),
        decodes=(
            Batch(*LLAMA, 1, 1, 131072),
            Batch(*LLAMA, 16, 1, 8192),
            Batch(*LLAMA, 128, 1, 4096),
            Batch(*QWEN, 64, 1, 8192),
            Batch(*QWEN, 64, 1, 8192, fp8=True),
        ),
        prefills=(
            Batch(*LLAMA, 1, 8192, 8192),
            Batch(*LLAMA, 8, 1024, 1024),
            Batch(*QWEN, 1, 2048, 32768),
        ),
        latents=(
            Batch(*DEEPSEEK, 1, 1, 131072),
            Batch(*DEEPSEEK, 64, 1, 8192),
            Batch(*DEEPSEEK, 64, 1, 8192, fp8=True),
            Batch("DeepSeek-V3, 1 of 8 ranks", 16, 1, 576, 64, 1, 8192),
        ),
        sequences=(Batch(*LLAMA, 1, 32768, 32768), Batch(*LLAMA, 1, 131072, 131072)),
        decode_tiles=(
            *(Tile(16, n, 4, 3) for n in (32, 128)),
            *(Tile(16, 64, warps, stages) for warps, stages in ((2, 3), (4, 2), (4, 4))),
        ),
        prefill_tiles=(
            Tile(128, 64, 4, 3),
            Tile(128, 64, 8, 2),
            Tile(128, 128, 8, 2),
            Tile(128, 128, 8, 3),
            Tile(64, 64, 4, 3),
        ),
        latent_tiles=(Tile(16, 16, 4, 2), Tile(16, 32, 4, 2), Tile(64, 16, 8, 1)),
        splits=(4, 8, 16, 32, 64),
        products=(
            *_of_model("Qwen3-30B-A3B", 128, 2048, 768, (64, 8192)),
            *_of_model("DeepSeek-V3, 1 of 8 ranks", 32, 7168, 2048, (64, 8192)),
        ),
        blocks=(
            ((128, 128, 64), 8, 3),
            ((128, 128, 64), 8, 4),
            ((128, 256, 64), 8, 3),
            ((64, 128, 64), 4, 4),
            ((16, 128, 128), 4, 4),
        ),
        exchanges=tuple(
            Exchange("DeepSeek-V3", tokens, 7168, 256, 8) for tokens in (1, 16, 128, 256)
        ),
        world=8,
        gpus=(2, 4, 8),
        rows=(Rows(4096, 4096, 32, 8, 128), Rows(16384, 8192, 64, 8, 128)),
        logits=((1, 151936), (8, 151936), (64, 151936)),
        top_k=50,
        sorted=(8192, 8, 128),
    )


TINY = Scale(
    tiny=True,
    device="cpu",
    dtype=torch.float32,
    page=4,
    product=(16, 16, 16),
    decodes=(Batch("tiny", 4, 2, 16, 2, 1, 21), Batch("tiny", 4, 2, 16, 1, 1, 40, fp8=True)),
    prefills=(Batch("tiny", 4, 2, 16, 2, 9, 9), Batch("tiny", 4, 2, 16, 1, 5, 20)),
    latents=(Batch("tiny", 4, 1, 18, 2, 1, 21), Batch("tiny", 4, 1, 18, 1, 1, 21, fp8=True)),
    sequences=(Batch("tiny", 4, 2, 16, 1, 24, 24),),
    decode_tiles=(Tile(16, 32, 4, 2),),
    prefill_tiles=(Tile(32, 16, 4, 2),),
    latent_tiles=(Tile(16, 32, 4, 2),),
    splits=(2,),
    products=(Experts("tiny", 3, 32, 16, 24, True), Experts("tiny", 3, 32, 16, 24, False)),
    blocks=(((16, 16, 16), 4, 2),),
    exchanges=(Exchange("tiny", 5, 16, 4, 2),),
    world=2,
    gpus=(2,),
    rows=(Rows(6, 64, 4, 2, 16),),
    logits=((2, 100),),
    top_k=5,
    sorted=(16, 2, 4),
)
