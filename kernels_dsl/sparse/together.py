"""Products of block rows that share tiles: the lists of what any of them keeps, and a call's three launches.

The values are packed into blocks of 64 rows, with zeros for what a row does not keep. Where the dense matrix
is not finite these zeros make NaN of sums that may be numbers. The product notes it, on the GPU, and the
launch behind it, of each row for itself, does nothing where all sums were finite. So nothing waits, and NaN
stays where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import lowering
from kernels_dsl.config.bsr import NanRule, Sm90BsrConfig
from kernels_dsl.sparse.lists import Lists
from lowering.records import frozen

if TYPE_CHECKING:
    from kernels_dsl.sparse.pattern import Pattern

PACK = lowering.jit("kernels_dsl.kernels.bsr.together:pack_together", name="bsr_pack_together")
WORDS = 2
"""Counters of a call: of work items, and the word that says that a sum is NaN."""


@frozen
class Together:
    """Some lists each taken for one: its `lists`, of entries that any of them has, and `kept` (rows, nnz),
    int32, what each has of an entry among the values, or nnz."""

    lists: Lists
    kept: torch.Tensor


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


class Vectors(NamedTuple):
    """Vectors of lists that the two products take, and the joined rows."""

    rows: Together
    together: torch.Tensor
    alone: torch.Tensor


@frozen
class Joined:
    """A plan's product with rows together: its `config`; the kernel's `choices` (its constexprs)
    with each row for itself; `alone`, which makes the lists of that."""

    config: Sm90BsrConfig
    choices: dict[str, Any]
    pattern: Pattern
    alone: Callable[[], torch.Tensor]

    @property
    def block(self) -> tuple[int, int]:
        """Extents of a packed block: along K, and along D's blocked mode."""
        block, rows = self.choices["layout"].block, self.config.rows_together
        return (block[0], block[1] * rows) if self.transposed else (block[1], block[0] * rows)

    @property
    def transposed(self) -> bool:
        """True if lists are those of block columns."""
        found: bool = self.choices["layout"].transposed
        return found

    def launches(self, launch: Callable[..., Callable[..., None]], product: lowering.JitFunction) -> Launches:
        """The launches; `launch` makes one of a function and its constexprs."""
        layout = self.choices["layout"]
        together = replace(layout, block=self.block, transposed=True, nans=NanRule.TELL)
        return Launches(
            launch(PACK, {"transposed": self.transposed}),
            launch(product, self.choices | {"config": self.config, "layout": together}),
            launch(product, self.choices | {"layout": replace(layout, nans=NanRule.REDO)}),
        )

    def vectors(self) -> Vectors:
        """The lists, which are made at a plan's first run."""
        rows = self.pattern.together(self.config.rows_together, self.transposed)
        lists = rows.lists
        return Vectors(rows, lists.in_pairs if self.config.pairs else lists.packed, self.alone())


def runner(
    joined: Joined, launches: Launches, counters: Callable[[], Any], steps: Steps, max_ctas: int
) -> Callable[..., torch.Tensor]:
    """`run(values, dense, out, operands)` of a plan. `counters`: gives WORDS of them, 0, and more."""
    block, make = joined.block, [joined.vectors]  # which holds the pattern, which holds the plan
    lists: Vectors | None = None

    def run(values: torch.Tensor, dense: torch.Tensor, out: Any, operands: Any) -> torch.Tensor:
        nonlocal lists
        if lists is None:
            lists = make[0]()
            make.clear()
        if out is None:
            out = steps.make_out()
        if steps.values is not None:
            values = steps.values(values)
        if steps.dense is not None:
            dense = steps.dense(dense)
        rows, (words, _) = lists.rows, counters()
        packed = values.new_empty(*values.shape[:-2], *block)
        launches.pack(values, rows.lists.first, rows.kept, packed, words)
        launches.together(packed, dense, out, lists.together, words, None, operands, max_ctas)
        launches.alone(values, dense, out, lists.alone, words, None, operands, max_ctas)
        return out

    return run
