"""The memory ledger: what a model will take, worked out before anything is loaded.

    weights        988.1 MiB
    activations    372.4 MiB  a step of 2048 tokens, 128 requests
    KV cache         2.25 GiB  12,288 blocks of 16 tokens: 196,608 tokens
    left             4.83 GiB  of the 8.42 GiB that weft may take

On Triton kernels there are up to two rows more: `buffers`, the symmetric memory of the
overlapped ops' workspaces, and `CUDA graphs`, the temporary tensors of recorded steps.

Weights are exact but for padding. Activations are the largest tensors that a
step holds at once, from the shapes. The KV cache gets what is left, but no
more than all requests at full length can use. When a request of full length
does not fit, the error names flags with values that fit.

Not counted: the interpreter and its libraries (they are loaded already, and
so are not in the free memory), file pages that the system can take back, and
the layer in hand while loading (the KV cache's memory is not used yet then).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the memory goes. Sizes are in bytes.

    Attributes:
        budget: what weft may take in all.
        weights: of the model.
        activations: temporary tensors of the largest step.
        buffers: in which ranks exchange numbers inside their products.
        graphs: temporary tensors of steps that are recorded as CUDA graphs.
        kv_cache: `num_blocks` x bytes of a block.
        num_blocks: of the KV cache.
        block_size: tokens in a block, of all ranks that have some of them.
        max_num_batched_tokens, max_num_seqs: the step that `activations` is for.
    """

    budget: int
    weights: int
    activations: int
    kv_cache: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    buffers: int = 0
    graphs: int = 0

    def with_blocks(self, num_blocks: int) -> Ledger:
        """With fewer blocks in the KV cache: as many as the rank with least room has."""
        return replace(
            self, num_blocks=num_blocks, kv_cache=self.kv_cache // self.num_blocks * num_blocks
        )

    @property
    def left(self) -> int:
        """What stays unused of the budget."""
        return (
            self.budget
            - (self.weights + self.activations + self.buffers + self.graphs)
            - self.kv_cache
        )

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds, of all requests together."""
        return self.num_blocks * self.block_size

    def render(self) -> str:
        """The table, aligned, without a newline at its end."""
        step = f"a step of {self.max_num_batched_tokens} tokens, {self.max_num_seqs} requests"
        blocks = f"{self.num_blocks:,} blocks of {self.block_size} tokens: {self.tokens:,} tokens"
        rows = (
            ("weights", self.weights, ""),
            ("activations", self.activations, step),
            ("buffers", self.buffers, "in which ranks exchange numbers"),
            ("CUDA graphs", self.graphs, "of recorded steps"),
            ("KV cache", self.kv_cache, blocks),
            ("left", self.left, f"of the {human_bytes(self.budget)} that weft may take"),
        )
        return "\n".join(
            f"{name:<12}{human_bytes(size):>10}  {note}".rstrip()
            for name, size, note in rows
            if size or name not in ("buffers", "CUDA graphs")
        )


def human_bytes(size: int) -> str:
    """`12.0 KiB`, `942.3 MiB` or `5.21 GiB`."""
    if size < MIB:
        return f"{size / KIB:.1f} KiB"
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
