"""Ring attention: at step t a rank's queries meet the keys of the rank t before it.

Keys and values of the next step travel while a step computes; of a rank's keys only the rows that the
receiver's queries see are sent, directly to it. In the backward pass the gradients of keys and values travel
back to their owner, which adds them in the order of the steps, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from kernels_dsl.distributed.exchange import Exchange, Message
from kernels_dsl.distributed.groups import Ranks
from kernels_dsl.distributed.launches import KeysValues, Needed, Options
from kernels_dsl.distributed.parts import Part, Rows, Sharing, states_of
from kernels_dsl.distributed.states import GradientSums, States
from kernels_dsl.ops.attention.arguments import NO_EXTRAS
from kernels_dsl.ops.attention.backward import Forward
from lowering.records import frozen


@frozen
class Call:
    """A call of context-parallel attention, without its tensors."""

    ranks: Ranks
    sharing: Sharing
    options: Options

    def parts(self, owner: int) -> list[Part]:
        """Those between this rank's queries and a rank's keys."""
        return self.sharing.parts(self.ranks.rank, owner)

    def count_of_states(self) -> int:
        """The states that this rank's queries get from the keys of all."""
        return sum(len(states_of(self.parts(owner))) for owner in range(self.ranks.size))


class Step(NamedTuple):
    """One step of a rank: whose keys it gets, who gets its keys, and the rows of them."""

    owner: int
    reader: int
    read: Rows | None
    sent: Rows | None


def steps_of(call: Call) -> list[Step]:
    """The steps after a rank's own.

    Those too in which it neither sends nor receives: two ranks exchange keys in one step and gradients in
    another, and would take one for the other if either of them had fewer steps in between.
    """
    rank, size = call.ranks.rank, call.ranks.size
    found = []
    for t in range(1, size):
        owner, reader = (rank - t) % size, (rank + t) % size
        found.append(Step(owner, reader, call.sharing.keys(rank, owner), call.sharing.keys(reader, rank)))
    return found


def _like(own: KeysValues, rows: Rows) -> KeysValues:
    """Memory for so many rows."""
    k, v = (x.new_empty((x.shape[0], rows.end - rows.start, *x.shape[2:])) for x in own)
    return KeysValues(k, v)


def _packed(x: KeysValues) -> KeysValues:
    return KeysValues(x.k.contiguous(), x.v.contiguous())


class Meeting(NamedTuple):
    """A step with its keys and values: the parts' rows of keys are those of `found`."""

    step: Step
    parts: list[Part]
    found: KeysValues


def meetings(call: Call, own: KeysValues) -> Iterator[Meeting]:
    """The steps in their order; `parts` is empty where this rank only sends."""

    def begin(step: Step) -> Exchange:
        sent = None if step.sent is None else Message(step.reader, _packed(own.rows(step.sent)))
        received = None if step.read is None else Message(step.owner, _like(own, step.read))
        return Exchange(call.ranks, sent, received)

    steps = steps_of(call)
    coming = begin(steps[0]) if steps else None
    here = Step(call.ranks.rank, call.ranks.rank, None, None)
    yield Meeting(here, call.parts(call.ranks.rank), own)
    for place, step in enumerate(steps):
        assert coming is not None
        found = coming.wait()
        coming = begin(steps[place + 1]) if place + 1 < len(steps) else None
        parts = call.parts(step.owner)
        if step.read is None or found is None:
            yield Meeting(step, [], own)
        else:
            yield Meeting(step, [moved(part, -step.read.start) for part in parts], found)


def moved(part: Part, by: int) -> Part:
    """The part where its rows of keys have other numbers."""
    return part._replace(k=Rows(part.k.start + by, part.k.end + by))


class _Returned:
    """Gradients of keys and values on their way to the ranks that own them."""

    def __init__(self, call: Call, own: KeysValues) -> None:
        self._call, self._own = call, own
        self.k, self.v = (torch.zeros_like(x, dtype=torch.float32) for x in own)
        self._coming: Exchange | None = None
        self._rows: Rows | None = None

    def add(self, rows: Rows, gradients: KeysValues) -> None:
        """Adds gradients of this rank's keys."""
        self.k[:, rows.slice] += gradients.k
        self.v[:, rows.slice] += gradients.v

    def exchange(self, step: Step, gradients: KeysValues | None) -> None:
        """Sends those of a step's keys to their owner, and adds those of the step before."""
        self.finish()
        sent = None if gradients is None else Message(step.owner, gradients)
        received = None if step.sent is None else Message(step.reader, _like(self._own, step.sent))
        self._rows, self._coming = step.sent, Exchange(self._call.ranks, sent, received)

    def finish(self) -> None:
        """Waits for gradients that are on their way and adds them."""
        if self._coming is not None:
            found = self._coming.wait()
            if found is not None and self._rows is not None:
                self.add(self._rows, found)
        self._coming = None


def _gradients_of(meeting: Meeting, sums: GradientSums) -> KeysValues:
    """Those of a step's keys and values, in their dtype: of one launch as it gave them."""
    k, v = meeting.found
    written: list[tuple[Rows, KeysValues]] = []
    sums.add(meeting.parts, meeting.found, lambda rows, x: written.append((rows, x)))
    if len(written) == 1 and written[0][0] == Rows(0, k.shape[1]):
        return _packed(written[0][1])
    total = KeysValues(torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
    for rows, x in written:
        total.k[:, rows.slice] += x.k
        total.v[:, rows.slice] += x.v
    return KeysValues(total.k.to(k.dtype), total.v.to(v.dtype))


class Ring(torch.autograd.Function):
    """Attention of a rank's queries to the keys of all ranks: output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All steps, and the merge of their results."""
        states = States(q, v.shape[-1], call.options, call.count_of_states())
        for meeting in meetings(call, KeysValues(k, v)):
            states.add(meeting.parts, meeting.found)
        out, lse = states.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
        """The same steps again."""
        _, needs_q, needs_k, needs_v = ctx.needs_input_grad
        call, (q, k, v, out, lse) = ctx.call, ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        needed = Needed(needs_q, needs_k or needs_v)
        sums = GradientSums(Forward(q, k, v, out, lse, NO_EXTRAS), do, d_lse, call.options, needed)
        own = KeysValues(k, v)
        returned = _Returned(call, own) if needed.kv else None
        for meeting in meetings(call, own):
            if returned is None:
                sums.add(meeting.parts, meeting.found, lambda *_: None)
            elif meeting.step.owner == call.ranks.rank:
                sums.add(meeting.parts, meeting.found, returned.add)
            else:
                returned.exchange(meeting.step, _gradients_of(meeting, sums) if meeting.parts else None)
        dq = None if sums.dq is None else sums.dq.to(q.dtype)
        if returned is None:
            return None, dq, None, None
        returned.finish()
        dk, dv = returned.k.to(k.dtype), returned.v.to(v.dtype)
        return None, dq, dk if needs_k else None, dv if needs_v else None
