"""What is counted as hidden in a schedule, and what is not."""

from __future__ import annotations

from weft.models.jax.overlap import Collective, collectives, hidden_share

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
  ROOT %copy = f32[8,4]{1,0} copy(%fusion.1)
}
"""


def test_only_what_runs_beside_a_product_is_hidden() -> None:
    found = collectives(HLO)
    assert found == [
        Collective("collective-permute", 256, 1),
        Collective("all-gather", 512, 0),
        Collective("all-reduce", 40, 0),
    ]
    assert hidden_share(found) == 256 / 808
    assert hidden_share([]) == 1.0
