"""A kernel as a list of steps: runs of register arithmetic compiled to Python, operations, branches.

Steps are what the scheduler counts. Where a branch diverges, lanes meet again at its immediate
post-dominator, which is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from . import taint
from .forms import missing
from .liveness import read_before_written
from .ptx import Imm, Instruction, Kernel, Reg, Symbol, Vector, registers
from .reports import PtxError, Unsupported, reading
from .roles import hint_of
from .translate import TRANSLATED, Names, Translator

EXIT = -1
NO_EFFECT = {
    "prefetch",
    "prefetchu",
    "nanosleep",
    "applypriority",
    "discard",
    "createpolicy",
}
MOST_PRODUCTS = 16
"""`mma.sync` of one step."""

READ = -3


class Handlers(NamedTuple):
    """Functions that execute operations: by the start of an opcode; and one that makes them for products."""

    of_opcode: dict[str, Callable]
    of_products: Callable[[list[Instruction]], Callable]


@dataclass
class Step:
    """One step. ``kind``: "alu" (compiled instructions), "op" (a handler), "bra", "exit"."""

    kind: str
    instructions: list[Instruction]
    target: int = EXIT
    reconverge: int = EXIT
    handler: Callable | None = None
    writes: tuple = ()  # operations: registers written
    used: frozenset = frozenset()  # registers of arithmetic
    role: str = ""  # what it says of a warp's role
    flow: tuple = ()  # (destination, source or -1 for arithmetic) of registers that reach WGMMA; (read, READ)
    variants: dict = field(default_factory=dict)

    @cached_property
    def first(self) -> Instruction:
        """First instruction."""
        return self.instructions[0]


class Program:
    """Steps of ``kernel`` and the compiled functions of its arithmetic."""

    def __init__(self, kernel: Kernel, handlers: Handlers, symbol_value: Callable[[Symbol], int],
                 single: bool = False):  # fmt: skip
        self.kernel = kernel
        self.names = Names(symbol_value)
        self.names.globals["taint"] = taint
        self.translator = Translator(kernel, self.names)
        self.of_line: dict[str, list[Instruction]] = {}  # of compiled functions, by their file names
        self.operand_a, relevant = _wgmma_registers(kernel)
        accumulators = {
            r for ins in kernel.instructions if ins.has("mma_async") for r in registers(ins.operands[0])
        }
        self.steps = _split(kernel, handlers, single)
        self.unset = read_before_written(self.steps)
        for step in self.steps:
            with reading(step.first):
                step.flow = (*_reads(step, accumulators), *_flow(step, relevant))
            if step.kind == "alu":
                operands = [o for ins in step.instructions for o in (*ins.operands, ins.pred)]
                step.used = frozenset(r for o in operands for r in registers(o))
        _reconvergence(self.steps)

    def compiled(self, step: Step, masked: bool, checked: bool, undefined: bool) -> Callable:
        """Function ``f(R, S, M, w)`` of an arithmetic step: registers, special registers, mask, warp.

        ``masked``: only lanes of M are written. ``checked``: registers of pending WGMMAs are watched.
        ``undefined``: marks of undefined values are passed on.
        """
        key = (masked, checked, undefined)
        if key not in step.variants:
            lines: list[str] = []
            of_line: list[Instruction] = []
            for position, ins in enumerate(step.instructions):
                guard = "M" if masked else None
                if ins.pred is not None:
                    test = f"(~R[{ins.pred.index}])" if ins.pred.negated else f"R[{ins.pred.index}]"
                    guard = f"({test} & M)" if masked else test
                with reading(ins):
                    if checked and ins.root != "mov":
                        lines += self._watch(ins, position)
                    if undefined:
                        lines.append(_pass_on(ins, guard))
                    lines += self.translator.statements(ins, guard)
                of_line += [ins] * (len(lines) - len(of_line))
            body = "\n    ".join(lines) or "pass"
            scope: dict = {}
            name = f"<emulated {len(self.of_line)}>"
            self.of_line[name] = of_line
            exec(
                compile(f"def step(R, S, M, w):\n    {body}\n", name, "exec"),
                self.names.globals,
                scope,
            )
            step.variants[key] = scope["step"]
        return step.variants[key]

    def executed(self, error: BaseException) -> Instruction | None:
        """The arithmetic instruction whose execution raised ``error``, if it was one."""
        trace = error.__traceback__
        while trace is not None:
            lines = self.of_line.get(trace.tb_frame.f_code.co_filename)
            if lines:
                return lines[min(max(trace.tb_lineno - 2, 0), len(lines) - 1)]
            trace = trace.tb_next
        return None

    def _watch(self, ins: Instruction, position: int) -> list[str]:
        sources = [r for operand in ins.operands[1:] for r in registers(operand)]
        lines = [
            f"if id(R[{r}]) in w.pending: w.touched({position}, {r}, False)" for r in dict.fromkeys(sources)
        ]
        for r in registers(ins.operands[0]):
            if r in self.operand_a:
                lines.append(f"if {r} in w.pending_a: w.touched({position}, {r}, True)")
        return lines


def _pass_on(ins: Instruction, guard: str | None) -> str:
    """Statement that passes marks of undefined values on; see taint.py."""
    targets = tuple(registers(ins.operands[0]))
    if ins.root == "selp" and isinstance(ins.operands[3], Reg):
        a, b = (o.index if isinstance(o, Reg) else -1 for o in ins.operands[1:3])
        chooser = ins.operands[3]
        return f"taint.select(w, {targets[0]}, {a}, {b}, {chooser.index}, {chooser.negated}, {guard})"
    if ins.parts in (("and", "pred"), ("or", "pred")) and all(isinstance(o, Reg) for o in ins.operands):
        one, other = ((o.index, o.negated) for o in ins.operands[1:3])
        return f"taint.logical(w, {targets[0]}, {one}, {other}, {ins.root == 'and'}, {guard})"
    operands = (*ins.operands[1:], ins.pred)
    sources = tuple(dict.fromkeys(r for o in operands for r in registers(o)))
    whole = ins.root not in taint.OF_BITS and not any(isinstance(o, Vector) for o in ins.operands)
    return f"taint.{'arithmetic' if whole else 'bits'}(w, {targets}, {sources}, {guard})"


def _wgmma_registers(kernel: Kernel) -> tuple[set[int], set[int]]:
    """Registers that are operand A of a WGMMA; registers that are its operands, or move into them."""
    operand_a: set[int] = set()
    relevant: set[int] = set()
    for ins in kernel.instructions:
        if len(ins.operands) < 2 and (ins.root == "mov" or ins.has("mma_async")):
            with reading(ins):
                raise Unsupported(f"{len(ins.operands)} operands")
        if ins.root == "wgmma" and ins.has("mma_async"):
            relevant.update(registers(ins.operands[0]))
            if isinstance(ins.operands[1], Vector):
                operand_a.update(registers(ins.operands[1]))
    relevant |= operand_a
    moves = []
    for ins in kernel.instructions:
        if ins.root == "mov" and isinstance(ins.operands[0], Reg) and isinstance(ins.operands[1], Reg):
            moves.append((ins.operands[0].index, ins.operands[1].index))
    changed = True
    while changed and relevant:
        new = {s for d, s in moves if d in relevant} - relevant
        relevant |= new
        changed = bool(new)
    return operand_a, relevant


def _reads(step: Step, accumulators: set[int]) -> list[tuple[int, int]]:
    """Accumulators that a step reads. Moves are the compiler's, and may be none on the GPU."""
    out = []
    for ins in step.instructions:
        if ins.root not in ("wgmma", "mov", "bra"):
            out += [(r, READ) for o in ins.operands[1:] for r in registers(o) if r in accumulators]
    return list(dict.fromkeys(out))


