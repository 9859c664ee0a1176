"""Products where nothing may be compiled: the fastest configuration whose kernels are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.config import gemm_table
from kernels_dsl.config.order import order_of
from kernels_dsl.ops.gemm.arguments import GemmCall
from kernels_dsl.ops.gemm.decide import Decision
from kernels_dsl.ops.target import Target
from lowering.errors import CompileRefused

Operands = tuple[Any, ...] | None
Run = Callable[..., torch.Tensor]


def with_kernel_at_hand(
    first: Run, call: GemmCall, decision: Decision, target: Target, build: Callable[..., tuple[Run, Decision]]
) -> Run:
    """`first`, which does what `decision` says; where its kernel would have to be compiled, the run of the
    fastest configuration of the family that need not.

    build: the run with (config, a, b). A run loads all its kernels before it launches any. CompileRefused, of
    `first`, where there are no kernels for the call.
    """
    chosen: Run | None = None

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, operands: Operands) -> torch.Tensor:
        nonlocal chosen
        if chosen is not None:
            return chosen(a, b, out, operands)
        try:
            result = first(a, b, out, operands)
            chosen = first
            return result
        except CompileRefused as refused:
            if target.emulated and out is not None:
                raise  # the emulator loads kernels as they are launched: out may be an operand, and written
            order = order_of(call.batch_invariant, call.reduction)
            for config in gemm_table.ranked(decision.problem, target.device, decision.family, order):
                other, _ = build(config, a, b)
                try:
                    result = other(a, b, out, operands)
                except CompileRefused:
                    continue
                chosen = other
                return result
            raise refused

    return run
