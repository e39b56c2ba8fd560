"""Which bytes count as hidden in a schedule."""

from __future__ import annotations

from weft.models.jax.overlap import Collective, collectives, hidden_share, mosaic_kernels

HLO = """
%fused_dot (a: bf16[8,16], b: bf16[16,4]) -> f32[8,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_add (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%c, %c)
}

ENTRY %main (p: bf16[8,16]) -> f32[8,4] {
  %p = bf16[8,16]{1,0} parameter(0)
  %cp-start = (bf16[8,16]{1,0}, bf16[8,16]{1,0}) collective-permute-start(%p), channel_id=1
  %fusion.1 = f32[8,4]{1,0} fusion(%p, %p), kind=kOutput, calls=%fused_dot
  %cp-done = bf16[8,16]{1,0} collective-permute-done(%cp-start)
  %ag-start = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%p), channel_id=2
  %fusion.2 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_add
  %ag-done = bf16[16,16]{1,0} all-gather-done(%ag-start)
  %ar = (f32[8]{0}, s32[2]{0}) all-reduce(%fusion.2, %p), channel_id=3
@KERNELS@
  ROOT %copy = f32[8,4]{1,0} copy(%fusion.1)
}
"""

CALL = (
    '  %{} = bf16[4,16] custom-call(%p), custom_call_target="{}", meta={{\n}}, backend_config={}\n'
)
SENT = '{{"flops":"9","remote_bytes_transferred":"{}"}}'
KERNELS = "".join(
    (
        CALL.format("matmul_reduce_scatter.2", "tpu_custom_call", SENT.format(4000)),
        CALL.format("moe_exchange.1", "tpu_custom_call", SENT.format(700)),
        CALL.format("write_pages", "tpu_custom_call", SENT.format(0)),
        CALL.format("custom-call.7", "ConcatBitcast", "{}"),
        CALL.format("write_pages.4", "tpu_custom_call", SENT.format(0)),
    )
)
HLO = HLO.replace("@KERNELS@\n", KERNELS)


def test_only_what_runs_beside_a_product_is_hidden() -> None:
    found = collectives(HLO)
    assert found == [
        Collective("collective-permute", 256, 1),
        Collective("all-gather", 512, 0),
        Collective("all-reduce", 40, 0),
        Collective("matmul_reduce_scatter", 4000, 1),
        Collective("moe_exchange", 700, 0),
    ]
    assert hidden_share(found) == 4256 / 5508
    assert hidden_share([]) == 1.0


def test_kernels_are_counted_by_name() -> None:
    assert mosaic_kernels(HLO) == {"matmul_reduce_scatter": 1, "moe_exchange": 1, "write_pages": 2}
