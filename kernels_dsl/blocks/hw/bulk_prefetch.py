"""Bulk requests of global memory to L2."""

from cutlass import Int32, Int64
from cutlass.cutlass_dsl import dsl_user_op

from kernels_dsl.blocks.hw.dsl import inline_ptx


@dsl_user_op
def prefetch_to_l2(address: Int64, count: Int32, *, loc=None, ip=None) -> None:
    """Asks L2 for `count` bytes from `address` on, both multiples of 16. Nothing waits for them (sm_90)."""
    text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
    inline_ptx(None, (Int64(address), Int32(count)), text, "l,r", effects=True, loc=loc, ip=ip)
