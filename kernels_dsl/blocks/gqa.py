"""Grouped-query attention: several query heads read the keys and values of one head."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def kv_head(head: Int32, heads_per_kv: Int32) -> Int32:
    """The KV head of a query head; consecutive query heads share one."""
    return head // heads_per_kv
