"""Parser of PTX text: kernels, parameters, registers, instructions with labels and source lines.

Inline assembly blocks ``{ ... }`` get their own scope: registers and labels declared inside are renamed.
Source lines come from ``.loc``; within inline assembly the line of the statement that holds it is kept,
because the compiler numbers the lines of the assembly text itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .call_stacks import Allocation, allocations
from .ptx_operands import REG_CLASS as REG_CLASS
from .ptx_operands import TYPE_BYTES as TYPE_BYTES
from .ptx_operands import Address as Address
from .ptx_operands import Imm as Imm
from .ptx_operands import Operands as Operands
from .ptx_operands import Pair as Pair
from .ptx_operands import Reg as Reg
from .ptx_operands import Scope as Scope
from .ptx_operands import Sink as Sink
from .ptx_operands import Special as Special
from .ptx_operands import Symbol as Symbol
from .ptx_operands import Vector as Vector
from .ptx_operands import registers as registers
from .ptx_text import (
    Function,
    Source,
    Statement,
    closing_brace,
    functions,
    statements,
    tokens,
    without_lines_of,
)
from .reports import PtxError


@dataclass
class Instruction:
    """One instruction: ``opcode`` is the dotted name, ``parts`` its pieces, ``pred`` the guard or None."""

    opcode: str
    parts: tuple[str, ...]
    operands: tuple
    pred: Reg | None
    line: int
    source: Source
    text: str
    label: str | None = None  # branch target

    @cached_property
    def root(self) -> str:
        """First piece of the opcode."""
        return self.parts[0]

    def has(self, part: str) -> bool:
        """True if ``part`` is one of the dotted pieces."""
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
    allocations: tuple[Allocation, ...] = ()  # of shared memory, for names in reports
    carry: Reg | None = None  # the condition code of add.cc and its kind, where one is used
    min_ctas: int = 1  # that an SM must hold


@dataclass
class Module:
    """A parsed PTX file."""

    target: str
    kernels: dict[str, Kernel]
    files: dict[int, str]
    variables: dict[str, Variable]
    functions: dict[str, Function] = field(default_factory=dict)


_DECL = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)(\[(\d*)\])?\s*(?:=\s*\{?([^}]*)\}?)?\s*$"
)
_REG = re.compile(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)$")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[\s\w.]*?\s)?([\w$]+)(?:\[(\d+)\])?\s*$"
)


def parse(text: str) -> Module:
    """Parse PTX ``text``. Raises :class:`PtxError` that names kernel and line of what it cannot read."""
    try:
        return _parse(text)
    except PtxError:
        raise
    except Exception as error:
        raise PtxError(f"cannot read this PTX: {type(error).__name__}: {error}") from error


def _parse(text: str) -> Module:
    target = re.search(r"^\.target\s+([\w]+)", text, re.M)
    files = {int(n): path for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    # Where the DSL knew no line it names its caller: the line before says more.
    text = without_lines_of(text, files, "lowering/compile.py")
    found, text = functions(text)
    module = Module(target.group(1) if target else "", {}, files, {}, found)
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(", text))
    head = text[: entries[0].start()] if entries else text
    for chunk in head.split(";"):
        lines = [part for part in chunk.split("\n") if not part.strip().startswith("//")]
        match = _DECL.search(" ".join(lines).strip())
        if match:
            variable = _variable(match)
            module.variables[variable.name] = variable
    for entry in entries:
        try:
            kernel = _parse_entry(text, entry, module)
        except Exception as error:
            what = str(error) if isinstance(error, PtxError) else f"{type(error).__name__} {error}"
            if not what.startswith("PTX line"):  # of the kernel as a whole
                what = f"PTX line {text.count(chr(10), 0, entry.start()) + 1}: {what}"
            raise PtxError(f"kernel {entry.group(1)}: {what}") from error
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
    kernel.allocations = allocations(kernel.name)
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
    if resident := re.search(r"\.minnctapersm\s+(\d+)", directives):
        kernel.min_ctas = max(1, int(resident.group(1)))
    body = text[start + 1 : closing_brace(text, start)]
    reader = _Reader(kernel, module)
    reader.body(statements(body, text.count("\n", 0, start) + 1), Scope(None, ""))
    return kernel


_BRANCH_TABLE = re.compile(r"\.branchtargets\s+(.*)$")


class _Reader:
    """Reads the body of one kernel; calls of functions are replaced by copies of their bodies."""

    def __init__(self, kernel: Kernel, module: Module):
        self.kernel, self.module = kernel, module
        self.scopes = 0  # opened so far: their numbers make names unique
        self.calls: list[str] = []  # functions whose copies are being read, outermost first

    def body(self, found: list[Statement], top: Scope) -> None:
        """Read statements whose outermost scope is ``top``."""
        scopes = self._scopes(found, top)
        scope = top
        for i, statement in enumerate(found):
            text = statement.text
            if text == "{":
                scope = scopes[i]
            elif text == "}":
                scope = scope.parent or scope
            elif text.endswith(":"):
                self.kernel.labels[scope.label(text[:-1])] = len(self.kernel.instructions)
            else:
                self._read(scope, statement)

    def _scopes(self, found: list[Statement], top: Scope) -> dict[int, Scope]:
        """Scope of each ``{`` statement, with the labels declared in it (labels may be used before)."""
        scopes, stack = {}, [top]
        for i, statement in enumerate(found):
            if statement.text == "{":
                stack.append(self.scope(stack[-1]))
                scopes[i] = stack[-1]
            elif statement.text == "}":
                if len(stack) == 1:
                    raise PtxError(f"PTX line {statement.line}: this brace closes nothing")
                stack.pop()
            elif statement.text.endswith(":"):
                stack[-1].labels.add(statement.text[:-1])
                table = _BRANCH_TABLE.match(found[i + 1].text) if i + 1 < len(found) else None
                if table:
                    stack[-1].tables[statement.text[:-1]] = [n.strip() for n in table.group(1).split(",")]
        return scopes

    def scope(self, parent: Scope) -> Scope:
        """A new scope inside ``parent``."""
        self.scopes += 1
        return Scope(parent, f"{self.scopes}@")

    def _read(self, scope: Scope, statement: Statement) -> None:
        """Read a statement; whatever goes wrong is an error that names its line, in PTX and in Python."""
        try:
            self._statement(scope, statement)
        except Exception as error:
            if isinstance(error, PtxError) and str(error).startswith("PTX line"):
                raise  # of a statement in a function
            number, line, _ = statement.source
            source = f", {self.module.files[number]}:{line}" if number in self.module.files else ""
            what = str(error) if isinstance(error, PtxError) else f"{type(error).__name__} {error}"
            text = f"PTX line {statement.line}{source}: cannot read {statement.text[:160]!r}: {what}"
            raise PtxError(text) from error

    def _statement(self, scope: Scope, statement: Statement) -> None:
        text, kernel = statement.text, self.kernel
        if text.startswith(".reg"):
            _declare(kernel, scope, text)
        elif text.startswith(".param"):
            self.parameter(scope, text)
        elif text.startswith("."):
            match = _DECL.search(text)
            if match:
                variable = _variable(match)
                kernel.variables[variable.name] = variable
            elif not text.startswith((".pragma", ".branchtargets", ".loc", ".file", ".callprototype")):
                raise PtxError("directive not understood")
        else:
            ins = _instruction(kernel, scope, statement)
            if ins.root == "brx":
                self._branches(scope, ins)
            elif ins.root == "call" and not any(getattr(o, "name", "") == "vprintf" for o in ins.operands):
                self._call(scope, ins)
            elif ins.root == "ret" and scope.end is not None:
                branch = ("bra", ("bra",), (), ins.pred, ins.line, ins.source, ins.text, scope.end)
                kernel.instructions.append(Instruction(*branch))
            else:
                kernel.instructions.append(ins)

    def parameter(self, scope: Scope, text: str) -> None:
        """``.param`` in a body or of a function: a variable in local memory."""
        match = _PARAM.search(text)
        if match is None:
            raise PtxError("parameter not understood")
        align, kind, name, count = match.groups()
        unit = TYPE_BYTES[kind]
        self.scopes += 1
        unique = scope.symbols[name] = f"{name}@{self.scopes}"
        self.kernel.variables[unique] = Variable(unique, "local", unit * int(count or 1), int(align or unit))

    def _branches(self, scope: Scope, ins: Instruction) -> None:
        """``brx.idx``: a branch for each entry of its table; an index beyond it is an error."""
        index, table = ins.operands
        targets = scope.table(getattr(table, "name", ""))
        if not targets or ins.opcode not in ("brx.idx", "brx.idx.uni"):
            raise PtxError("a branch without a known table of targets")
        place, add = (ins.line, ins.source, ins.text), self.kernel.instructions.append
        around = f"around {len(self.kernel.instructions)}@"
        if ins.pred is not None:
            opposite = Reg(ins.pred.index, ins.pred.cls, ins.pred.name, not ins.pred.negated)
            add(Instruction("bra", ("bra",), (), opposite, *place, around))
        add(Instruction("brx.check", ("brx", "check"), (index, Imm(len(targets))), None, *place))
        for i, target in enumerate(targets[:-1]):
            equal = Reg(len(self.kernel.reg_classes), "pred", f"{ins.text} = {i}")
            self.kernel.reg_classes.append("pred")
            parts = ("setp", "eq", "u32")
            add(Instruction("setp.eq.u32", parts, (equal, index, Imm(i)), None, *place))
            add(Instruction("bra", ("bra",), (), equal, *place, scope.label(target)))
        add(Instruction("bra", ("bra",), (), None, *place, scope.label(targets[-1])))
        self.kernel.labels[around] = len(self.kernel.instructions)

    def _call(self, scope: Scope, ins: Instruction) -> None:
        """A call of a function that this PTX holds: its body is copied here."""
        lists = [o.items for o in ins.operands if isinstance(o, Vector)]
        names = [o.name for o in ins.operands if isinstance(o, Symbol)]
        function = self.module.functions.get(names[0] if names else "")
        if function is None:
            what = (
                f"the PTX has no body of {names[0]}" if names else "calls through a pointer are not modelled"
            )
            raise PtxError(what)
        if function.name in self.calls:
            raise PtxError(f"{function.name} calls itself; recursion is not modelled")
        results = lists.pop(0) if function.results else ()
        inputs = lists.pop(0) if function.inputs else ()
        if len(results) != len(function.results) or len(inputs) != len(function.inputs):
            raise PtxError(f"{function.name} has {len(function.inputs)} parameters; {len(inputs)} were given")
        inner = self.scope(Scope(None, ""))
        inner.end = f"end of {function.name} {self.scopes}@"
        place, add = (ins.line, ins.source, ins.text), self.kernel.instructions.append
        if ins.pred is not None:
            opposite = Reg(ins.pred.index, ins.pred.cls, ins.pred.name, not ins.pred.negated)
            add(Instruction("bra", ("bra",), (), opposite, *place, inner.end + " skipped"))
        moves = []
        for declared, given in zip((*function.results, *function.inputs), (*results, *inputs), strict=True):
            if declared.startswith(".reg"):
                _declare(self.kernel, inner, declared)
                moves.append((inner.reg(declared.split()[-1]), given))
            elif isinstance(given, Symbol):
                match = _PARAM.search(declared)
                inner.symbols[match.group(3) if match else declared.split()[-1]] = given.name
            else:
                raise PtxError(f"argument {given!r} of a .param parameter")
        for formal, given in moves[sum(r.startswith(".reg") for r in function.results) :]:
            add(_move(formal, given, place))
        self.calls.append(function.name)
        self.body(function.body, inner)
        self.calls.pop()
        self.kernel.labels[inner.end] = len(self.kernel.instructions)
        for formal, given in moves[: sum(r.startswith(".reg") for r in function.results)]:
            add(_move(given, formal, place))
        self.kernel.labels[inner.end + " skipped"] = len(self.kernel.instructions)


def _move(target: Any, source: Any, place: tuple) -> Instruction:
    kind = target.cls
    return Instruction(f"mov.{kind}", ("mov", kind), (target, source), None, *place)


def _declare(kernel: Kernel, scope: Scope, text: str) -> None:
    """``.reg``; the registers of a vector are called as its elements are: ``%v.x``."""
    match = _REG.match(text)
    if match is None or match.group(2) not in TYPE_BYTES:
        raise PtxError("registers of an unknown type")
    cls = REG_CLASS[TYPE_BYTES[match.group(2)]]
    elements = "xyzw"[: int(match.group(1) or 0)]
    for item in match.group(3).split(","):
        item = item.strip()
        ranged = re.match(r"([%\w$]+)<(\d{1,6})>", item)
        names = [f"{ranged.group(1)}{n}" for n in range(int(ranged.group(2)))] if ranged else [item]
        for name in names:
            parts = [f"{name}.{element}" for element in elements] or [name]
            for part in parts:
                scope.regs[part] = Reg(len(kernel.reg_classes), cls, part)
                kernel.reg_classes.append(cls)
            if elements:
                scope.regs[name] = Vector(tuple(scope.regs[part] for part in parts))


def _instruction(kernel: Kernel, scope: Scope, statement: Statement) -> Instruction:
    text = statement.text
    pred = None
    guard = re.match(r"@(!?)([%\w$]+)\s+", text)
    if guard:
        found = scope.reg(guard.group(2))
        if not isinstance(found, Reg):
            raise PtxError(f"unknown predicate {guard.group(2)}")
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
    operands = Operands(tokens(rest), scope).all()
    operands = _with_carry(kernel, parts, operands)
    if parts[0] in ("ld", "st") and any(p.split("::")[0] == "param" for p in parts):
        base = next((getattr(o.base, "name", "") for o in operands if isinstance(o, Address)), "")
        if base in kernel.variables:  # a parameter of a call, which lies in local memory
            parts = tuple("local" if p.split("::")[0] == "param" else p for p in parts)
            opcode = ".".join(parts)
    elif any(isinstance(o, Symbol) and "@" in o.name for o in operands):
        if parts[0] != "call":
            raise PtxError("the address of a parameter of a call or function is not modelled")
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
