"""A mode for looking at the values of index tensors before each launch: prefix sums and block lists.

Wrong ones are not noticed otherwise, as looking waits for the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from kernels_dsl.checks.options import boolean
from kernels_dsl.ops.attention.arguments import Extras, MaxSeqlens, Seqlens
from kernels_dsl.ops.attention.pages import check_table

_by_environment = os.environ.get("KERNELS_DSL_CHECK", "0") not in ("", "0")
_blocks: list[list[bool]] = []
"""A cell for each `checked` block that was entered and not left: what it asks for."""


@contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Calls of `attention` and its relatives in this block check prefix sums and block lists first.

    ValueError where prefix sums fall or leave their tensor, a sequence is longer than its `max_seqlen`,
    `seqused_k` is more than a sequence has or negative, a page of its keys does not exist, rows of q belong
    to no sequence and there is no `out` that keeps them, a block list has a count or an index out of range or
    lists a block twice, or `append_kv` is given a place outside its cache. Each such call waits for the GPU,
    so it cannot be captured in a CUDA graph. The environment variable KERNELS_DSL_CHECK=1 turns it on for a
    whole process. It holds for all threads, which follow the block that was entered last.
    """
    cell = [boolean("enabled", enabled)]
    _blocks.append(cell)
    try:
        yield
    finally:
        _blocks[:] = [other for other in _blocks if other is not cell]


def is_checked() -> bool:
    """True if values are looked at now."""
    if not _blocks:
        return _by_environment
    try:
        return _blocks[-1][0]
    except IndexError:
        return _by_environment


def check_values(extras: Extras, lengths: tuple[int, int], all_rows: bool, pages: int = 0) -> None:
    """ValueError for values in `extras` that no kernel must see. `lengths`: rows of q and of k, or keys that
    a sequence has room for in pages, of which there are `pages`.

    `all_rows`: all of q must belong to a sequence, as those that do not would come out uninitialised.
    """
    if extras.seqlens is not None:
        _check_seqlens(extras.seqlens, lengths, extras.max_seqlens or MaxSeqlens(0))
        if all_rows:
            _check_all_rows(extras.seqlens.q, lengths[0])
        if extras.seqlens.table is not None and extras.seqlens.used is not None:
            check_table(extras.seqlens.used, extras.seqlens.table, lengths[1], pages)
    if extras.blocks is not None:
        extras.blocks.check_indices(lengths[1])


def _check_all_rows(starts: torch.Tensor, rows: int) -> None:
    end = int(starts[-1])
    if end != rows:
        raise ValueError(
            f"cu_seqlens_q[-1] is {end}, must be {rows}, the rows of q, or out be given: rows that belong to "
            "no sequence are not written"
        )


def _check_seqlens(seqlens: Seqlens, lengths: tuple[int, int], longest: MaxSeqlens) -> None:
    keys: list[int] = []
    for letter, starts, length, most in zip("qk", (seqlens.q, seqlens.k), lengths, longest):
        if starts is None:  # keys lie in pages
            return
        name = f"cu_seqlens_{letter}"
        values = starts.tolist()
        if values[0] != 0:
            raise ValueError(f"{name}[0] is {values[0]}, must be 0")
        if values[-1] > length:
            raise ValueError(f"{name}[-1] is {values[-1]}, must be at most {length}, the rows of {letter}")
        keys = [end - start for start, end in pairwise(values)]
        for n, size in enumerate(keys):
            if size < 0:
                raise ValueError(
                    f"{name}[{n + 1}] is {values[n + 1]}, must be at least {values[n]}, the one before"
                )
            if most is not None and size > most:
                raise ValueError(f"max_seqlen_{letter} is {most}, must be at least {size}: sequence {n}")
    if seqlens.used is not None:
        for n, (used, size) in enumerate(zip(seqlens.used.tolist(), keys)):
            if not 0 <= used <= size:
                raise ValueError(f"seqused_k[{n}] is {used}, must be from 0 to {size}, the sequence's keys")
