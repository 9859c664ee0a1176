"""A kernel's steps as tables of numbers, for the interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import register_file
from ..ptx import TYPE_BYTES, Address, Imm, Instruction, Pair, Reg, Sink, Special, Symbol, Vector, registers
from ..reports import EmulatorError, Unsupported
from ..semantics import mma, tensor_core, wgmma
from ..translate import window_of
from . import opcodes as o
from .first_rows import Own
from .registers import BYTES, LANES, Layout

if TYPE_CHECKING:
    from ..program import Program, Step

Array = np.ndarray
_WIDTH = {1: o.BIT, 2: o.HALF, 4: o.WORD, 8: o.LONG}
_SIGNED = {o.HALF: o.SIGNED_HALF, o.WORD: o.SIGNED_WORD, o.LONG: o.LONG}
_CLASS = {
    o.BIT: "pred",
    o.HALF: "b16",
    o.WORD: "b32",
    o.LONG: "b64",
    o.SIGNED_HALF: "b16",
    o.SIGNED_WORD: "b32",
}
_COMPARISONS = {"eq": o.EQ, "ne": o.NE, "lt": o.LT, "le": o.LE, "gt": o.GT, "ge": o.GE}
_COMBINE = {"and": o.AND, "or": o.OR, "xor": o.XOR}
_KEPT = re.compile(
    r"%((n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyz]|laneid|lanemask_(eq|lt|le|ge|gt)|cluster_n?ctarank)"
)
"""Special registers that a warp keeps through a launch."""
REMEMBERED = ("wgmma", "mbarrier", "fence", "griddepcontrol", "bar", "barrier")
"""Operations that a warp's history has."""
_MALFORMED = (ValueError, KeyError, IndexError, AttributeError, TypeError, EmulatorError, Unsupported)
"""Errors that a malformed instruction raises: the Python code says so in its place, if it comes there."""


class Unknown(Exception):
    """The interpreter has no such instruction."""


def width_of(kind: str) -> int:
    """The width of values of a PTX type; with their sign, where the type has one."""
    width = _WIDTH[TYPE_BYTES[kind]]
    return _SIGNED[width] if kind[0] == "s" else width


class Form:
    """Meaning of an opcode: the operation, and the widths of its destination and its sources."""

    def __init__(self, op: int, target: int, *sources: int) -> None:
        self.op, self.target, self.sources = op, target, sources


def _forms() -> dict[tuple[str, ...], Form]:
    forms: dict[tuple[str, ...], Form] = {}
    for kind in ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"):
        width, bits = width_of(kind), _WIDTH[TYPE_BYTES[kind]]
        signed = kind[0] == "s"
        if kind[0] != "b":
            forms["add", kind] = Form(o.ADD, bits, width, width)
            forms["sub", kind] = Form(o.SUB, bits, width, width)
            forms["mul", "lo", kind] = Form(o.MUL, bits, width, width)
            forms["mad", "lo", kind] = Form(o.MAD, bits, width, width, width)
            forms["min", kind] = Form(o.MIN if signed else o.MIN_UNSIGNED, bits, width, width)
            forms["max", kind] = Form(o.MAX if signed else o.MAX_UNSIGNED, bits, width, width)
        if kind in ("s32", "u32"):
            forms["mul", "wide", kind] = Form(o.MUL, o.LONG, width, width)
            forms["mad", "wide", kind] = Form(o.MAD, o.LONG, width, width, o.LONG)
            forms["div", kind] = Form(o.DIVIDE, bits, width, width)
            forms["rem", kind] = Form(o.REMAINDER, bits, width, width)
        if kind == "s32":
            forms["neg", kind] = Form(o.NEGATE, bits, width)
        if kind[0] == "b":
            forms["and", kind] = Form(o.AND, bits, bits, bits)
            forms["or", kind] = Form(o.OR, bits, bits, bits)
            forms["xor", kind] = Form(o.XOR, bits, bits, bits)
            forms["not", kind] = Form(o.NOT, bits, bits)
            forms["shl", kind] = Form(o.SHL, bits, bits, o.WORD)
        forms["shr", kind] = Form(o.SHR_SIGNED if signed else o.SHR, bits, width, o.WORD)
        forms["selp", kind] = Form(o.SELECT, bits, bits, bits, o.BIT)
        forms["mov", kind] = Form(o.MOV, bits, bits)
        for to in ("s16", "u16", "s32", "u32", "s64", "u64"):
            if kind[0] != "b":
                forms["cvt", to, kind] = Form(o.MOV, _WIDTH[TYPE_BYTES[to]], width)
    for name, op in _COMBINE.items():
        forms[name, "pred"] = Form(op, o.BIT, o.BIT, o.BIT)
    forms["not", "pred"] = Form(o.NOT_PREDICATE, o.BIT, o.BIT)
    forms["mov", "pred"] = Form(o.MOV, o.BIT, o.BIT)
    forms["cvt", "rn", "bf16", "f32"] = Form(o.BF16, o.HALF, o.WORD)
    forms["cvt", "rn", "bf16x2", "f32"] = Form(o.BF16X2, o.WORD, o.WORD, o.WORD)
    return forms


