"""The kernels that this project ships, for the commands that compile, inspect or show them.

`report_lines` says what came out of a compile: registers, spills, shared memory, instructions.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

from kernels_dsl.cli.errors import UsageError

OPS = ("gemm", "attention", "bsr", "fp8")
LISTS = {"configurations": "iter_kernels", "core": "iter_core", "common": "iter_common", "all": "iter_all"}
"""The lists of `kernels_dsl.aot.shipped`: one kernel for each configuration; those that core calls launch, or
common ones; all of these."""
# Opcodes of SASS by what they do. SM90 kernels have HGMMA and UTMALDG, SM80-class ones HMMA and LDGSTS.
MATRIX_OPCODES = ("HGMMA", "QGMMA", "HMMA", "QMMA")
NAME_WIDTH = 48
SUGGESTIONS = 4  # names offered for one that no kernel has
COPY_OPCODES = ("UTMALDG", "UTMASTG", "LDGSTS", "LDSM", "STSM")


class Shipped(NamedTuple):
    """One kernel: the jit function and what to compile it for."""

    name: str
    function: Any
    args: tuple[Any, ...]
    constexprs: dict[str, Any]

    def compile(self, arch: str) -> Any:
        """The compiled kernel, from the cache where it is there. No GPU is needed."""
        return self.function.compile(*self.args, arch=arch, **self.constexprs)

    def key(self, arch: str) -> str:
        """The key under which the cache keeps it."""
        return self.function.key(*self.args, arch=arch, **self.constexprs)

    def is_cached(self, arch: str) -> bool:
        """True where the cache has it, whole. Takes about a millisecond."""
        from lowering import cache

        store = cache.store()
        return store is not None and store.read(self.key(arch)) is not None


def shipped(
    arch: str, ops: Sequence[str] = OPS, name: str = "", listing: str = "configurations"
) -> list[Shipped]:
    """The kernels of `ops` for `arch` in a list of `LISTS` whose name contains `name`.

    UsageError: unknown arch, or no match.
    """
    from kernels_dsl.aot import shipped as lists

    try:
        found = [Shipped(*item) for item in getattr(lists, LISTS[listing])(arch, ops=tuple(ops))]
    except ValueError as error:
        raise UsageError(str(error)) from error
    chosen = [kernel for kernel in found if name in kernel.name]
    if not chosen:
        raise UsageError(_no_such(name, arch, [kernel.name for kernel in found]))
    return chosen


def _no_such(name: str, arch: str, known: Sequence[str]) -> str:
    """The error for a name that no kernel has, with the nearest that there are."""
    near = difflib.get_close_matches(name, known, SUGGESTIONS, cutoff=0.3)
    text = f"no kernel for {arch} has {name!r} in its name; --list names all {len(known)}"
    return "\n  ".join([text + (", the nearest are:" if near else ""), *near])


def spread(found: Sequence[Shipped], count: int) -> list[Shipped]:
    """`count` of these kernels (all, where there are fewer), from the first to the last at even distances."""
    if count >= len(found):
        return list(found)
    if count <= 1:
        return list(found[:count])
    return [found[i * (len(found) - 1) // (count - 1)] for i in range(count)]


def counts(instructions: dict[str, int], opcodes: Sequence[str]) -> str:
    """ "HGMMA 16, UTMALDG 4": those of `opcodes` that occur, summed over their variants."""
    totals = {}
    for opcode in opcodes:
        total = sum(count for name, count in instructions.items() if name.split(".")[0] == opcode)
        if total:
            totals[opcode] = total
    return ", ".join(f"{opcode} {total}" for opcode, total in totals.items()) or "none"


def origin(compiled: Any) -> str:
    """The source of a kernel that was looked up, with the time that its compile took, whenever it was."""
    if compiled.source == "compiled":
        return f"compiled in {compiled.seconds:.2f} s"
    place = {"disk": "from the cache on disk", "memory": "already in memory"}[compiled.source]
    return f"{place}, no compile (it took {compiled.seconds:.2f} s)"


def report_lines(compiled: Any) -> list[str]:
    """Two lines for each GPU entry of a compiled kernel."""
    lines = []
    for entry in compiled.resources():
        smem = entry.dynamic_smem if entry.dynamic_smem is not None else entry.static_smem
        memory = f"{smem / 1024:.1f} KiB shared memory"
        # The compiler writes a kernel's whole configuration into its name.
        name = entry.entry if len(entry.entry) <= NAME_WIDTH else entry.entry[: NAME_WIDTH - 3] + "..."
        lines.append(f"{name}: {entry.registers} registers, {spills(entry)}, {memory}")
        lines.append(
            f"  matrix instructions: {counts(entry.instructions, MATRIX_OPCODES)}; "
            f"copies: {counts(entry.instructions, COPY_OPCODES)}"
        )
    return lines


def spills(entry: Any) -> str:
    """ "no spills", or how many and how large the stack is."""
    total = entry.spill_loads + entry.spill_stores
    return f"{total} SPILLS ({entry.stack_bytes} bytes of stack)" if total else "no spills"


def spilling(compiled: Any) -> bool:
    """True where an entry of this kernel spills registers."""
    return any(entry.spill_loads + entry.spill_stores for entry in compiled.resources())
