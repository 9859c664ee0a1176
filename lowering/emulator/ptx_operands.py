"""Operands of PTX instructions, and the names that a scope knows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def indices(self) -> list[int]:
        """Numbers of the registers, which all items must be."""
        return [item.index for item in self.items]


@dataclass(frozen=True)
class Pair:
    """``a|b``: two destinations."""

    first: object
    second: object


class Sink:
    """``_``: a destination that is thrown away."""


class Scope:
    """Registers, labels, tables and parameters declared between two braces."""

    def __init__(self, parent: Scope | None, tag: str):
        self.parent, self.tag = parent, tag
        self.regs: dict[str, Reg | Vector] = {}
        self.labels: set[str] = set()
        self.tables: dict[str, list[str]] = {}  # of brx.idx
        self.symbols: dict[str, str] = {}  # parameters of calls and functions: their names in the kernel
        self.end: str | None = parent.end if parent is not None else None  # where ``ret`` of a function goes

    def reg(self, name: str) -> Reg | Vector | None:
        """The register or vector of registers ``name``."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.regs:
                return scope.regs[name]
            scope = scope.parent
        return None

    def symbol(self, name: str) -> str:
        """The name in the kernel of a symbol."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.symbols:
                return scope.symbols[name]
            scope = scope.parent
        return name

    def table(self, name: str) -> list[str]:
        """The labels of a ``.branchtargets``."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.tables:
                return scope.tables[name]
            scope = scope.parent
        return []

    def label(self, name: str) -> str:
        """The name in the kernel of a label."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.tag + name
            scope = scope.parent
        return name


class Operands:
    """Recursive reader of the operand list of one instruction."""

    def __init__(self, tokens: list[str], scope: Scope):
        self.tokens, self.at, self.scope = tokens, 0, scope

    def all(self) -> tuple:
        """All operands."""
        out = []
        while self.at < len(self.tokens):
            out.append(self._one())
            if self.at < len(self.tokens):
                self._expect(",")
        return tuple(out)

    def _peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def _take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise PtxError(f"expected {token!r}, found {self._peek()!r}")
        self.at += 1

    def _one(self) -> object:
        token = self._take()
        value: object
        if token in ("{", "("):
            close = "}" if token == "{" else ")"
            items = []
            while self._peek() != close:
                items.append(self._one())
                if self._peek() == ",":
                    self.at += 1
            self.at += 1
            return Vector(tuple(items))
        if token == "[":
            return self._address()
        if token == "!":
            reg = self._one()
            assert isinstance(reg, Reg)
            return Reg(reg.index, reg.cls, reg.name, True)
        value = self._atom(token)
        if isinstance(value, Symbol) and self._peek() == "+":
            self.at += 1
            value = Symbol(value.name, value.offset + self._integer())
        if self._peek() == "|":
            self.at += 1
            return Pair(value, self._one())
        return value

    def _integer(self) -> int:
        token = self._take()
        sign = 1
        if token == "-":
            sign, token = -1, self._take()
        return sign * int(token.rstrip("U"), 0)

    def _address(self) -> Address:
        base = self._atom(self._take())
        offset, coords = 0, ()
        if self._peek() == "+":
            self.at += 1
            offset = self._integer()
        elif re.match(r"-\d", self._peek()):
            offset = self._integer()
        if self._peek() == ",":
            self.at += 1
            vector = self._one()
            assert isinstance(vector, Vector)
            coords = vector.items
        self._expect("]")
        return Address(base, offset, coords)

    def _atom(self, token: str) -> object:
        if token == "_":
            return Sink()
        if token == "-":
            return Imm(-self._integer())
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
        return Symbol(self.scope.symbol(token))


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