FORMS = _forms()


class Encoder:
    """Makes the tables. ``fixed``: rows of constants; ``own``: rows that differ by warp or CTA."""

    def __init__(self, program: Program, symbol_value: Callable[[Symbol], int], params: Array) -> None:
        self.program, self.symbol_value, self.params = program, symbol_value, params
        self.kernel = program.kernel
        self.layout = Layout(self.kernel.reg_classes)
        self.fixed: list[tuple[int, int, int]] = []  # offset, bytes of a lane, value
        self.own: list[Own] = []
        self._known: dict[tuple, int] = {}
        self.code: list[list[int]] = []
        self.plan: list[int] = []  # lists of registers, or of where they lie
        self.values: str | None = None  # the type of operands whose values are in the tables
        self.roles: dict[str, int] = {}  # and their bits
        self.touches = False  # it has loads or stores of shared memory by lanes
        self.steps = np.array([self._step(step) for step in program.steps], np.int64)
        code = np.array(self.code, np.int64).reshape(-1, o.COLUMNS)
        plan = np.array(self.plan, np.int64)
        self.tables = (code, self.steps, *self._used(), plan, *self._products_model())

    def rows(self) -> Array:
        """The rows of a warp before its first step, uint8."""
        out = np.zeros(-(-self.layout.size // 8) * 8, np.uint8)
        for at, size, value in self.fixed:
            out[at : at + LANES * size].view(f"u{size}")[:] = value & ((1 << (8 * size)) - 1)
        return out

    def _used(self) -> tuple[Array, Array]:
        """Numbers of the registers of each step, and where those of each begin."""
        lists = []
        for step in self.program.steps:
            operands = [x for ins in step.instructions for x in (*ins.operands, ins.pred)]
            lists.append(sorted({r for operand in operands for r in registers(operand)}))
        starts = np.cumsum([0, *(len(one) for one in lists)])
        return starts.astype(np.int64), np.array([r for one in lists for r in one], np.int64)

    def _step(self, step: Step) -> list[int]:
        first, planned, guard = len(self.code), len(self.plan), step.first.pred
        row = [o.UNKNOWN, first, first, step.target, o.NONE, 0, 0, 0, step.reconverge, 0, 0]
        row[o.REMEMBERS] = int(step.kind == "op" and step.first.root in REMEMBERED)
        row[o.NOTED] = o.MARKS if step.flow else row[o.REMEMBERS]
        if step.role:
            self.roles.setdefault(step.role, len(self.roles))
            row[o.ROLE] = 1 << self.roles[step.role]
        if step.kind in ("bra", "op") and guard is not None:
            row[o.STEP_GUARD], row[o.STEP_NEGATED] = self.layout.row(guard.index), int(guard.negated)
        if step.kind == "bra":
            row[o.KIND] = o.BRANCH
            return row
        if step.kind == "exit":
            return row
        try:
            if step.kind == "alu":
                for ins in step.instructions:
                    self.code += self._arithmetic(ins)
                row[o.KIND] = o.STRAIGHT
            elif step.first.parts[:2] == ("ld", "param") and guard is None:
                self.code += self._load_param(step.first)
                row[o.KIND] = o.STRAIGHT
            else:
                self.code.append(self._operation(step))
                row[o.KIND] = o.OPERATION
                row[o.ACCUMULATES] = int(step.first.root == "wgmma")
        except (Unknown, *_MALFORMED):
            del self.code[first:], self.plan[planned:]
        row[o.LAST] = len(self.code)
        return row

    def _constant(self, value: int, width: int) -> int:
        size = BYTES[_CLASS[width]]
        key = (value & ((1 << (8 * size)) - 1), size)
        if key not in self._known:
            at = self.layout.add(_CLASS[width])
            self.fixed.append((at, size, key[0]))
            self._known[key] = at // size
        return self._known[key]

    def _own(self, key: tuple, width: int, value: Callable[[Any], Array], of_cta: bool) -> int:
        size = BYTES[_CLASS[width]]
        if (key, size) not in self._known:
            at = self.layout.add(_CLASS[width])
            self.own.append(Own(at, size, value, of_cta))
            self._known[key, size] = at // size
        return self._known[key, size]

    def place(self, operand: object, width: int) -> int:
        """The first element of an operand's row."""
        if isinstance(operand, Reg):
            if operand.cls != _CLASS[width]:
                raise Unknown
            return self.layout.row(operand.index)
        if isinstance(operand, Imm):
            if operand.float_bits:
                raise Unknown
            return self._constant(int(bool(operand.value)) if width == o.BIT else operand.value, width)
        if isinstance(operand, Special) and _KEPT.fullmatch(operand.name) and width != o.BIT:
            name = operand.name
            of_cta = not name.startswith("%tid.")
            return self._own(("special", name), width, lambda w: np.asarray(w.S.values_of[name]), of_cta)
        if isinstance(operand, Symbol) and width in (o.WORD, o.LONG):
            value = self.symbol_value(operand)
            variable = self.kernel.variables.get(operand.name)
            if variable is None or variable.space != "shared":
                return self._constant(value, width)
            return self._own(
                ("symbol", value), width, lambda w: np.asarray(w.S.values_of["window"] + value), True
            )
        raise Unknown

    def _target(self, operand: object, width: int) -> int:
        if not isinstance(operand, Reg):
            raise Unknown
        return self.place(operand, width)

    def _row(self, op: int, target: int, target_width: int, sources: list[tuple[object, int]]) -> list[int]:
        row = [o.NONE] * o.COLUMNS
        row[o.OP], row[o.TARGET], row[o.TARGET_WIDTH] = op, target, target_width
        row[o.FLAGS] = sum(bool(getattr(x, "negated", False)) << i for i, (x, _) in enumerate(sources))
        for i, (source, width) in enumerate(sources):
            row[o.A + i], row[o.A_WIDTH + i] = self.place(source, width), width
        return row

    def _guarded(self, rows: list[list[int]], ins: Instruction) -> list[list[int]]:
        for row in rows:
            if ins.pred is not None:
                row[o.GUARD], row[o.NEGATED] = self.layout.row(ins.pred.index), int(ins.pred.negated)
        return rows

    def _arithmetic(self, ins: Instruction) -> list[list[int]]:
        if ins.root == "setp":
            return self._guarded([self._comparison(ins)], ins)
        if ins.root == "mov" and any(isinstance(x, Vector) for x in ins.operands):
            return self._guarded(self._pieces(ins), ins)
        if ins.root == "cvta":
            return self._guarded([self._window(ins)], ins)
        form = FORMS.get(ins.parts)
        if form is None or len(ins.operands) != 1 + len(form.sources):
            raise Unknown
        target = self._target(ins.operands[0], form.target)
        sources = list(zip(ins.operands[1:], form.sources, strict=True))
        return self._guarded([self._row(form.op, target, form.target, sources)], ins)

    def _comparison(self, ins: Instruction) -> list[int]:
        combine = len(ins.parts) == 4
        name, kind = ins.parts[1], ins.parts[-1]
        if name not in _COMPARISONS or TYPE_BYTES.get(kind, 1) < 2 or kind[0] not in "sub":
            raise Unknown
        if combine and (ins.parts[2] not in _COMBINE or len(ins.operands) != 4):
            raise Unknown
        width, op = width_of(kind), _COMPARISONS[name]
        if kind[0] != "s" and op >= o.LT:
            op += o.LT_UNSIGNED - o.LT
        sources = [(operand, width) for operand in ins.operands[1:3]]
        row = self._row(op, self._target(ins.operands[0], o.BIT), o.BIT, sources)
        if combine:
            other = ins.operands[3]
            row[o.COMBINE], row[o.OTHER] = _COMBINE[ins.parts[2]], self.place(other, o.BIT)
            row[o.FLAGS] |= bool(getattr(other, "negated", False)) << 3
        return row

    def _window(self, ins: Instruction) -> list[int]:
        """``cvta``: an address in a window of its own becomes a generic one, or the other way round."""
        target, source = ins.operands
        op = o.SUB if ins.has("to") else o.ADD
        sources = [(source, o.LONG), (Imm(window_of(ins)), o.LONG)]
        return self._row(op, self._target(target, o.LONG), o.LONG, sources)

    def _pieces(self, ins: Instruction) -> list[list[int]]:
        """``mov`` of a register out of two halves, or into them."""
        target, source = ins.operands
        width = _WIDTH.get(TYPE_BYTES[ins.parts[-1]], o.NONE)
        half = {o.WORD: o.HALF, o.LONG: o.WORD}.get(width)
        vector = target if isinstance(target, Vector) else source
        if half is None or len(vector.items) != 2:
            raise Unknown
        if vector is source:
            op = o.PACK32 if half == o.WORD else o.PACK16
            pair = [(item, half) for item in vector.items]
            return [self._row(op, self._target(target, width), width, pair)]
        rows = []
        for i, item in enumerate(vector.items):
            if not isinstance(item, Sink):
                shift = [(source, width), (Imm(i * 8 * BYTES[_CLASS[half]]), o.WORD)]
                rows.append(self._row(o.SHR, self._target(item, half), half, shift))
        return rows

    def _load_param(self, ins: Instruction) -> list[list[int]]:
        """Parameters are constants of a launch."""
        where, target = ins.operands[1], ins.operands[0]
        size = TYPE_BYTES.get(ins.parts[-1], 0)
        if not isinstance(where, Address) or not isinstance(where.base, Symbol) or size not in _WIDTH:
            raise Unknown
        if where.base.name in self.kernel.variables:
            raise Unknown
        at, rows = self.symbol_value(where.base) + where.offset, []
        for item in target.items if isinstance(target, Vector) else (target,):
            value = int.from_bytes(self.params[at : at + size].tobytes(), "little")
            rows.append(self._row(o.MOV, self._target(item, _WIDTH[size]), _WIDTH[size],
                                  [(Imm(value), _WIDTH[size])]))  # fmt: skip
            at += size
        return rows

    def _operation(self, step: Step) -> list[int]:
        ins = step.first
        if ins.parts == ("shfl", "sync", "idx", "b32"):
            target, *sources = ins.operands[:4]
            words = [(source, o.WORD) for source in sources]
            return self._row(o.SHUFFLE, self._target(target, o.WORD), o.WORD, words)
        if ins.parts == ("elect", "sync") and isinstance(ins.operands[0], Pair):
            pair = ins.operands[0]
            row = [o.NONE] * o.COLUMNS
            row[o.OP] = o.ELECT
            if not isinstance(pair.first, Sink):
                row[o.TARGET] = self._target(pair.first, o.WORD)
            row[o.A] = self._target(pair.second, o.BIT)
            return row
        if ins.parts == ("mapa", "shared::cluster", "u32"):
            pairs = [(source, o.WORD) for source in ins.operands[1:3]]
            row = self._row(o.MAPA, self._target(ins.operands[0], o.WORD), o.WORD, pairs)
            return self._guarded([row], ins)[0]
        if ins.root in ("fence", "griddepcontrol"):
            return self._fence(ins)
        if ins.root == "mbarrier":
            return self._of_mbarrier(ins)
        if ins.root == "wgmma":
            return self._of_warpgroup(ins)
        if ins.root in ("bar", "barrier"):
            return self._named(ins)
        if ins.parts[:2] == ("prefetch", "tensormap"):
            return [o.PREFETCH, *[o.NONE] * (o.COLUMNS - 1)]
        if ins.root == "setmaxnreg" and isinstance(ins.operands[0], Imm):
            return self._limit(ins.operands[0].value)
        if ins.root in ("ldmatrix", "stmatrix"):
            return self._matrix(ins)
        if ins.parts[:2] in (("ld", "shared"), ("st", "shared")):
            return self._access(ins)
        if ins.root == "mma":
            return self._products(step.instructions)
        raise Unknown

    def _products_model(self) -> tuple[Array, Array]:
        """Rounding of sums of products, and the table of values of the operands."""
        if self.values is None:
            return np.zeros(3, np.int64), np.zeros(0, np.float32)
        model = tensor_core.ACCUMULATION["mma", self.values]
        return np.array([model.group, model.bits, model.fraction]), tensor_core.all_values(self.values)

    def _products(self, run: list[Instruction]) -> list[int]:
        try:
            shape = mma.parse_opcode(run[0].opcode)
        except ValueError:
            raise Unknown from None
        if shape.d != "f32" or shape.c != "f32" or shape.b != shape.a or not self._has_values(shape.a):
            raise Unknown
        places = []
        for ins in run:
            if not all(isinstance(x, Vector) for x in ins.operands):
                raise Unknown
            places.append([self._target(item, o.WORD) for x in ins.operands for item in x.items])
        row = [o.NONE] * o.COLUMNS
        row[o.OP], row[o.TARGET], row[o.OFFSET], row[o.OTHER] = o.MMA, len(self.plan), len(places[0]), shape.k
        self.plan += [place for one in places for place in one]
        row[o.COMBINE] = len(self.plan)
        return row

    def _words(self, op: int, where: object, items: object, flags: int = 0) -> list[int]:
        """An access to shared memory of words in these registers."""
        at, width, offset = self._address(where)
        places = [self._target(x, o.WORD) for x in (items.items if isinstance(items, Vector) else (items,))]
        row = self._row(op, len(self.plan), o.WORD, [])
        self.plan += places
        row[o.A], row[o.A_WIDTH], row[o.OFFSET] = at, width, offset
        row[o.COMBINE], row[o.FLAGS] = len(self.plan), flags
        return row

    def _matrix(self, ins: Instruction) -> list[int]:
        loads = ins.root == "ldmatrix"
        if not {"sync", "aligned", "m8n8", "shared", "b16"} <= set(ins.parts):
            raise Unknown
        where, items = ins.operands[1 if loads else 0], ins.operands[0 if loads else 1]
        row = self._words(o.LDMATRIX if loads else o.STMATRIX, where, items, 8 * ins.has("trans"))
        if ins.parts[4] != f"x{row[o.COMBINE] - row[o.TARGET]}":
            raise Unknown
        return row

    def _access(self, ins: Instruction) -> list[int]:
        loads = ins.root == "ld"
        where, items = ins.operands[1 if loads else 0], ins.operands[0 if loads else 1]
        vector = (f"v{len(items.items)}",) if isinstance(items, Vector) else ()
        if ins.parts[2:] not in [(*vector, kind) for kind in ("b32", "u32", "s32", "f32")]:
            raise Unknown
        row = self._words(o.LOAD if loads else o.STORE, where, items)
        self.touches = True
        return row

    def _of_mbarrier(self, ins: Instruction) -> list[int]:
        """``mbarrier.init``, ``mbarrier.arrive`` and waits for a parity."""
        operands, kind = list(ins.operands), ins.parts[1]
        if {"relaxed", "noComplete"} & set(ins.parts) or ins.parts[-1] != "b64":
            raise Unknown
        row = [o.NONE] * o.COLUMNS
        row[o.FLAGS] = 0
        if kind in ("try_wait", "test_wait") and "parity" in ins.parts:
            row[o.OP], row[o.FLAGS] = o.MBARRIER_WAIT, 16 * (kind == "try_wait")
            row[o.TARGET] = self._target(operands.pop(0), o.BIT)
        elif kind == "arrive":
            row[o.OP], row[o.FLAGS] = o.MBARRIER_ARRIVE, 16 * ins.has("expect_tx")
            token = None if isinstance(operands[0], Address) else operands.pop(0)
            if token is not None and not isinstance(token, Sink):
                row[o.TARGET] = self._target(token, o.LONG)
        elif kind == "init":
            row[o.OP] = o.MBARRIER_INIT
        else:
            raise Unknown
        row[o.A], row[o.A_WIDTH], row[o.OFFSET] = self._address(operands[0])
        if len(operands) > 1:
            row[o.B] = self.place(operands[1], o.WORD)
        elif row[o.FLAGS]:
            raise Unknown
        return row

    def _fence(self, ins: Instruction) -> list[int]:
        """Fences for the async proxy and of mbarriers' initialisations, and programmatic dependent launch."""
        row = [o.NONE] * o.COLUMNS
        if ins.parts[:3] == ("fence", "proxy", "async") and len(ins.parts) == 4 and "shared" in ins.parts[3]:
            row[o.OP] = o.PROXY_FENCE
        elif ins.root == "fence" and ins.has("mbarrier_init"):
            row[o.OP] = o.INIT_FENCE
        elif ins.root == "griddepcontrol":
            row[o.OP] = o.GRID_WAIT if ins.has("wait") else o.GRID_LAUNCH
        else:
            raise Unknown
        return row

    def _limit(self, count: int) -> list[int]:
        """``setmaxnreg``."""
        if not register_file.allowed(count):
            raise Unknown
        row = [o.NONE] * o.COLUMNS
        row[o.OP], row[o.OFFSET] = o.SET_LIMIT, count
        return row

    def _named(self, ins: Instruction) -> list[int]:
        """``bar.sync``, ``bar.arrive``, and the cluster barrier."""
        if ins.parts[:2] == ("barrier", "cluster"):
            row = [o.NONE] * o.COLUMNS
            row[o.OP] = o.CLUSTER_WAIT if ins.has("wait") else o.CLUSTER_ARRIVE
            row[o.FLAGS] = 16 * ins.has("relaxed")
            return row
        if not {"sync", "arrive"} & set(ins.parts) or {"warp", "cluster", "red"} & set(ins.parts):
            raise Unknown
        row = [o.NONE] * o.COLUMNS
        row[o.OP], row[o.FLAGS] = o.BAR, 16 * ins.has("arrive")
        row[o.A] = self.place(ins.operands[0], o.WORD)
        if len(ins.operands) > 1:
            row[o.B] = self.place(ins.operands[1], o.WORD)
        return row

    def _address(self, where: object) -> tuple[int, int, int]:
        """The place and width of an address in a register, and what is added to it."""
        if not isinstance(where, Address) or not isinstance(where.base, Reg) or where.coords:
            raise Unknown
        width = {"b32": o.WORD, "b64": o.LONG}.get(where.base.cls)
        if width is None:
            raise Unknown
        return self.place(where.base, width), width, where.offset

    def _of_warpgroup(self, ins: Instruction) -> list[int]:
        """``wgmma``: its issue, fence, commit and wait."""
        row = [o.NONE] * o.COLUMNS
        if ins.has("fence"):
            row[o.OP] = o.WGMMA_FENCE
        elif ins.has("commit_group"):
            row[o.OP] = o.WGMMA_COMMIT
        elif ins.has("wait_group") and isinstance(ins.operands[0], Imm):
            row[o.OP], row[o.OFFSET] = o.WGMMA_WAIT, ins.operands[0].value
        elif ins.has("mma_async"):
            return self._wgmma(ins)
        else:
            raise Unknown
        return row

    def _wgmma(self, ins: Instruction) -> list[int]:
        target, a, b, scale = ins.operands[:4]
        if isinstance(a, Vector) or not isinstance(scale, Reg):
            raise Unknown
        shape = wgmma.parse_opcode(ins.opcode)
        scales = tuple(x.value for x in ins.operands[4:] if isinstance(x, Imm))
        size = tensor_core.OPERAND_BITS[shape.a] // 8
        transposed = scales[2:] if len(scales) == 4 else (0, 0)
        if size != tensor_core.OPERAND_BITS[shape.b] // 8 or (size != 2 and any(transposed)):
            raise Unknown
        model = tensor_core.ACCUMULATION.get(("wgmma", shape.a), tensor_core.Accumulation(0, 0))
        plain = shape.accumulator == "f32" and shape.a == shape.b and scales[:2] == (1, 1) and model.group
        self.plan += [
            shape.n,
            size,
            *map(int, map(bool, transposed)),
            model.group,
            model.bits,
            model.fraction,
        ]
        row = self._row(o.WGMMA, len(self.plan), o.WORD, [(a, o.LONG), (b, o.LONG), (scale, o.BIT)])
        row[o.OFFSET] = int(bool(plain) and self._has_values(shape.a))
        self.plan += target.indices
        row[o.COMBINE] = len(self.plan)
        return row

    def _has_values(self, kind: str) -> bool:
        """True if the table of values is, or may be, that of operands of a type."""
        if kind not in ("f16", "bf16") or self.values not in (None, kind):
            return False
        self.values = kind
        return True
