"""Stores to all ranks at once and sums over all ranks, made by the NVLink switch (NVLink SHARP).

On a switched NVLink domain of H100s or later, a symmetric tensor has a second, multicast address.
There the tensors of all ranks lie on top of each other: a store reaches all of them, and a load
returns their sum. The switch copies and adds, so each number crosses this GPU's links once. PTX
calls this multimem (ISA 8.1, sm_90); NCCL's NVLS algorithms use it.

Both operations move 16 bytes and need addresses aligned to 16 bytes. They are relaxed at system
scope. A multicast address is an alias of other addresses, so PTX's memory model (ISA 8.6, "proxy")
orders its accesses only with a fence: `multimem_fence` stands between the stores and a `notify`,
and between a wait and the next operation. Then another rank sees a store after the `notify`, and a
sum contains what was stored before the signal. The end of a kernel is such a fence, too.

No other instruction may touch a multicast address. interpreter/extern.py defines both operations
for the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multimem_fence():
    """Order accesses to multicast addresses with those to other addresses."""
    tl.inline_asm_elementwise(
        "{ fence.proxy.alias; mov.b32 $0, $1; }",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def multimem_store(address, a, b, c, d, mask):
    """Store 16 bytes to all ranks, including this one.

    Like OpenSHMEM's broadcast of 16 bytes, without its synchronisation. NCCL: the NVLS all-gather.

    Args:
        address: int64 [n], multicast addresses, multiples of 16.
        a, b, c, d: int32 [n]; the 16 bytes.
        mask: which of the n to store.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred inside;
            setp.ne.b32 inside, $6, 0;
            @inside multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};
            mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r,r,r",
        [address, a, b, c, d, mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def multimem_sum(address, mask, dtype: tl.constexpr):
    """Sum 16 bytes over all ranks. Added in float32 and rounded once.

    The switch chooses the order, so two ranks that ask for the same sum may get different bits.
    NCCL: the NVLS reduce-scatter.

    Args:
        address: int64 [n], multicast addresses, multiples of 16.
        mask: which of the n to sum; the others are 0.
        dtype: float32, float16 or bfloat16.

    Returns:
        four int32 [n], the 16 bytes.
    """
    if dtype == tl.float32:
        words = tl.inline_asm_elementwise(
            """{
                .reg .pred inside;
                setp.ne.b32 inside, $5, 0;
                mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
                @inside multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    elif dtype == tl.float16:
        words = tl.inline_asm_elementwise(
            """{
                .reg .pred inside;
                setp.ne.b32 inside, $5, 0;
                mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
                @inside multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2
                    {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        tl.static_assert(dtype == tl.bfloat16, "multimem_sum is of float32, float16 or bfloat16")
        words = tl.inline_asm_elementwise(
            """{
                .reg .pred inside;
                setp.ne.b32 inside, $5, 0;
                mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
                @inside multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2
                    {$0, $1, $2, $3}, [$4];
            }""",
            "=&r,=&r,=&r,=&r,l,r",
            [address, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return words


@triton.jit
def load_16_bytes(x, at, mask):
    """Load four words of 4 bytes each.

    Args:
        x: int32 pointer.
        at: int32 [n]; numbers of the 16-byte units.
        mask: which of the n to load; the others are 0.

    Returns:
        four int32 [n].
    """
    places = 4 * at[:, None] + tl.arange(0, 4)[None, :]
    words = tl.load(x + places, mask=mask[:, None] & (places >= 0), other=0)
    even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d