def _flow(step: Step, relevant: set[int]) -> list[tuple[int, int]]:
    out = []
    for ins in step.instructions:
        if not ins.operands or ins.root in ("wgmma", "bra"):
            continue
        targets = [r for r in registers(ins.operands[0]) if r in relevant]
        if step.kind == "op" and hasattr(ins.operands[0], "base"):
            continue
        for target in targets:
            if ins.root == "mov":
                source = ins.operands[1]
                if isinstance(source, Reg):
                    out.append((target, source.index))
                elif isinstance(source, Imm):
                    out.append((target, -2))
                else:
                    out.append((target, -1))
            else:
                out.append((target, -1))
    return out


def _handler_of(ins: Instruction, handlers: dict[str, Callable]) -> Callable:
    """The handler with the longest dotted prefix of the opcode."""
    for n in range(len(ins.parts), 0, -1):
        found = handlers.get(".".join(ins.parts[:n]))
        if found is not None:
            return found
    reason = missing(ins)
    error = PtxError("the emulator does not know this instruction" + (f" ({reason})" if reason else ""))
    error.ins = ins
    raise error


def _joins(run: list[Instruction], ins: Instruction) -> bool:
    """True if a product may follow ``run``, whose first may be any instruction, in one step."""
    first = run[0]
    return len(run) < MOST_PRODUCTS and first.parts == ins.parts and _plain(first) and _plain(ins)


