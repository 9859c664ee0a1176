"""A linker for the one kind of object file that the DSL exports: x86-64, large code model.

The DSL exports a compiled host function as a relocatable object. Loading that takes either the
compiler's own JIT linker, which means importing the compiler, or a shared object, which takes a linker
that a user's machine may not have. The objects are simple: no thread-local storage, no COMDAT groups, and
half a dozen kinds of relocation. So this module links them itself, in about a millisecond.

Layout of the result (ELF gABI and the x86-64 psABI, chapters 4 and 5)::

    R    headers, hash table, symbols, strings, relocations, read-only sections
    RX   code
    RW   global offset table, writable sections, dynamic section, zeroed sections

Defined symbols are bound here (as with ``ld -Bsymbolic``). The runtime libraries are named without a
path, so that the result can be carried to another machine: the loader finds them already loaded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from lowering.errors import LinkError

PAGE = 4096

# Section flags and types.
SHF_WRITE, SHF_ALLOC, SHF_EXEC, SHF_TLS = 1, 2, 4, 0x400
SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_RELA, SHT_NOBITS = 1, 2, 3, 4, 8
SHT_INIT_ARRAY, SHT_FINI_ARRAY, SHT_X86_64_UNWIND = 14, 15, 0x70000001
LOADED_TYPES = {SHT_PROGBITS, SHT_NOBITS, SHT_INIT_ARRAY, SHT_FINI_ARRAY, SHT_X86_64_UNWIND}
STB_LOCAL, STB_WEAK = 0, 2
SHN_UNDEF, SHN_ABS, SHN_COMMON = 0, 0xFFF1, 0xFFF2

# Relocations of the object, and the two of the result.
R_64, R_PC32, R_PLT32, R_GOTPCREL = 1, 2, 4, 9
R_PC64, R_GOTOFF64, R_GOT64, R_GOTPC64 = 24, 25, 27, 29
R_GOTPCRELX, R_REX_GOTPCRELX = 41, 42
R_GLOB_DAT, R_RELATIVE = 6, 8
VIA_GOT = {R_GOT64, R_GOTPCREL, R_GOTPCRELX, R_REX_GOTPCRELX}

PF_X, PF_W, PF_R = 1, 2, 4
PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551


@dataclass
class _Section:
    name: str
    kind: int
    flags: int
    align: int
    size: int
    data: bytearray
    relocations: list[tuple[int, int, int, int]] = field(default_factory=list)  # offset, type, symbol, addend
    address: int = 0

    @property
    def segment(self) -> int:
        if self.flags & SHF_EXEC:
            return PF_R | PF_X
        return PF_R | PF_W if self.flags & SHF_WRITE else PF_R


@dataclass(frozen=True)
class _Symbol:
    name: str
    info: int
    section: int
    value: int
    size: int

    @property
    def binding(self) -> int:
        return self.info >> 4


def link_shared(obj: bytes, needed: tuple[str, ...]) -> bytes:
    """Link one x86-64 relocatable object into a shared object.

    :param obj: the object file, as the DSL's ``export_to_c`` writes it.
    :param needed: names of the libraries that define its undefined symbols, without a path.
    :returns: the bytes of the shared object. All its global symbols are exported.
    :raises LinkError: if the object is of another kind or holds a construct not listed above.
    """
    sections, symbols = _parse(obj)
    return _Linker(sections, symbols, needed).link()


def _parse(obj: bytes) -> tuple[dict[int, _Section], list[_Symbol]]:
    if len(obj) < 64 or obj[:6] != b"\x7fELF\x02\x01":
        raise LinkError("not a little-endian 64-bit ELF file")
    kind, machine = struct.unpack_from("<HH", obj, 16)
    if kind != 1 or machine != 62:
        raise LinkError(f"expected a relocatable x86-64 object, got ELF type {kind}, machine {machine}")
    (table,) = struct.unpack_from("<Q", obj, 40)
    count, names_index = struct.unpack_from("<HH", obj, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", obj, table + 64 * i) for i in range(count)]
    names_at = headers[names_index][4]
    sections: dict[int, _Section] = {}
    symbols: list[_Symbol] = []
    for i, (name, kind, flags, _, offset, size, link, _, align, _) in enumerate(headers):
        if kind == SHT_SYMTAB:
            strings = headers[link][4]
            for at in range(offset, offset + size, 24):
                s_name, info, _, section, value, s_size = struct.unpack_from("<IBBHQQ", obj, at)
                symbols.append(_Symbol(_string(obj, strings + s_name), info, section, value, s_size))
        elif flags & SHF_ALLOC and size:
            text = _string(obj, names_at + name)
            if kind not in LOADED_TYPES or flags & SHF_TLS:
                raise LinkError(
                    f"section {text!r} has type {kind:#x} and flags {flags:#x}, which is not supported"
                )
            body = bytearray() if kind == SHT_NOBITS else bytearray(obj[offset : offset + size])
            sections[i] = _Section(text, kind, flags, max(align, 1), size, body)
    for _, kind, _, _, offset, size, _, target, _, _ in headers:
        if kind == SHT_RELA and target in sections:
            for at in range(offset, offset + size, 24):
                place, info, addend = struct.unpack_from("<QQq", obj, at)
                sections[target].relocations.append((place, info & 0xFFFFFFFF, info >> 32, addend))
    return sections, symbols


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


class _Linker:
    """One link: decides addresses, then writes the image. File offsets equal addresses throughout."""

    def __init__(
        self, sections: dict[int, _Section], symbols: list[_Symbol], needed: tuple[str, ...]
    ) -> None:
        self.sections, self.symbols = sections, symbols
        for symbol in symbols:
            if symbol.section == SHN_COMMON:
                raise LinkError(f"common symbol {symbol.name!r} is not supported")
        used = {s for part in sections.values() for _, kind, s, _ in part.relocations if kind in VIA_GOT}
        self.got_slots = {symbol: 8 * i for i, symbol in enumerate(sorted(used))}
        imported = [i for i in self.got_slots if symbols[i].section == SHN_UNDEF]
        exported = [
            i
            for i, s in enumerate(symbols)
            if s.name and s.binding != STB_LOCAL and (s.section in sections or s.section == SHN_ABS)
        ]
        self.dynamic_symbols = imported + exported
        self.strings = bytearray(b"\0")
        self.name_at = {i: self._intern(symbols[i].name) for i in self.dynamic_symbols}
        self.needed_at = [self._intern(name) for name in needed]
        self.rela: list[tuple[int, int, int]] = []

    def _intern(self, text: str) -> int:
        at = len(self.strings)
        self.strings += text.encode() + b"\0"
        return at

    def link(self) -> bytes:
        self._place()
        body = {i: bytearray(s.data) for i, s in self.sections.items()}
        for i, section in self.sections.items():
            for relocation in section.relocations:
                self._relocate(section, body[i], *relocation)
        got = self._global_offset_table()
        if len(self.rela) > self.rela_capacity:
            raise LinkError("more dynamic relocations than were counted")
        image = bytearray(self.file_size)
        for at, data in (
            (0, self._headers()),
            (self.hash_at, self._hash_table()),
            (self.symtab_at, self._symbol_table()),
            (self.strtab_at, bytes(self.strings)),
            (self.rela_at, b"".join(struct.pack("<QQq", *entry) for entry in self.rela)),
            (self.got_at, got),
            (self.dynamic_at, self._dynamic()),
        ):
            image[at : at + len(data)] = data
        for i, section in self.sections.items():
            image[section.address : section.address + len(body[i])] = body[i]
        return bytes(image)

    def _place(self) -> None:
        """Give every part its address. The zeroed sections come last and take no room in the file."""
        at = 64 + 56 * 5

        def take(size: int, align: int) -> int:
            nonlocal at
            start = _round_up(at, align)
            at = start + size
            return start

        absolute = sum(kind == R_64 for s in self.sections.values() for _, kind, _, _ in s.relocations)
        self.rela_capacity = absolute + len(self.got_slots)
        self.hash_at = take(4 * (3 + len(self.dynamic_symbols) + 1), 8)
        self.symtab_at = take(24 * (len(self.dynamic_symbols) + 1), 8)
        self.strtab_at = take(len(self.strings), 1)
        self.rela_at = take(24 * self.rela_capacity, 8)
        ends = {}
        for segment in (PF_R, PF_R | PF_X, PF_R | PF_W):
            if segment != PF_R:
                at = _round_up(at, PAGE)
            start = 0 if segment == PF_R else at
            if segment & PF_W:
                self.got_at = take(max(8 * len(self.got_slots), 8), 16)
                self.dynamic_at = take(16 * (14 + len(self.needed_at)), 16)
            mine = [s for s in self.sections.values() if s.segment == segment]
            for section in sorted(mine, key=lambda s: s.kind == SHT_NOBITS):
                if section.kind == SHT_NOBITS and segment not in ends:
                    ends[segment] = (start, at)
                section.address = take(section.size, section.align)
            file_end = ends[segment][1] if segment in ends else at
            ends[segment] = (start, file_end, at)  # type: ignore[assignment]
        self.segments: dict[int, tuple[int, int, int]] = ends  # type: ignore[assignment]
        self.file_size = self.segments[PF_R | PF_W][1]

    def _address(self, index: int) -> int:
        symbol = self.symbols[index]
        if symbol.section == SHN_ABS:
            return symbol.value
        if symbol.section not in self.sections:
            raise LinkError(
                f"undefined symbol {symbol.name!r} is not reached through the global offset table"
            )
        return self.sections[symbol.section].address + symbol.value

    def _relocate(
        self, section: _Section, body: bytearray, offset: int, kind: int, symbol: int, addend: int
    ) -> None:
        place = section.address + offset
        if kind == R_GOTPC64:
            _put64(body, offset, self.got_at + addend - place)
        elif kind == R_GOTOFF64:
            _put64(body, offset, self._address(symbol) + addend - self.got_at)
        elif kind == R_GOT64:
            _put64(body, offset, self.got_slots[symbol] + addend)
        elif kind == R_PC64:
            _put64(body, offset, self._address(symbol) + addend - place)
        elif kind == R_64:
            if self.symbols[symbol].section == SHN_UNDEF:
                raise LinkError(f"absolute reference to undefined symbol {self.symbols[symbol].name!r}")
            self.rela.append((place, R_RELATIVE, self._address(symbol) + addend))
        elif kind in (R_PC32, R_PLT32):
            _put32(body, offset, self._address(symbol) + addend - place)
        elif kind in VIA_GOT:
            _put32(body, offset, self.got_at + self.got_slots[symbol] + addend - place)
        else:
            raise LinkError(f"relocation type {kind} in section {section.name!r} is not supported")

    def _global_offset_table(self) -> bytes:
        order = {symbol: i + 1 for i, symbol in enumerate(self.dynamic_symbols)}
        for symbol, slot in self.got_slots.items():
            if self.symbols[symbol].section == SHN_UNDEF:
                self.rela.append((self.got_at + slot, order[symbol] << 32 | R_GLOB_DAT, 0))
            else:
                self.rela.append((self.got_at + slot, R_RELATIVE, self._address(symbol)))
        return bytes(8 * len(self.got_slots))

    def _headers(self) -> bytes:
        ident = b"\x7fELF\x02\x01\x01" + bytes(9)
        header = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 5, 64, 0, 0)
        parts = [header]
        for flags, (start, file_end, end) in self.segments.items():
            size, memory = file_end - start, end - start
            parts.append(struct.pack("<IIQQQQQQ", PT_LOAD, flags, start, start, start, size, memory, PAGE))
        at, size = self.dynamic_at, 16 * (14 + len(self.needed_at))
        parts.append(struct.pack("<IIQQQQQQ", PT_DYNAMIC, PF_R | PF_W, at, at, at, size, size, 8))
        parts.append(struct.pack("<IIQQQQQQ", PT_GNU_STACK, PF_R | PF_W, 0, 0, 0, 0, 0, 16))
        return b"".join(parts)

    def _hash_table(self) -> bytes:
        """A SysV hash table with one bucket: a chain through all symbols, since there are few."""
        count = len(self.dynamic_symbols) + 1
        chain = [i + 1 if 0 < i < count - 1 else 0 for i in range(count)]
        return struct.pack(f"<{3 + count}I", 1, count, 1 if count > 1 else 0, *chain)

    def _symbol_table(self) -> bytes:
        parts = [bytes(24)]
        for i in self.dynamic_symbols:
            symbol = self.symbols[i]
            if symbol.section == SHN_UNDEF:
                section, value = 0, 0
            else:
                section, value = 1 if symbol.section != SHN_ABS else SHN_ABS, self._address(i)
            parts.append(struct.pack("<IBBHQQ", self.name_at[i], symbol.info, 0, section, value, symbol.size))
        return b"".join(parts)

    def _dynamic(self) -> bytes:
        entries = [(1, at) for at in self.needed_at]  # NEEDED
        entries += [(4, self.hash_at), (5, self.strtab_at), (6, self.symtab_at)]  # HASH, STRTAB, SYMTAB
        entries += [(10, len(self.strings)), (11, 24)]  # STRSZ, SYMENT
        entries += [(7, self.rela_at), (8, 24 * len(self.rela)), (9, 24)]  # RELA, RELASZ, RELAENT
        entries += [(24, 0)]  # BIND_NOW
        for kind, tag in ((SHT_INIT_ARRAY, 25), (SHT_FINI_ARRAY, 26)):
            arrays = [s for s in self.sections.values() if s.kind == kind]
            if len(arrays) > 1:
                raise LinkError(f"{len(arrays)} sections of type {kind}: expected one at most")
            entries += [(tag, s.address) for s in arrays] + [(tag + 2, s.size) for s in arrays]
        return b"".join(struct.pack("<QQ", *entry) for entry in entries) + bytes(16)


def _put64(body: bytearray, at: int, value: int) -> None:
    struct.pack_into("<q", body, at, value)


def _put32(body: bytearray, at: int, value: int) -> None:
    if not -(1 << 31) <= value < 1 << 31:
        raise LinkError(f"a 32-bit relocation at {at:#x} does not reach its target")
    struct.pack_into("<i", body, at, value)
