"""Attention over the keys of several ranks: launches, the merge of their results, sums of their gradients.

Results are merged by their log-sum-exps, in float32 and in the order in which they were computed, which is
the same in each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kernels_dsl.distributed.launches import KeysValues, Needed, Options, launch, launch_backward
from kernels_dsl.distributed.parts import Part, Rows, states_of
from kernels_dsl.ops.attention.backward import Forward
from kernels_dsl.ops.serving.merge_operation import Merged
from kernels_dsl.ops.serving.merge_states import merge_states

MOST_STATES = 4
"""Results that wait for being merged: a rank's memory does not grow with the number of ranks."""


class States:
    """The output and the log-sum-exp of a rank's queries, from one launch after another."""

    def __init__(self, q: torch.Tensor, dim_v: int, options: Options, count: int) -> None:
        """count: the states that will be added."""
        batch, rows, heads, _ = q.shape
        slots = max(1, min(count, MOST_STATES))
        self._q, self._options, self._count, self._left = q, options, count, count
        self._out = q.new_empty((slots, batch, rows, heads, dim_v))
        self._lse = q.new_empty((slots, batch, heads, rows), dtype=torch.float32)
        self._used = 0
        self._sum: Merged | None = None
        if count == 0:  # no key at all
            self._out.zero_()
            self._lse.fill_(-math.inf)

    def add(self, parts: Sequence[Part], found: KeysValues) -> None:
        """The results for parts whose rows of keys are those of `found`."""
        for state in states_of(parts):
            out, lse = self._out[self._used], self._lse[self._used]
            if any(part.q != Rows(0, out.shape[1]) for part in state):
                lse.fill_(-math.inf)
                if self._count == 1:  # no merge
                    out.zero_()
            for part in state:
                q, part_out = self._q[:, part.q.slice], out[:, part.q.slice]
                lse[:, :, part.q.slice] = launch(self._options, part, q, found.rows(part.k), part_out)
            self._used, self._left = self._used + 1, self._left - 1
            if self._used == len(self._out) and self._left:
                self._merge(torch.float32)

    def result(self) -> Merged:
        """Output, of q's dtype, and log-sum-exp (B, H, S)."""
        if self._used > 1 or self._sum is not None:
            out, lse = self._merge(self._q.dtype)
            return Merged(out, lse.mT.contiguous())
        return Merged(self._out[0], self._lse[0])

    def _merge(self, dtype: torch.dtype) -> Merged:
        used, before = self._used, self._sum
        out, lse = self._out[:used], self._lse[:used].mT
        if before is None:
            self._sum = merge_states(out, lse, out_dtype=dtype)
        else:
            new = merge_states(out, lse, out_dtype=torch.float32)
            pair = torch.stack((before.out, new.out)), torch.stack((before.lse, new.lse))
            self._sum = merge_states(*pair, out_dtype=dtype)
        self._used = 0
        return self._sum


class GradientSums:
    """Gradients of a rank's queries, summed in float32, and those of one rank's keys after another."""

    def __init__(
        self,
        forward: Forward,
        do: torch.Tensor,
        d_lse: torch.Tensor | None,
        options: Options,
        needed: Needed,
    ) -> None:
        self._forward, self._do, self._d_lse = forward, do, d_lse
        self._options, self._needed = options, needed
        self.dq = torch.zeros_like(forward.q, dtype=torch.float32) if needed.q else None

    def add(
        self, parts: Sequence[Part], found: KeysValues, write: Callable[[Rows, KeysValues], None]
    ) -> None:
        """Adds the gradients of parts whose rows of keys are those of `found`, and gives those of keys and
        values to `write`, by their rows."""
        for part in parts:
            q, k = part.q.slice, found.rows(part.k)
            forward, d_lse = self._forward, self._d_lse
            part_of = Forward(
                forward.q[:, q], *k, forward.out[:, q], forward.lse[:, :, q].contiguous(), forward.extras
            )
            d_lse = None if d_lse is None else d_lse[:, :, q].contiguous()
            gradients = launch_backward(self._options, part, part_of, self._do[:, q], d_lse, self._needed)
            if self.dq is not None:
                assert gradients.q is not None
                self.dq[:, q] += gradients.q
            if self._needed.kv:
                assert gradients.k is not None and gradients.v is not None
                write(part.k, KeysValues(gradients.k, gradients.v))
