"""The inside of a bundle's file: its manifest, its members, and the key that an entry has on this machine."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from dataclasses import replace
from typing import Any

from lowering import arch as arch_module
from lowering import toolchain
from lowering.errors import DamagedEntry, LoweringError
from lowering.launch import CompiledKernel
from lowering.signature import key_of
from lowering.store import Entry

MANIFEST = "manifest.json"
FORMAT = 1
# Most bytes of one unpacked member: a damaged or made-up length shall not take all memory.
MEMBER_LIMIT = 1 << 30
# What damaged archives and JSON of another form raise; RuntimeError of a member that is encrypted.
MALFORMED = (
    DamagedEntry, zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, AttributeError,
    NotImplementedError, RuntimeError, EOFError,
)  # fmt: skip


def manifest(path: str | os.PathLike[str], archive: zipfile.ZipFile) -> list[dict[str, Any]]:
    """Key, name, arch and key parts of each kernel of a bundle."""
    found = json.loads(member(archive, MANIFEST))
    if found.get("format") != FORMAT:
        raise LoweringError(f"{path}: bundle format {found.get('format')!r}, expected {FORMAT}")
    return list(found["kernels"])


def member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a member. Nothing is unpacked to a path that the archive names."""
    size = archive.getinfo(name).file_size
    if size > MEMBER_LIMIT:
        raise DamagedEntry(f"{name} has {size} bytes, at most {MEMBER_LIMIT} are read")
    return archive.read(name)


def misfit(made_with: dict[str, str]) -> str | None:
    """The reason why kernels of such a toolchain, a key's part, cannot be used here; None where they can."""
    here = toolchain.identity()
    for part, label in (
        ("dsl", "nvidia-cutlass-dsl"),
        ("tvm_ffi", "apache-tvm-ffi"),
        ("lowering", "the lowering layer"),
    ):
        if made_with.get(part) != here[part]:
            return f"made with {label} {made_with.get(part)}, here is {here[part]}"
    if not toolchain.isa_runs_here(made_with["host"]):
        return f"its host code is for {made_with['host']} processors, this one is {here['host']}"
    driver = arch_module.driver_version()
    if driver is not None and int(made_with["flavour"].removeprefix("cu")) > driver[0]:
        return f"made with {made_with['flavour']}, the driver here supports CUDA {driver[0]}"
    return None


def adopt(entry: Entry) -> Entry:
    """The entry under the key that this machine would give it.

    :raises LoweringError: if it cannot be used here, saying why.
    """
    if (reason := misfit(entry.facts["parts"]["toolchain"])) is not None:
        raise LoweringError(reason)
    parts: dict[str, Any] = {**entry.facts["parts"], "toolchain": dict(toolchain.identity())}
    adopted = replace(entry, facts={**entry.facts, "parts": parts, "key": key_of(parts)})
    CompiledKernel(adopted, "disk")  # raises where facts are missing
    return adopted
