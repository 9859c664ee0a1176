"""Parser of PTX text: kernels, parameters, registers, instructions with labels and source lines.

Inline assembly blocks ``{ ... }`` get their own scope: registers and labels declared inside are renamed.
Source lines come from ``.loc``; within inline assembly the line of the statement that holds it is kept,
because the compiler numbers the lines of the assembly text itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .reports import PtxError

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "s16x2": 4, "u16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
}  # fmt: skip
REG_CLASS = {1: "pred", 2: "b16", 4: "b32", 8: "b64", 16: "b128"}


@dataclass(frozen=True)
class Reg:
    """A register: its number in the kernel's register file and its class (pred, b16, b32, b64, b128)."""

    index: int
    cls: str
    name: str
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """An immediate: Python int (two's complement not applied) or the bits of a float literal."""

    value: int
    float_bits: int = 0  # 32 or 64 where the literal is 0f... or 0d...


@dataclass(frozen=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """Address of a variable or parameter, plus an offset in bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; base is a Reg, Symbol or Imm; ``coords``: second part of a tensor address."""

    base: object
    offset: int = 0
    coords: tuple = ()


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``"""

    items: tuple


@dataclass(frozen=True)
class Pair:
    """``a|b``: two destinations."""

    first: object
    second: object


class Sink:
    """``_``: a destination that is thrown away."""


@dataclass
class Instruction:
    """One instruction: ``opcode`` is the dotted name, ``parts`` its pieces, ``pred`` the guard or None."""

    opcode: str
    parts: tuple[str, ...]
    operands: tuple
    pred: Reg | None
    line: int
    source: tuple[int, int]  # file number, line
    text: str
    label: str | None = None  # branch target

    @cached_property
    def root(self) -> str:
        """First piece of the opcode."""
        return self.parts[0]

    def has(self, part: str) -> bool:
        """Whether ``part`` is one of the dotted pieces."""
        return part in self.parts


@dataclass
class Param:
    """A kernel parameter: offset and size in bytes in the parameter block."""

    name: str
    offset: int
    size: int
    align: int


@dataclass
class Variable:
    """A .shared, .local, .global or .const variable; offset is given when memory is laid out."""

    name: str
    space: str
    size: int
    align: int
    data: bytes = b""
    offset: int = 0


@dataclass
class Kernel:
    """A parsed entry."""

    name: str
    params: list[Param] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    reg_classes: list[str] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    max_threads: int | None = None
    carry: Reg | None = None  # the condition code of add.cc and its kind, where one is used


@dataclass
class Module:
    """A parsed PTX file."""

    target: str
    kernels: dict[str, Kernel]
    files: dict[int, str]
    variables: dict[str, Variable]


_TOKEN = re.compile(
    r"\s*(0[fFdD][0-9a-fA-F]+|-?0[xX][0-9a-fA-F]+U?|-?\d+U?|[%$_A-Za-z][\w$%.]*(?:::\w+)?|[\[\]{}|,+!()<>=-])"
)
_DECL = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)(\[(\d*)\])?\s*(?:=\s*\{?([^}]*)\}?)?\s*$"
)
_REG = re.compile(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[\s\w.]*?\s)?([\w$]+)(?:\[(\d+)\])?\s*$"
)


class _Scope:
    def __init__(self, parent: _Scope | None, tag: str):
        self.parent, self.tag = parent, tag
        self.regs: dict[str, Reg | Vector] = {}
        self.labels: set[str] = set()

    def reg(self, name: str) -> Reg | Vector | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.regs:
                return scope.regs[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.tag + name
            scope = scope.parent
        return name


@dataclass
class _Statement:
    text: str
    line: int
    source: tuple[int, int]


def _statements(text: str, first_line: int) -> list[_Statement]:
    """Split a body into instruction texts, labels ``x:``, ``{`` and ``}``, with line and source."""
    out: list[_Statement] = []
    source = (0, 0)
    in_asm = False
    pending, pending_line = "", first_line
    for number, raw in enumerate(text.split("\n"), first_line):
        if "//" in raw:
            if "begin inline asm" in raw:
                in_asm = True
            elif "end inline asm" in raw:
                in_asm = False
            raw = raw[: raw.index("//")]
        line = raw.strip()
        if not pending and re.match(r"\.loc\s", line):
            if not in_asm:
                numbers = line.replace(",", " ").split()
                if int(numbers[2]) > 0:
                    source = (int(numbers[1]), int(numbers[2]))
            continue
        while line:
            if not pending:
                pending_line = number
            if not pending and line[0] in "{}":
                out.append(_Statement(line[0], number, source))
                line = line[1:].strip()
                continue
            label = re.match(r"([$\w]+):(?!:)\s*", line) if not pending else None
            if label:
                out.append(_Statement(label.group(1) + ":", number, source))
                line = line[label.end() :]
                continue
            end = line.find(";")
            if end < 0:
                pending += line + " "
                break
            out.append(_Statement((pending + line[:end]).strip(), pending_line, source))
            pending, line = "", line[end + 1 :].strip()
    return [s for s in out if s.text]


def parse(text: str) -> Module:
    """Parse PTX ``text``. Raises :class:`PtxError` that names the line of what it cannot read."""
    target = re.search(r"^\.target\s+([\w]+)", text, re.M)
    files = {int(n): path for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    module = Module(target.group(1) if target else "", {}, files, {})
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(", text))
    head = text[: entries[0].start()] if entries else text
    for chunk in head.split(";"):
        lines = [part for part in chunk.split("\n") if not part.strip().startswith("//")]
        match = _DECL.search(" ".join(lines).strip())
        if match:
            variable = _variable(match)
            module.variables[variable.name] = variable
    for entry in entries:
        kernel = _parse_entry(text, entry, module)
        module.kernels[kernel.name] = kernel
    return module


def _variable(match: re.Match) -> Variable:
    space, align, kind, name, array, count, values = match.groups()
    unit = TYPE_BYTES[kind]
    size = unit * (int(count) if count else 0 if array else 1)
    data = b""
    if values and values.strip():
        items = [int(v, 0) for v in values.replace(" ", "").split(",") if v]
        data = b"".join((v & ((1 << (8 * unit)) - 1)).to_bytes(unit, "little") for v in items)
        size = max(size, len(data))
    return Variable(name, space, size, int(align or unit), data)


def _parse_entry(text: str, entry: re.Match, module: Module) -> Kernel:
    close = text.index(")", entry.end())
    kernel = Kernel(entry.group(1), variables=dict(module.variables))
    offset = 0
    for chunk in text[entry.end() : close].split(","):
        chunk = " ".join(chunk.split())
        if not chunk:
            continue
        match = _PARAM.search(chunk)
        if not match:
            raise PtxError(f"parameter not understood: {chunk!r}")
        align, kind, name, count = match.groups()
        unit = TYPE_BYTES[kind]
        size, alignment = unit * int(count or 1), int(align or unit)
        offset = (offset + alignment - 1) // alignment * alignment
        kernel.params.append(Param(name, offset, size, alignment))
        offset += size
    start = text.index("{", close)
    directives = text[close:start]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+([\d,\s]+)", directives)
    if threads:
        sizes = [int(v) for v in threads.group(1).replace(",", " ").split()]
        kernel.max_threads = (
            sizes[0] * (sizes[1] if len(sizes) > 1 else 1) * (sizes[2] if len(sizes) > 2 else 1)
        )
    body = text[start + 1 : _closing_brace(text, start)]
    _parse_body(kernel, _statements(body, text.count("\n", 0, start) + 1))
    return kernel


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group(0) == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError("the body of a kernel has no end")


def _scopes(statements: list[_Statement]) -> dict[int, _Scope]:
    """Scope of each ``{`` statement, with the labels declared in it (labels may be used before)."""
    top = _Scope(None, "")
    scopes, stack = {-1: top}, [top]
    for i, statement in enumerate(statements):
        if statement.text == "{":
            scope = _Scope(stack[-1], f"{i}@")
            scopes[i] = scope
            stack.append(scope)
        elif statement.text == "}":
            stack.pop()
        elif statement.text.endswith(":"):
            stack[-1].labels.add(statement.text[:-1])
    return scopes


def _parse_body(kernel: Kernel, statements: list[_Statement]) -> None:
    scopes = _scopes(statements)
    scope = scopes[-1]
    for i, statement in enumerate(statements):
        text = statement.text
        if text == "{":
            scope = scopes[i]
        elif text == "}":
            scope = scope.parent or scope
        elif text.endswith(":"):
            kernel.labels[scope.label(text[:-1])] = len(kernel.instructions)
        elif text.startswith(".reg"):
            _read(kernel, scope, statement, _declare)
        elif text.startswith("."):
            match = _DECL.search(text)
            if match:
                variable = _variable(match)
                kernel.variables[variable.name] = variable
            elif not text.startswith((".pragma", ".branchtargets", ".loc", ".file", ".param")):
                raise PtxError(f"PTX line {statement.line}: directive not understood: {text}")
        else:
            kernel.instructions.append(_read(kernel, scope, statement, _instruction))


def _read(kernel: Kernel, scope: _Scope, statement: _Statement, read: Callable) -> Any:
    """``read`` of a statement; whatever goes wrong is an error that names its line."""
    try:
        return read(kernel, scope, statement)
    except PtxError:
        raise
    except Exception as error:
        text = f"cannot read {statement.text[:160]!r}: {type(error).__name__} {error}"
        raise PtxError(f"PTX line {statement.line}: {text}") from error


def _declare(kernel: Kernel, scope: _Scope, statement: _Statement) -> None:
    """``.reg``; the registers of a vector are called as its elements are: ``%v.x``."""
    match = _REG.match(statement.text)
    if match is None or match.group(2) not in TYPE_BYTES:
        raise PtxError(f"PTX line {statement.line}: registers of an unknown type: {statement.text}")
    cls = REG_CLASS[TYPE_BYTES[match.group(2)]]
    elements = "xyzw"[: int(match.group(1) or 0)]
    for item in match.group(3).split(","):
        item = item.strip()
        ranged = re.match(r"([%\w$]+)<(\d+)>", item)
        names = [f"{ranged.group(1)}{n}" for n in range(int(ranged.group(2)))] if ranged else [item]
        for name in names:
            parts = [f"{name}.{element}" for element in elements] or [name]
            for part in parts:
                scope.regs[part] = Reg(len(kernel.reg_classes), cls, part)
                kernel.reg_classes.append(cls)
            if elements:
                scope.regs[name] = Vector(tuple(scope.regs[part] for part in parts))


def _instruction(kernel: Kernel, scope: _Scope, statement: _Statement) -> Instruction:
    text = statement.text
    pred = None
    guard = re.match(r"@(!?)([%\w$]+)\s+", text)
    if guard:
        found = scope.reg(guard.group(2))
        if not isinstance(found, Reg):
            raise PtxError(f"PTX line {statement.line}: unknown predicate {guard.group(2)}")
        pred = Reg(found.index, found.cls, found.name, bool(guard.group(1)))
        text = text[guard.end() :]
    opcode, _, rest = text.partition(" ")
    if "\t" in opcode:
        opcode, _, more = opcode.partition("\t")
        rest = more + " " + rest
    parts = tuple(opcode.split("."))
    short = text if len(text) < 160 else text[:157] + "..."
    if parts[0] in ("bra",):
        return Instruction(
            opcode, parts, (), pred, statement.line, statement.source, short, scope.label(rest.strip())
        )
    tokens = _tokens(rest, statement.line)
    operands = _Operands(tokens, kernel, scope, statement.line).all()
    operands = _with_carry(kernel, parts, operands)
    return Instruction(opcode, parts, operands, pred, statement.line, statement.source, short)


def _with_carry(kernel: Kernel, parts: tuple[str, ...], operands: tuple) -> tuple:
    """Operands and the carry flag: a second destination of ``.cc``, a last source of ``addc``."""
    reads, writes = parts[0] in ("addc", "subc", "madc"), "cc" in parts[1:]
    if not (reads or writes):
        return operands
    if kernel.carry is None:
        kernel.carry = Reg(len(kernel.reg_classes), "pred", "CC.CF")
        kernel.reg_classes.append("pred")
    target = Pair(operands[0], kernel.carry) if writes else operands[0]
    return (target, *operands[1:], *((kernel.carry,) if reads else ()))


def _tokens(text: str, line: int) -> list[str]:
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise PtxError(f"PTX line {line}: cannot read {text[at : at + 40]!r}")
        tokens.append(match.group(1))
        at = match.end()
    return tokens


class _Operands:
    """Recursive reader of the operand list of one instruction."""

    def __init__(self, tokens: list[str], kernel: Kernel, scope: _Scope, line: int):
        self.tokens, self.at = tokens, 0
        self.kernel, self.scope, self.line = kernel, scope, line

    def all(self) -> tuple:
        out = []
        while self.at < len(self.tokens):
            out.append(self.one())
            if self.at < len(self.tokens):
                self.expect(",")
        return tuple(out)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, token: str) -> None:
        if self.peek() != token:
            raise PtxError(f"PTX line {self.line}: expected {token!r}, found {self.peek()!r}")
        self.at += 1

    def one(self) -> object:
        token = self.take()
        value: object
        if token in ("{", "("):
            close = "}" if token == "{" else ")"
            items = []
            while self.peek() != close:
                items.append(self.one())
                if self.peek() == ",":
                    self.at += 1
            self.at += 1
            return Vector(tuple(items))
        if token == "[":
            return self.address()
        if token == "!":
            reg = self.one()
            assert isinstance(reg, Reg)
            return Reg(reg.index, reg.cls, reg.name, True)
        value = self.atom(token)
        if isinstance(value, Symbol) and self.peek() == "+":
            self.at += 1
            value = Symbol(value.name, value.offset + self.integer())
        if self.peek() == "|":
            self.at += 1
            return Pair(value, self.one())
        return value

    def integer(self) -> int:
        token = self.take()
        sign = 1
        if token == "-":
            sign, token = -1, self.take()
        return sign * int(token.rstrip("U"), 0)

    def address(self) -> Address:
        base = self.atom(self.take())
        offset, coords = 0, ()
        if self.peek() == "+":
            self.at += 1
            offset = self.integer()
        elif re.match(r"-\d", self.peek()):
            offset = self.integer()
        if self.peek() == ",":
            self.at += 1
            vector = self.one()
            assert isinstance(vector, Vector)
            coords = vector.items
        self.expect("]")
        return Address(base, offset, coords)

    def atom(self, token: str) -> object:
        if token == "_":
            return Sink()
        if token == "-":
            return Imm(-self.integer())
        if re.match(r"0[fF][0-9a-fA-F]{8}$", token):
            return Imm(int(token[2:], 16), 32)
        if re.match(r"0[dD][0-9a-fA-F]{16}$", token):
            return Imm(int(token[2:], 16), 64)
        if re.match(r"-?\d", token):
            return Imm(int(token.rstrip("U"), 0))
        reg = self.scope.reg(token)
        if reg is not None:
            return reg
        if token.startswith("%"):
            return Special(token)
        if token == "WARP_SZ":
            return Imm(32)
        return Symbol(token)


def registers(operand: object) -> list[int]:
    """Numbers of the registers in an operand."""
    if isinstance(operand, Reg):
        return [operand.index]
    if isinstance(operand, Vector):
        return [r for item in operand.items for r in registers(item)]
    if isinstance(operand, Pair):
        return registers(operand.first) + registers(operand.second)
    if hasattr(operand, "base"):
        found = registers(operand.base)
        return found + [r for item in getattr(operand, "coords", ()) for r in registers(item)]
    return []
