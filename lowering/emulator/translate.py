"""Translation of PTX arithmetic into Python source over NumPy arrays of 32 lanes.

Each instruction that only touches registers becomes one or more statements ``R[d] = expression``. Registers
are never modified in place, so a move is an alias. A guard or a partial active mask turns the assignment into
``where(mask, expression, R[d])``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import alu, half
from .forms import missing, unknown_modifiers
from .ptx import TYPE_BYTES, Imm, Instruction, Kernel, Pair, Reg, Sink, Special, Symbol, Vector
from .reports import Unsupported
from .semantics import arithmetic, float64, integer, numeric
from .translate_convert import NUMPY, conversion
from .translate_integer import TRANSLATIONS, translation

LANES = 32
DTYPE = {name: getattr(np, value) for name, value in NUMPY.items()}
CLASS_DTYPE = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


class Names:
    """Global names of translated code: helper functions and the constants of one kernel."""

    def __init__(self, symbol_value: Callable[[Symbol], int]):
        self.symbol_value = symbol_value
        self.constants: dict[tuple[str, int | float], str] = {}
        self.globals: dict[str, object] = {
            "where": np.where,
            "alu": alu,
            "half": half,
            "numeric": numeric,
            "arithmetic": arithmetic,
            "float64": float64,
            "integer": integer,
            "np": np,
            **{f"_{n}": getattr(np, n) for n in set(NUMPY.values())},
        }

    def constant(self, dtype: str, value: int | float) -> str:
        """Name of a 32-lane array that holds ``value``."""
        key = (dtype, value)
        if key not in self.constants:
            name = f"K{len(self.constants)}"
            np_type = np.dtype(dtype)
            if np_type.kind in "ui":
                bits = int(value) & ((1 << (8 * np_type.itemsize)) - 1)
                array = np.full(LANES, bits, dtype=f"u{np_type.itemsize}").view(np_type)
            else:
                array = np.full(LANES, value, dtype=np_type)
            array.setflags(write=False)
            self.constants[key] = name
            self.globals[name] = array
        return self.constants[key]


class Translator:
    """Turns register instructions of one kernel into Python statements."""

    def __init__(self, kernel: Kernel, names: Names):
        self.kernel, self.names = kernel, names

    def read(self, operand: object, kind: str) -> str:
        """Expression for ``operand`` as an array of PTX type ``kind``."""
        dtype = NUMPY[kind]
        if isinstance(operand, Reg):
            if operand.cls == "pred":
                return f"(~R[{operand.index}])" if operand.negated else f"R[{operand.index}]"
            have, want = TYPE_BYTES[operand.cls], TYPE_BYTES[kind]
            if have == want:
                plain = dtype.startswith("uint")
                return f"R[{operand.index}]" if plain else f"R[{operand.index}].view(_{dtype})"
            if have > want:
                return f"R[{operand.index}].astype(_{dtype})"
            raise Unsupported(f"register {operand.name} is narrower than {kind}")
        if isinstance(operand, Imm):
            return self._immediate(operand, kind, dtype)
        if isinstance(operand, Special):
            if operand.name in ("%clock", "%clock64", "%globaltimer"):
                return f"np.full({LANES}, w.machine.step, _{dtype})"
            return f"S[{operand.name!r}].astype(_{dtype})"
        if isinstance(operand, Symbol):
            name = self.names.constant(dtype, self.names.symbol_value(operand))
            variable = self.kernel.variables.get(operand.name)
            if variable is not None and variable.space == "shared":
                return f"({name} + S['window'].astype(_{dtype}))"
            return name
        raise Unsupported(f"operand {operand!r}")

    def _immediate(self, operand: Imm, kind: str, dtype: str) -> str:
        if dtype == "bool_":
            return self.names.constant("bool", bool(operand.value))
        if kind in ("f32", "f64"):
            bits = operand.float_bits or 64
            raw = np.array([operand.value], dtype=f"uint{bits}").view(f"float{bits}")[0]
            if not operand.float_bits:
                raw = np.float64(operand.value)
            name = self.names.constant(
                f"uint{TYPE_BYTES[kind] * 8}",
                int(np.array([raw], dtype=dtype).view(f"uint{TYPE_BYTES[kind] * 8}")[0]),
            )
            return f"{name}.view(_{dtype})"
        return self.names.constant(dtype, operand.value)

    def write(self, target: object, expression: str, kind: str, guard: str | None) -> list[str]:
        """Statements that assign ``expression`` (an array of PTX type ``kind``) to a destination."""
        if isinstance(target, Sink):
            return []
        if not isinstance(target, Reg):
            raise Unsupported(f"destination {target!r}")
        if target.cls != "pred":
            have, want = TYPE_BYTES[target.cls], TYPE_BYTES[kind]
            unsigned = f"_uint{have * 8}"
            if have == want:
                if not NUMPY[kind].startswith("uint"):
                    expression = f"({expression}).view({unsigned})"
            elif have > want:
                expression = f"({expression}).astype({unsigned})"
            else:
                raise Unsupported(f"register {target.name} is narrower than {kind}")
        if guard:
            expression = f"where({guard}, {expression}, R[{target.index}])"
        return [f"R[{target.index}] = {expression}"]

    def statements(self, ins: Instruction, guard: str | None) -> list[str]:
        """Statements for ``ins`` under the mask expression ``guard`` (None: all lanes).

        Raises :class:`Unsupported` for a form of it that is not modelled.
        """
        extra = unknown_modifiers(ins)
        if extra:
            raise Unsupported(missing(ins) or f"no {extra}")
        special = translation(ins)
        if special is not None:
            return special(self, ins, guard)
        return getattr(self, "_op_" + ins.root)(ins, guard)

    def kind(self, ins: Instruction) -> str:
        """The last PTX type in the opcode."""
        for part in reversed(ins.parts[1:]):
            if part in NUMPY:
                return part
        raise Unsupported("no type")

    def _float(self, ins: Instruction, kind: str, template: str, count: int, guard: str | None) -> list[str]:
        """A float operation on ``count`` sources with rounding, .ftz and .sat handled around ``template``."""
        template = self._rounded(ins, kind, template, count)
        flush = ins.has("ftz") and kind == "f32"
        sources = [self.read(o, kind) for o in ins.operands[1 : 1 + count]]
        if flush:
            sources = [f"alu.ftz({s})" for s in sources]
        result = template.format(*sources)
        if flush:
            result = f"alu.ftz({result})"
        if ins.has("sat"):
            result = f"alu.saturate({result})"
        return self.write(ins.operands[0], result, kind, guard)

    def _halves(self, ins: Instruction, kind: str, name: str, count: int, guard: str | None) -> list[str]:
        sources = ", ".join(self.read(o, kind) for o in ins.operands[1 : 1 + count])
        if name in ("min", "max") and ins.has("NaN"):
            name += ".NaN"
        flags = " ".join(f for f in ("sat", "relu", "ftz") if ins.has(f))
        call = f"half.arithmetic({name!r}, {kind!r}, {flags!r}, {sources})"
        return self.write(ins.operands[0], call, kind, guard)

    def _rounded(self, ins: Instruction, kind: str, template: str, count: int) -> str:
        """``template``, or the same operation with the directed rounding that the opcode asks for."""
        rounding = next((r for r in ("rz", "rm", "rp") if ins.has(r)), None)
        if rounding is None:
            return template
        if kind not in ("f32", "f64"):
            raise Unsupported(f"rounding of {kind} arithmetic other than .rn")
        name = "fma" if ins.root == "mad" else ins.root
        where = "arithmetic" if kind == "f32" else "float64"
        return f"{where}.directed({name!r}, {rounding!r}, {', '.join(['{}'] * count)})"

    def _binary(self, ins: Instruction, symbol: str, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in _HALVES:
            return self._halves(ins, kind, ins.root, 2, guard)
        if kind in ("f32", "f64"):
            return self._float(ins, kind, f"({{}} {symbol} {{}})", 2, guard)
        if ins.has("sat"):
            if kind != "s32":
                raise Unsupported(f"no .sat of {kind}")
            a, b = (self.read(o, "s32") for o in ins.operands[1:3])
            return self.write(ins.operands[0], f"alu.add_sat_s32({a}, {b}, {symbol}1)", "s32", guard)
        bits = "b" + kind[1:]
        a, b = (self.read(o, bits) for o in ins.operands[1:3])
        return self.write(ins.operands[0], f"({a} {symbol} {b})", bits, guard)

    def _op_add(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._binary(ins, "+", guard)

    def _op_sub(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._binary(ins, "-", guard)

    def product(self, ins: Instruction, kind: str) -> tuple[str, str]:
        """Expression and type of the integer product of mul and mad."""
        if ins.has("wide"):
            wide = kind[0] + str(2 * int(kind[1:]))
            a, b = (f"{self.read(o, kind)}.astype(_{NUMPY[wide]})" for o in ins.operands[1:3])
            return f"({a} * {b})", wide
        if ins.has("hi"):
            if kind[1:] == "64":
                a, b = (self.read(o, "u64") for o in ins.operands[1:3])
                return f"alu.mul_hi_{kind}({a}, {b})", "u64"
            wide = NUMPY[kind[0] + str(2 * int(kind[1:]))]
            a, b = (f"{self.read(o, kind)}.astype(_{wide})" for o in ins.operands[1:3])
            return f"(({a} * {b}) >> _{wide}({kind[1:]})).astype(_{NUMPY[kind]})", kind
        bits = "b" + kind[1:]
        a, b = (self.read(o, bits) for o in ins.operands[1:3])
        return f"({a} * {b})", bits

    def _op_mul(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in _HALVES:
            return self._halves(ins, kind, "mul", 2, guard)
        if kind in ("f32", "f64"):
            return self._float(ins, kind, "({} * {})", 2, guard)
        expression, kind = self.product(ins, kind)
        return self.write(ins.operands[0], expression, kind, guard)

    def _op_mad(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in ("f32", "f64"):
            return self._op_fma(ins, guard)
        expression, kind = self.product(ins, kind)
        addend = self.read(ins.operands[3], kind)
        if ins.has("sat"):
            if kind != "s32" or not ins.has("hi"):
                raise Unsupported("no .sat but of mad.hi.s32")
            return self.write(ins.operands[0], f"alu.add_sat_s32({expression}, {addend})", kind, guard)
        return self.write(ins.operands[0], f"({expression} + {addend})", kind, guard)

    def _op_fma(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in _HALVES:
            return self._halves(ins, kind, "fma", 3, guard)
        if kind == "f64":
            return self._float(ins, kind, "float64.fma({}, {}, {})", 3, guard)
        return self._float(ins, kind, "alu.fma32({}, {}, {})", 3, guard)

    def _op_div(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in ("f32", "f64"):
            return self._float(ins, kind, "({} / {})", 2, guard)
        name = "div_signed" if kind[0] == "s" else "div_unsigned"
        a, b = (self.read(o, kind) for o in ins.operands[1:3])
        return self.write(ins.operands[0], f"alu.{name}({a}, {b})", kind, guard)

    def _op_rem(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        name = "rem_signed" if kind[0] == "s" else "rem_unsigned"
        a, b = (self.read(o, kind) for o in ins.operands[1:3])
        return self.write(ins.operands[0], f"alu.{name}({a}, {b})", kind, guard)

    def _unary(self, ins: Instruction, template: str, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        return self.write(ins.operands[0], template.format(self.read(ins.operands[1], kind)), kind, guard)

    def _op_neg(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in _HALVES:
            return self._halves(ins, kind, "neg", 1, guard)
        return (
            self._float(ins, kind, "(-{})", 1, guard) if kind[0] == "f" else self._unary(ins, "(-{})", guard)
        )

    def _op_abs(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in _HALVES:
            return self._halves(ins, kind, "abs", 1, guard)
        if kind[0] == "f":
            return self._float(ins, kind, "np.abs({})", 1, guard)
        return self._unary(ins, "np.abs({})", guard)

    def _extreme(self, ins: Instruction, name: str, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in _HALVES:
            return self._halves(ins, kind, name, 2, guard)
        if kind[0] == "f":
            suffix = "_nan" if ins.has("NaN") else ""
            template = f"alu.f{name}{suffix}({{}}, {{}})"
            if len(ins.operands) == 4:
                template = f"alu.f{name}{suffix}({template}, {{}})"
            return self._float(ins, kind, template, len(ins.operands) - 1, guard)
        a, b = (self.read(o, kind) for o in ins.operands[1:3])
        result = f"np.{name}imum({a}, {b})"
        if ins.has("relu"):
            result = f"np.maximum({result}, {self.names.constant(NUMPY[kind], 0)})"
        return self.write(ins.operands[0], result, kind, guard)

    def _op_min(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._extreme(ins, "min", guard)

    def _op_max(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._extreme(ins, "max", guard)

    def _logic(self, ins: Instruction, symbol: str, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        a, b = (self.read(o, kind) for o in ins.operands[1:3])
        return self.write(ins.operands[0], f"({a} {symbol} {b})", kind, guard)

    def _op_and(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._logic(ins, "&", guard)

    def _op_or(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._logic(ins, "|", guard)

    def _op_xor(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._logic(ins, "^", guard)

    def _op_not(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._unary(ins, "(~{})", guard)

    def _op_cnot(self, ins: Instruction, guard: str | None) -> list[str]:
        dtype = NUMPY[self.kind(ins)]
        return self._unary(ins, f"({{}} == 0).astype(_{dtype})", guard)

    def _shift(self, ins: Instruction, symbol: str, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        value = self.read(ins.operands[1], kind)
        amount = self.read(ins.operands[2], "u32")
        dtype = NUMPY[kind]
        if isinstance(ins.operands[2], Imm):
            amount = self.names.constant(dtype, min(ins.operands[2].value & 0xFFFFFFFF, 64))
        elif TYPE_BYTES[kind] == 2:  # a 32-bit amount may be lost in 16 bits
            amount = f"np.minimum({amount}, {self.names.constant('uint32', 64)}).astype(_{dtype})"
        elif dtype != "uint32":
            amount = f"{amount}.astype(_{dtype})"
        return self.write(ins.operands[0], f"({value} {symbol} {amount})", kind, guard)

    def _op_shl(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._shift(ins, "<<", guard)

    def _op_shr(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._shift(ins, ">>", guard)

    def _op_mov(self, ins: Instruction, guard: str | None) -> list[str]:
        target, source = ins.operands
        if ins.parts[-1] == "b128":
            return self._move_128(target, source, guard)
        kind = self.kind(ins)
        if isinstance(target, Vector):
            return self._unpack(target, source, kind, guard)
        if isinstance(source, Vector):
            bits = 8 * TYPE_BYTES[kind] // len(source.items)
            wide = NUMPY[f"b{8 * TYPE_BYTES[kind]}"]
            pieces = [f"{self.read(item, f'b{bits}')}.astype(_{wide})" for item in source.items]
            shifted = [f"({piece} << _{wide}({bits * i}))" if i else piece for i, piece in enumerate(pieces)]
            return self.write(target, f"({' | '.join(shifted)})", f"b{8 * TYPE_BYTES[kind]}", guard)
        kind = kind if kind == "pred" or isinstance(source, Imm) else "b" + str(8 * TYPE_BYTES[kind])
        return self.write(target, self.read(source, kind), kind, guard)

    def _move_128(self, target: object, source: object, guard: str | None) -> list[str]:
        """``mov.b128``: of a register, or of two 64-bit registers in or out."""
        if isinstance(target, Vector):
            lines = [f"t = R[{getattr(source, 'index', None)}]"]
            for i, item in enumerate(target.items):
                lines += self.write(item, f"t[:, {i}]", "b64", guard)
            return lines
        if not isinstance(target, Reg) or target.cls != "b128":
            raise Unsupported(f"destination {target!r}")
        value = f"R[{getattr(source, 'index', None)}]"
        if isinstance(source, Vector):
            low, high = (self.read(item, "b64") for item in source.items)
            value = f"np.stack([{low}, {high}], axis=1)"
        if guard:
            value = f"where(({guard})[:, None], {value}, R[{target.index}])"
        return [f"R[{target.index}] = {value}"]

    def _unpack(self, target: Vector, source: object, kind: str, guard: str | None) -> list[str]:
        bits = 8 * TYPE_BYTES[kind] // len(target.items)
        wide = f"b{8 * TYPE_BYTES[kind]}"
        value = self.read(source, wide)
        lines = [f"t = {value}"]
        for i, item in enumerate(target.items):
            shifted = f"(t >> _{NUMPY[wide]}({bits * i}))" if i else "t"
            lines += self.write(item, f"{shifted}.astype(_uint{bits})", f"b{bits}", guard)
        return lines

    def _op_selp(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        a, b = (self.read(o, kind) for o in ins.operands[1:3])
        return self.write(
            ins.operands[0], f"where({self.read(ins.operands[3], 'pred')}, {a}, {b})", kind, guard
        )

    def _comparison(self, ins: Instruction, at: int) -> str:
        op, kind = ins.parts[1], self.kind(ins)
        if kind == "pred" and ins.parts[-1] == "pred":
            raise Unsupported("comparison of predicates")
        a, b = (self.read(o, kind) for o in ins.operands[at : at + 2])
        if kind in _HALVES:
            if kind.endswith("x2"):
                raise Unsupported("packed comparison that is not setp")
            a, b = (f"half.compare_operand({kind!r}, {x})" for x in (a, b))
            return f"alu.compare({op!r}, {a}, {b})"
        if kind in ("f32", "f64"):
            if ins.has("ftz"):
                a, b = f"alu.ftz({a})", f"alu.ftz({b})"
            if op in ("lt", "le", "gt", "ge", "eq"):
                return f"({a} {_COMPARE[op]} {b})"
            return f"alu.compare({op!r}, {a}, {b})"
        return f"({a} {_COMPARE[op]} {b})"

    def _op_setp(self, ins: Instruction, guard: str | None) -> list[str]:
        if self.kind(ins).endswith("x2"):
            return self._packed_setp(ins, guard)
        lines = [f"c = {self._comparison(ins, 1)}"]
        combine = {"and": "&", "or": "|", "xor": "^"}.get(ins.parts[2], "")
        target = ins.operands[0]
        other = f" {combine} {self.read(ins.operands[3], 'pred')}" if combine else ""
        if isinstance(target, Pair):
            lines += [f"d = ~c{other}", f"c = c{other}"]
            return (
                lines
                + self.write(target.first, "c", "pred", guard)
                + self.write(target.second, "d", "pred", guard)
            )
        return lines + self.write(target, f"c{other}", "pred", guard)

    def _packed_setp(self, ins: Instruction, guard: str | None) -> list[str]:
        """``setp`` of f16x2 and bf16x2: a predicate of the low halves, and one of the high ones."""
        kind, target = self.kind(ins), ins.operands[0]
        targets = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
        combine = {"and": " & ", "or": " | ", "xor": " ^ "}.get(ins.parts[2], "")
        other = combine + self.read(ins.operands[3], "pred") if combine else ""
        lines = []
        for name, half_of in zip("cd", ("low", "high"), strict=True):
            a, b = (
                f"half.compare_operand({kind[:-2]!r}, alu.{half_of}({self.read(o, 'b32')}))"
                for o in ins.operands[1:3]
            )
            lines.append(f"{name} = alu.compare({ins.parts[1]!r}, {a}, {b}){other}")
        for name, place in zip("cd", targets, strict=True):
            lines += self.write(place, name, "pred", guard)
        return lines

    def _op_set(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = next(part for part in ins.parts[2:] if part in NUMPY)
        condition = self._comparison(ins, 1)
        combine = {"and": "&", "or": "|", "xor": "^"}.get(ins.parts[2])
        if combine:
            condition = f"({condition} {combine} {self.read(ins.operands[3], 'pred')})"
        true = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF,
                "u16": 0xFFFF, "s16": 0xFFFF}[kind]  # fmt: skip
        bits = f"b{8 * TYPE_BYTES[kind]}"
        one, zero = (self.names.constant(NUMPY[bits], value) for value in (true, 0))
        return self.write(ins.operands[0], f"where({condition}, {one}, {zero})", bits, guard)

    def _op_copysign(self, ins: Instruction, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        sign, value = (self.read(o, kind) for o in ins.operands[1:3])
        return self.write(ins.operands[0], f"np.copysign({value}, {sign})", kind, guard)

    def _approximate(self, ins: Instruction, function: str, guard: str | None) -> list[str]:
        kind = self.kind(ins)
        if kind in _HALVES:
            return self._halves(ins, kind, ins.root, 1, guard)
        template = f"alu.via64({function}, {{}})" if kind == "f32" else f"{function}({{}})"
        return self._float(ins, kind, template, 1, guard)

    def _op_ex2(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._approximate(ins, "np.exp2", guard)

    def _op_lg2(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._approximate(ins, "np.log2", guard)

    def _op_sin(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._approximate(ins, "np.sin", guard)

    def _op_cos(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._approximate(ins, "np.cos", guard)

    def _op_tanh(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._approximate(ins, "np.tanh", guard)

    def _op_rcp(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._approximate(ins, "np.reciprocal", guard)

    def _op_sqrt(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._approximate(ins, "np.sqrt", guard)

    def _op_rsqrt(self, ins: Instruction, guard: str | None) -> list[str]:
        return self._approximate(ins, "alu.rsqrt", guard)

    def _op_cvta(self, ins: Instruction, guard: str | None) -> list[str]:
        """Address windows are disjoint in the emulator, so a conversion adds or removes the window's base."""
        value, base = self.read(ins.operands[1], "u64"), window_of(ins)
        if base:
            symbol = "-" if ins.has("to") else "+"
            value = f"({value} {symbol} {self.names.constant('uint64', base)})"
        return self.write(ins.operands[0], value, "b64", guard)

    def _op_isspacep(self, ins: Instruction, guard: str | None) -> list[str]:
        space = ins.parts[1].split("::")[0]
        value = self.read(ins.operands[1], "u64")
        shift = f"({value} >> _uint64(60))"
        code = (WINDOWS.get(space, 0)) >> 60
        return self.write(ins.operands[0], f"({shift} == {code})", "pred", guard)

    def _op_cvt(self, ins: Instruction, guard: str | None) -> list[str]:
        return self.write(*conversion(self, ins), guard)


# Generic addresses: the top four bits tell the window; global addresses are the process's own.
WINDOWS = {"shared": 1 << 60, "param": 2 << 60, "local": 3 << 60}


def window_of(ins: Instruction) -> int:
    """The base of the window that a ``cvta`` names."""
    for part in ins.parts[1:]:
        space = part.split("::")[0]
        if space in (*WINDOWS, "global", "const"):
            return WINDOWS.get(space, 0)
    raise Unsupported("cvta without a state space")


TRANSLATED = {name.removeprefix("_op_") for name in vars(Translator) if name.startswith("_op_")}
TRANSLATED |= {name.split(".")[0] for name in TRANSLATIONS}
