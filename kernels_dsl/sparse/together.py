"""Products of block rows that share tiles: the lists of what any of them keeps, and a call's three launches.

The values are packed into blocks of 64 rows, with zeros for what a row does not keep. Where the dense matrix
is not finite these zeros make NaN of sums that may be numbers. The product notes it, on the GPU, and the
launch behind it, of each row for itself, does nothing where all sums were finite. So nothing waits, and NaN
stays where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import lowering
from kernels_dsl.sparse.lists import Lists
from lowering.records import frozen

PACK = lowering.jit("kernels_dsl.kernels.bsr.together:pack_together", name="bsr_pack_together")
WORDS = 2
"""Counters of a call: of work items, and the word that says that a sum is NaN."""


@frozen
class Together:
    """Some lists each taken for one: its `lists`, of entries that any of them has, and `kept` (rows, nnz),
    int32, what each has of an entry among the values, or nnz."""

    lists: Lists
    kept: torch.Tensor


def packed_block(block: tuple[int, int], rows: int, transposed: bool) -> tuple[int, int]:
    """Extents of a packed block of so many stored ones: along K, and along D's blocked mode."""
    return (block[0], block[1] * rows) if transposed else (block[1], block[0] * rows)


class Launches(NamedTuple):
    """Launches of a call in their order: packing, the product of rows together, that of each for itself."""

    pack: Callable[..., None]
    together: Callable[..., None]
    alone: Callable[..., None]


class Steps(NamedTuple):
    """Steps from a call's tensors to those of the launches, or None, and the maker of D."""

    values: Callable[[torch.Tensor], torch.Tensor] | None
    dense: Callable[[torch.Tensor], torch.Tensor] | None
    make_out: Callable[[], torch.Tensor]


class Packed(NamedTuple):
    """Vectors of lists that the two products take."""

    rows: Together
    together: torch.Tensor
    alone: torch.Tensor


def runner(
    launches: Launches,
    block: tuple[int, int],
    make_lists: Callable[[], Packed],
    counters: Callable[[], torch.Tensor],
    steps: Steps,
    max_ctas: int,
) -> Callable[..., torch.Tensor]:
    """`run(values, dense, out, operands)` of a plan. `block`: a packed one. `make_lists` is called once."""
    make: Callable[[], Packed] | None = make_lists
    lists: Packed | None = None

    def run(values: torch.Tensor, dense: torch.Tensor, out: Any, operands: Any) -> torch.Tensor:
        nonlocal lists, make
        if lists is None:
            assert make is not None
            lists, make = make(), None  # it holds the pattern, which holds the plan
        if out is None:
            out = steps.make_out()
        if steps.values is not None:
            values = steps.values(values)
        if steps.dense is not None:
            dense = steps.dense(dense)
        rows, words = lists.rows, counters()
        packed = values.new_empty(*values.shape[:-2], *block)
        launches.pack(values, rows.lists.first, rows.kept, packed, words)
        launches.together(packed, dense, out, lists.together, words, None, operands, max_ctas)
        launches.alone(values, dense, out, lists.alone, words, None, operands, max_ctas)
        return out

    return run
