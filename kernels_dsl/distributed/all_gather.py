"""All-gather attention: each rank gets the keys of all ranks, and its queries attend to them.

One or two launches a rank and no merge, but the keys and values of the whole sequence in its memory. In the
backward pass they are gathered again; each rank gets its share of their gradients from all ranks, and adds
them in the order of the ranks, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kernels_dsl.distributed.launches import KeysValues, Needed
from kernels_dsl.distributed.parts import Rows, states_of
from kernels_dsl.distributed.ring import Call
from kernels_dsl.distributed.sequence import by_ranks, gathered, in_sequence
from kernels_dsl.distributed.states import GradientSums, States
from kernels_dsl.ops.attention.arguments import NO_EXTRAS
from kernels_dsl.ops.attention.backward import Forward


def _of_all(x: torch.Tensor, call: Call) -> torch.Tensor:
    """(B, rows of all ranks, …) in the order of the sequence."""
    rows_first = in_sequence(gathered(x.movedim(1, 0), call.ranks), call.sharing.order)
    return rows_first.movedim(0, 1)


def _own_sum(gradient: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
    """This rank's rows of a gradient (B, rows of all ranks, …), summed over what all ranks have of them."""
    shares = by_ranks(gradient.to(dtype).movedim(1, 0), call.ranks.size, call.sharing.order).contiguous()
    received = torch.empty_like(shares)
    dist.all_to_all_single(received, shares, group=call.ranks.group)
    return received.sum(0, dtype=torch.float32).to(dtype).movedim(0, 1).contiguous()


class AllGather(torch.autograd.Function):
    """Attention of a rank's queries to the keys of all ranks: output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers, then one launch for each span of queries."""
        parts = call.sharing.parts_of_all(call.ranks.rank)
        states = States(q, v.shape[-1], call.options, len(states_of(parts)))
        states.add(parts, KeysValues(_of_all(k, call), _of_all(v, call)))
        out, lse = states.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
        """Gathers again; gradients of keys and values go to the ranks that own them."""
        _, needs_q, needs_k, needs_v = ctx.needs_input_grad
        call, (q, k, v, out, lse) = ctx.call, ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        needed = Needed(needs_q, needs_k or needs_v)
        sums = GradientSums(Forward(q, k, v, out, lse, NO_EXTRAS), do, d_lse, call.options, needed)
        found = KeysValues(_of_all(k, call), _of_all(v, call))
        total = [torch.zeros_like(x, dtype=torch.float32) for x in found] if needed.kv else []

        def add(rows: Rows, gradients: KeysValues) -> None:
            for into, gradient in zip(total, gradients):
                into[:, rows.slice] += gradient

        sums.add(call.sharing.parts_of_all(call.ranks.rank), found, add)
        dk, dv = (_own_sum(x, call, k.dtype) for x in total) if total else (None, None)
        dq = None if sums.dq is None else sums.dq.to(q.dtype)
        return None, dq, dk if needs_k else None, dv if needs_v else None
