"""Gradients of q, k and v alone in a call like an earlier one: new tensors and three launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels_dsl.ops import allocate
from kernels_dsl.ops.attention.backward import BackwardPlan, Gradients, Needs
from kernels_dsl.ops.attention.outputs import is_empty

Run = Callable[..., Gradients]
"""(q, k, v, output, log-sum-exp, do, d_lse or None) -> the gradients."""


def repeated_run(plan: BackwardPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run | None:
    """A run of `plan` on tensors like these alone, without looking at anything again; None where there is
    more to do than to launch its kernels."""
    call, config = plan.call, plan.config
    prepare, main, finish = (launch.direct() for launch in (plan.prepare, plan.main, plan.finish))
    others = call.packed or call.block is not None or plan.dq_config is not None or plan.steps is not None
    if others or plan.needs != Needs() or is_empty(call):
        return None
    if prepare is None or main is None or finish is None:
        return None
    rows, _, sums, turns = plan.sizes
    device = q.device
    make_results = allocate.several([allocate.maker(x.shape, x.dtype, device) for x in (q, k, v)])
    make_memory = allocate.several(
        [allocate.maker((size,), torch.float32, device) for size in (rows, rows, sums)]
    )
    make_turns = allocate.maker((turns,), torch.int32, device) if config.counts_shares else None
    clears, longest_q = config.clears_sums, call.longest_q
    numbers = (call.scale, call.softcap, call.left, call.right)
    extras = (None, call.longest_k, None, None, None, None)  # sequences, mask, aux, lists, mask's gradient
    scale, queue = call.scale, plan.queue

    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
        d_lse: torch.Tensor | None,
    ) -> Gradients:
        dq, dk, dv = make_results()
        row_sums, of_rows, dq_sums = make_memory()
        turns = None if make_turns is None else make_turns()
        if d_lse is not None:
            d_lse = d_lse.float()
        sums = (of_rows, row_sums, dq_sums, turns)
        launch = prepare
        launch(out, do, lse, d_lse, *(sums if clears else (of_rows, row_sums, None, turns)), None, longest_q)
        launch = main
        launch(q, k, v, do, dk, dv, *sums, *numbers, *extras, *queue(device))
        finish(dq_sums, None if clears else turns, dq, scale, None, longest_q)
        return Gradients(dq, dk, dv, None)

    return run
