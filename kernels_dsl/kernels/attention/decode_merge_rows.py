"""The results of splits become one as in `decode_merge`, where rows are many: a thread has a vector of a row.

It adds the splits as groups of threads do there, so the bits are the same. Nobody waits for another thread.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.hw.dsl import entry_name

from .decode_last import NARROW, RowParts, merge_vector
from .decode_merge import THREADS, VECTOR, MergeWork, find_row, wait_with
from .decode_spec import Spec


@entry_name("attention_decode_merge_rows")
@cute.kernel
def merge_rows_kernel(spec: Spec, work: MergeWork, rows: Int32, early: cutlass.Constexpr):
    """Device side: the vectors of this CTA, of `rows` rows."""
    vectors = cutlass.const_expr(spec.config.dim // VECTOR)
    number = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    row = find_row(spec, work, cutlass.min(number // vectors, rows - 1))
    if cutlass.const_expr(early):
        wait_with(row)
    if number < rows * vectors:
        at = (row.sequence, row.query, row.head)
        merge_vector(spec, work, RowParts(at, row.part, row.step, row.splits, number % vectors), NARROW)