def _plain(ins: Instruction) -> bool:
    return (
        ins.root == "mma"
        and ins.pred is None
        and all(isinstance(o, Vector) and all(isinstance(i, Reg) for i in o.items) for o in ins.operands)
    )


def _split(kernel: Kernel, handlers: Handlers, single: bool) -> list[Step]:
    starts = set(kernel.labels.values())
    alone = single or any(ins.root == "wgmma" for ins in kernel.instructions)
    steps: list[Step] = []
    at_instruction: dict[int, int] = {}
    for i, ins in enumerate(kernel.instructions):
        joinable = steps and steps[-1].kind == "alu" and i not in starts and not single
        if ins.root in TRANSLATED:
            if joinable:
                steps[-1].instructions.append(ins)
                at_instruction[i] = len(steps) - 1
                continue
            step = Step("alu", [ins])
        elif not alone and steps and i not in starts and _joins(steps[-1].instructions, ins):
            steps[-1].instructions.append(ins)
            steps[-1].writes += tuple(ins.operands[0].indices)
            at_instruction[i] = len(steps) - 1
            continue
        elif ins.root == "bra":
            step = Step("bra", [ins])
        elif ins.root in ("ret", "exit"):
            step = Step("exit", [ins])
        elif ins.root in NO_EFFECT and ins.parts[:2] != ("prefetch", "tensormap"):
            if ins.root == "createpolicy":
                step = Step("op", [ins], handler=handlers.of_opcode["createpolicy"])
            else:
                at_instruction[i] = len(steps)
                step = Step("op", [ins], handler=_nothing)
        else:
            step = Step("op", [ins], handler=_handler_of(ins, handlers.of_opcode))
            step.role = hint_of(ins)
            step.writes = tuple(r for o in ins.operands[:1] if not hasattr(o, "base") for r in registers(o))
        at_instruction[i] = len(steps)
        steps.append(step)
    for step in steps:
        if step.kind == "op" and len(step.instructions) > 1:
            step.handler = handlers.of_products(step.instructions)
        if step.kind == "bra":
            label = step.first.label
            if label not in kernel.labels:
                raise PtxError(f"PTX line {step.first.line}: unknown label {label}")
            index = kernel.labels[label]
            step.target = at_instruction[index] if index < len(kernel.instructions) else EXIT
    return steps


def _nothing(machine: object, warp: object, ins: Instruction, mask: object) -> None:
    """Instructions without an effect on results: prefetches, sleeps, cache hints."""


def _reconvergence(steps: list[Step]) -> None:
    """Immediate post-dominator of each branch (EXIT where paths only meet at the end)."""
    n = len(steps)
    successors: list[list[int]] = []
    for i, step in enumerate(steps):
        after = i + 1 if i + 1 < n else n
        if step.kind == "bra":
            target = n if step.target == EXIT else step.target
            successors.append([target, after] if step.first.pred is not None else [target])
        elif step.kind == "exit":
            successors.append([n, after] if step.first.pred is not None else [n])
        else:
            successors.append([after])
    everything = (1 << (n + 1)) - 1
    dominators = [everything] * n + [1 << n]
    changed = True
    while changed:
        changed = False
        for i in range(n - 1, -1, -1):
            common = everything
            for s in successors[i]:
                common &= dominators[s]
            common |= 1 << i
            if common != dominators[i]:
                dominators[i], changed = common, True
    sizes = [d.bit_count() for d in dominators]
    for i, step in enumerate(steps):
        if step.kind == "bra" and step.first.pred is not None:
            strict = dominators[i] & ~(1 << i)
            best, best_size = n, -1
            while strict:
                low = strict & -strict
                j = low.bit_length() - 1
                if sizes[j] > best_size and dominators[j] != everything:
                    best, best_size = j, sizes[j]
                strict ^= low
            step.reconverge = EXIT if best == n else best
