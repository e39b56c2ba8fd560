"""The memory ledger: what a model will take, computed before loading.

    weights        988.1 MiB
    activations    372.4 MiB  a step of 2048 tokens, 128 requests
    KV cache         2.25 GiB  12,288 blocks of 16 tokens: 196,608 tokens
    in all           3.59 GiB  of the 8.42 GiB that weft may take

Triton kernels can add two rows. `buffers` is symmetric memory for the overlapped ops' workspaces.
`CUDA graphs` is memory for the temporary tensors of recorded steps.

Weights are exact except for padding. On a CPU, loading may find that they take less: by lossless
compression, or because an embedding stays in the file. The KV cache then gets that memory, too.
`tests/models/memory/test_measured.py` compares the ledger with a process's memory.

Activations are the largest set of tensors that a step holds
at once, computed from their shapes. The KV cache gets the rest, but never more than all requests
can use at full length. If one request at full length does not fit, the error lists flags with
values that fit.

Not counted: the interpreter and its libraries (they are loaded already, so they are not in the free
memory), file pages that the system can drop, and the layer being loaded (the KV cache's memory is
still unused then).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Ledger:
    """How the memory is divided. Sizes are in bytes.

    Attributes:
        budget: total memory for weft.
        weights: the model's weights.
        activations: temporary tensors in the largest step.
        buffers: symmetric memory, through which ranks exchange data inside their products.
        graphs: temporary tensors of steps recorded as CUDA graphs.
        kv_cache: `num_blocks` x the bytes of one block.
        num_blocks: blocks in the KV cache.
        block_size: tokens in a block, over all ranks that share it.
        max_num_batched_tokens, max_num_seqs: the step that `activations` assumes.
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
        """Return the ledger with fewer blocks: the number that fits on the fullest rank."""
        return replace(
            self, num_blocks=num_blocks, kv_cache=self.kv_cache // self.num_blocks * num_blocks
        )

    @property
    def left(self) -> int:
        """The bytes that remain unused."""
        return (
            self.budget
            - (self.weights + self.activations + self.buffers + self.graphs)
            - self.kv_cache
        )

    @property
    def limited_by_memory(self) -> bool:
        """True if one more block would not fit."""
        return self.left < self.kv_cache // self.num_blocks

    @property
    def tokens(self) -> int:
        """Tokens that fit into the KV cache, for all requests together."""
        return self.num_blocks * self.block_size

    def render(self) -> str:
        """Render the table, aligned, without a newline at its end."""
        step = f"a step of {self.max_num_batched_tokens} tokens, {self.max_num_seqs} requests"
        blocks = f"{self.num_blocks:,} blocks of {self.block_size} tokens: {self.tokens:,} tokens"
        allowed = human_bytes(self.budget)
        rows = (
            ("weights", self.weights, ""),
            ("activations", self.activations, step),
            ("buffers", self.buffers, "for exchanges between ranks"),
            ("CUDA graphs", self.graphs, "recorded steps"),
            ("KV cache", self.kv_cache, blocks),
            ("in all", self.budget - self.left, f"of the {allowed} that weft may take"),
        )
        return "\n".join(
            f"{name:<12}{human_bytes(size):>10}  {note}".rstrip()
            for name, size, note in rows
            if size or name not in ("buffers", "CUDA graphs")
        )


def human_bytes(size: int) -> str:
    """Format a size as `12 bytes`, `12.0 KiB`, `942.3 MiB` or `5.21 GiB`."""
    if size < KIB:
        return f"{size} bytes"
    if size < MIB:
        return f"{size / KIB:.1f} KiB"
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
