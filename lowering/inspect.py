"""Results of a compile: SASS, registers, stack, shared memory, spills, instruction counts.

Everything is read from the cubin, so none of it needs a GPU. Register, stack and shared-memory figures come
from the ELF's own ``.nv.info`` sections; SASS takes ``nvdisasm``, from the PyPI package
``nvidia-cuda-nvdisasm`` or from a CUDA toolkit on the PATH.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lowering import scratch
from lowering.errors import DamagedEntry, LoweringError

if TYPE_CHECKING:
    from lowering.launches import LaunchFacts

# Attributes of a kernel in `.nv.info`, and the formats they are written in.
_EIATTR_MAX_THREADS, _EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK, _EIATTR_REGCOUNT, _EIATTR_REQNTID = (
    0x05,
    0x11,
    0x12,
    0x2F,
    0x10,
)
_EIATTR_PARAM_CBANK = 0x0A
_EIFMT_SVAL = 0x04


@dataclass(frozen=True)
class KernelResources:
    """One entry point of a cubin. Bytes and counts; ``dynamic_smem`` is None where it is not a constant."""

    entry: str
    registers: int
    stack_bytes: int
    static_smem: int
    dynamic_smem: int | None
    spill_loads: int
    spill_stores: int
    max_threads: int
    parameter_bytes: int
    instructions: dict[str, int] = field(hash=False)

    def count(self, prefix: str) -> int:
        """Number of instructions whose mnemonic starts so: ``count("HGMMA")``, ``count("UTMALDG")``."""
        return sum(n for name, n in self.instructions.items() if name.startswith(prefix))


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    size: int
    info: int
    data: bytes


def sass(cubin: bytes) -> str:
    """The disassembly of a cubin.

    :raises LoweringError: if there is no ``nvdisasm``, or it fails.
    """
    with scratch.folder() as folder:
        path = folder / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([nvdisasm(), "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LoweringError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


def nvdisasm() -> str:
    """The path of ``nvdisasm``: the PyPI package's, else the one on the PATH or under ``CUDA_HOME``.

    :raises LoweringError: if there is none.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    candidates = [str(f.locate()) for f in files if f.name == "nvdisasm"]
    candidates += [found] if (found := shutil.which("nvdisasm")) else []
    for home in (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"):
        candidates += [str(Path(home) / "bin" / "nvdisasm")] if home else []
    for path in candidates:
        if os.access(path, os.X_OK):
            return path
    raise LoweringError("no nvdisasm: pip install nvidia-cuda-nvdisasm, or put a CUDA toolkit on the PATH")


_FUNCTION = re.compile(r"^\s*\.section\s+\.text\.(\S+?)(?:,|\s|$)|^\.text\.(\S+):")
_INSTRUCTION = re.compile(
    r"^\s*(?:/\*[0-9a-f]+\*/)\s+(?:\{\s*)?(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_.]+)?)"
)


def instruction_counts(disassembly: str) -> dict[str, Counter[str]]:
    """Instructions by entry: opcode with its modifiers, such as ``HGMMA.64x256x16.F32.BF16`` -> count."""
    counts: dict[str, Counter[str]] = {}
    entry = ""
    for line in disassembly.splitlines():
        if match := _FUNCTION.match(line):
            entry = (match[1] or match[2]).strip('",')
        elif (match := _INSTRUCTION.match(line)) and entry:
            counts.setdefault(entry, Counter())[match[1]] += 1
    return counts


def resources(cubin: bytes, launches: Sequence[LaunchFacts] = ()) -> list[KernelResources]:
    """The resources of each entry of a cubin, in the order of its sections.

    :param launches: of the host function, for the dynamic shared memory, which no cubin holds.
    :raises DamagedEntry: if it is not a cubin. :raises LoweringError: without ``nvdisasm``.
    """
    sections = _sections(cubin)
    names = _symbol_names(cubin)
    registers, frames, stacks = _global_info(sections, names)
    counts = instruction_counts(sass(cubin))
    dynamic = _dynamic_smem(launches)
    found = []
    for section in sections:
        if not section.name.startswith(".text."):
            continue
        entry = section.name.removeprefix(".text.")
        own = _entry_info(next((s for s in sections if s.name == f".nv.info.{entry}"), None))
        shared = next((s.size for s in sections if s.name == f".nv.shared.{entry}"), 0)
        opcodes = counts.get(entry, Counter())
        found.append(
            KernelResources(
                entry=entry,
                registers=registers.get(entry, section.info >> 24),
                stack_bytes=max(frames.get(entry, 0), stacks.get(entry, 0)),
                static_smem=shared,
                dynamic_smem=dynamic.get(entry),
                spill_loads=_starting(opcodes, ("LDL",)),
                spill_stores=_starting(opcodes, ("STL",)),
                max_threads=own.get("threads", 0),
                parameter_bytes=own.get("parameters", 0),
                instructions=dict(sorted(opcodes.items())),
            )
        )
    return found


def _starting(opcodes: Counter[str], prefixes: tuple[str, ...]) -> int:
    return sum(n for name, n in opcodes.items() if name.startswith(prefixes))


def _dynamic_smem(launches: Iterable[LaunchFacts]) -> dict[str, int | None]:
    """By entry: the largest, or None if one launch computes it."""
    found: dict[str, int | None] = {}
    for launch in launches:
        before = found.get(launch.entry, 0)
        unknown = launch.dynamic_smem is None or before is None
        found[launch.entry] = None if unknown else max(before or 0, launch.dynamic_smem or 0)
    return found


def _sections(cubin: bytes) -> list[_Section]:
    if len(cubin) < 64 or cubin[:5] != b"\x7fELF\x02":
        raise DamagedEntry("not a cubin: it is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names_index = struct.unpack_from("<HH", cubin, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * i) for i in range(count)]
    names_at = headers[names_index][4]
    found = []
    for name, kind, _, _, offset, size, _, info, _, _ in headers:
        at = names_at + name
        text = cubin[at : cubin.index(b"\0", at)].decode()
        found.append(_Section(text, kind, size, info, b"" if kind == 8 else cubin[offset : offset + size]))
    return found


def _symbol_names(cubin: bytes) -> list[str]:
    sections = _sections(cubin)
    symbols = next((s.data for s in sections if s.name == ".symtab"), b"")
    strings = next((s.data for s in sections if s.name == ".strtab"), b"")
    names = []
    for at in range(0, len(symbols), 24):
        (name,) = struct.unpack_from("<I", symbols, at)
        names.append(strings[name : strings.index(b"\0", name)].decode())
    return names


def _attributes(data: bytes) -> Iterable[tuple[int, bytes]]:
    """(attribute, value) of a ``.nv.info`` section: one format byte, one attribute byte, then a value of
    two bytes, or a two-byte length and that many bytes."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _EIFMT_SVAL:
            yield attribute, data[at : at + size]
            at += size
        else:
            yield attribute, struct.pack("<H", size)


def _global_info(
    sections: list[_Section], names: list[str]
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Registers, frame size and stack size by entry, from the section for the whole file."""
    tables: dict[int, dict[str, int]] = {_EIATTR_REGCOUNT: {}, _EIATTR_FRAME_SIZE: {}, _EIATTR_MIN_STACK: {}}
    for section in sections:
        if section.name == ".nv.info":
            for attribute, value in _attributes(section.data):
                if attribute in tables and len(value) == 8:
                    symbol, number = struct.unpack("<II", value)
                    tables[attribute][names[symbol]] = number
    return tables[_EIATTR_REGCOUNT], tables[_EIATTR_FRAME_SIZE], tables[_EIATTR_MIN_STACK]


def _entry_info(section: _Section | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for attribute, value in _attributes(section.data) if section is not None else ():
        if attribute in (_EIATTR_MAX_THREADS, _EIATTR_REQNTID) and len(value) == 12:
            x, y, z = struct.unpack("<III", value)
            found["threads"] = x * y * z
        elif attribute == _EIATTR_PARAM_CBANK and len(value) == 8:
            found["parameters"] = struct.unpack("<IHH", value)[2]
    return found
