"""Plans of a product whose result is reduced: partial results beside D, then their combination."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.reduce.reductions import REDUCTIONS, ReducedEpilogue
from kernels_dsl.config.gemm_table import oriented
from kernels_dsl.config.reductions import CHUNK, parts
from kernels_dsl.ops import allocate
from kernels_dsl.ops.gemm import kernels as gemm_kernels
from kernels_dsl.ops.gemm import plan as product_plan
from kernels_dsl.ops.gemm.arguments import DenseArguments, GemmCall
from kernels_dsl.ops.gemm.decide import Decision
from kernels_dsl.ops.gemm.plan import Operands, Plan, Run
from kernels_dsl.ops.target import Target


def build(call: GemmCall, arguments: DenseArguments, target: Target) -> Plan:
    """A plan for calls like this one, whose `run` returns D and the reductions; see `plan.build`."""
    plan = product_plan.build(call, arguments, target, ReducingLaunch)
    run = plan.run
    if 0 in call.d_shape:
        run = _of_nothing(run, call)
    operands = product_plan.operand_maker(call.operands, arguments.operands, target)
    return replace(plan, run=_with_result(run, call, arguments.a.device), operands=operands)


def reduced_shape(call: GemmCall) -> tuple[int, ...]:
    """The shape of the reductions: D's without one mode."""
    assert call.reduction is not None
    kept = call.m if call.reduction.dim == -1 else call.n
    return (kept,) if call.batch is None else (call.batch, kept)


class ReducingLaunch(product_plan.Launch):
    """Launches the product, and what combines its partial results; compiles at the first call.

    The last operand is the place of the reductions. Lines of one part need no second kernel.
    """

    def __init__(self, call: GemmCall, decision: Decision, target: Target) -> None:
        assert call.reduction is not None
        over = "n" if (call.reduction.dim == -1) != decision.swap else "m"  # as the kernel sees it
        epilogue = ReducedEpilogue(call.epilogue, call.reduction.name, over)
        super().__init__(replace(call, epilogue=epilogue), decision, target)
        count = parts(decision.config, oriented(decision.problem, decision.config), over)
        self._counts: list[int] = []
        while count > 1:
            self._counts.append(count)
            count = -(-count // CHUNK)
        self._makers: list[Callable[[], torch.Tensor]] | None = None
        self._combine: list[Callable[..., Any]] | None = None

    def __call__(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, operands: Operands) -> None:
        assert operands is not None
        *read, reduced = operands
        lines = reduced.unsqueeze(-2) if reduced.dim() == 2 else reduced[None, None]  # (L, 1, lines)
        if self._makers is None:
            shapes = [(lines.shape[0], count, lines.shape[2]) for count in self._counts]
            self._makers = [allocate.maker(shape, torch.float32, reduced.device) for shape in shapes]
        buffers = [make() for make in self._makers]
        buffers.append(lines)
        steps = list(itertools.pairwise(buffers))
        if self._combine is None:  # before the product is launched: an error leaves all as it was
            constexprs = {"reduction": self.call.epilogue.reduction}
            self._combine = [
                gemm_kernels.launcher("reduce_parts", self.target, step, constexprs)[0] for step in steps
            ]
        super().__call__(a, b, d, (*read, buffers[0]))
        for kernel, step in zip(self._combine, steps):
            kernel(*step)

    def direct(self) -> None:
        """None: there is more to do than a bare launch."""


def _with_result(run: Run, call: GemmCall, device: torch.device) -> Run:
    """`run` that returns D and the reductions, for which it makes a place where the call gives none."""
    make = allocate.maker(reduced_shape(call), torch.float32, device)

    def both(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, operands: Operands
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert operands is not None
        *read, place = operands
        reduced = make() if place is None else place
        return run(a, b, out, (*read, reduced)), reduced

    return both


def _of_nothing(run: Run, call: GemmCall) -> Run:
    """`run` of an empty result, whose reductions are those of no elements."""
    assert call.reduction is not None
    identity = REDUCTIONS[call.reduction.name].identity

    def empty(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, operands: Operands) -> torch.Tensor:
        assert operands is not None
        *_, reduced = operands
        if identity is not None:
            reduced.fill_(identity)
        return run(a, b, out, operands)

    return empty
