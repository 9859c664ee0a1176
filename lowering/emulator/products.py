"""Runs of ``mma.sync``: products that follow one another are one step, in one compiled function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import fast, fragments
from .machine import Machine
from .ptx import Instruction
from .semantics import mma, tensor_core
from .state import Warp

Array = np.ndarray


def handler_of(run: list[Instruction]) -> Callable:
    """The handler of a step of these instructions."""
    try:
        shape = mma.parse_opcode(run[0].opcode)
    except ValueError:
        shape = None  # one of the kinds that `fragments` models alone
    if shape is None or shape.d != "f32" or shape.c != "f32" or shape.a not in ("f16", "bf16", "tf32"):
        return _one_by_one(run)
    model = tensor_core.ACCUMULATION.get(("mma", shape.a))
    return _one_by_one(run) if model is None else _compiled(run, shape, model)


def _one_by_one(run: list[Instruction]) -> Callable:
    def handler(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
        for one in run:
            m.at = w, one
            fragments.multiply(m, w, one, mask)

    return handler


def _compiled(run: list[Instruction], shape: mma.Shape, model: tensor_core.Accumulation) -> Callable:
    inputs, outputs, plan = _registers(run)
    rows, places = int(plan.max()) + 1, plan * 32
    fallback = _one_by_one(run)
    wide = shape.a == "tf32"
    values = tensor_core.all_values("f16" if wide else shape.a)
    flops = 2 * 16 * 8 * shape.k

    def handler(m: Machine, w: Warp, ins: Instruction, mask: Array) -> None:
        compiled = fast.kernels()
        if compiled is None or w.taint or not mask.all():
            fallback(m, w, ins, mask)
            return
        words = np.empty((rows, 32), np.uint32)
        held = w.R
        np.concatenate([held[i] for i in inputs], out=words[: len(inputs)].reshape(-1))
        compiled.products(
            words.reshape(-1), places, values, shape.k, wide, model.group, model.bits, model.fraction
        )
        for register, row in outputs:
            held[register] = words[row]
        if m.stats is not None:
            for one in run:
                m.stats.add(one, "matrix_flops", flops)

    return handler


def _registers(run: list[Instruction]) -> tuple[list[int], list[tuple[int, int]], Array]:
    """Registers that a run reads before it writes them; those that it writes, with their rows; the plan.

    The plan has the rows of D, A, B and C of each product: first those of what is read, then a row for each
    value that is written.
    """
    inputs: list[int] = []
    written: set[int] = set()
    for ins in run:
        for register in (r for operand in ins.operands[1:] for r in operand.indices):
            if register not in written and register not in inputs:
                inputs.append(register)
        written.update(ins.operands[0].indices)
    row_of = {register: row for row, register in enumerate(inputs)}
    plan, rows = [], len(inputs)
    for ins in run:
        sources = [row_of[r] for operand in ins.operands[1:] for r in operand.indices]
        targets = list(range(rows, rows + len(ins.operands[0].indices)))
        row_of.update(zip(ins.operands[0].indices, targets, strict=True))
        plan.append(targets + sources)
        rows += len(targets)
    return inputs, [(register, row_of[register]) for register in sorted(written)], np.array(plan, np.int64)
