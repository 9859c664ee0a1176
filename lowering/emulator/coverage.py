"""Writer of the page of instructions that the emulator knows.

Command: ``python -m lowering.emulator.coverage [FILE]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from .engine import HANDLERS
from .forms import ARITHMETIC, MISSING
from .program import NO_EFFECT

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "emulator_instructions.md"
_CONTROL = {
    "bra": "", "brx.idx": "an index beyond the table is an error",
    "call": "functions that the same PTX holds, without recursion; `vprintf`; no calls through pointers",
    "exit, ret": "",
}  # fmt: skip
_HEAD = """# Instructions that the emulator knows

Written by `python -m lowering.emulator.coverage` from the tables that the emulator itself reads; see
[the emulator](../emulator.md). An instruction or a modifier that is not here is an error that names its line.
"""


def _table(columns: tuple[str, str], rows: dict[str, str]) -> str:
    lines = [f"| {columns[0]} | {columns[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {text} |" for name, text in rows.items()])


def _first_line(function: Callable) -> str:
    line = (function.__doc__ or "").strip().split("\n")[0]
    return line.replace("``", "`").replace("|", "\\|").rstrip(".")


def page() -> str:
    """The whole page."""
    arithmetic = {
        f"`{root}`": " ".join(f"`.{p}`" for p in forms.split()) for root, forms in ARITHMETIC.items()
    }
    groups: dict[str, list[str]] = {}
    for opcode, handler in sorted(HANDLERS.items()):
        if opcode != "brx.check":
            groups.setdefault(_first_line(handler), []).append(f"`{opcode}`")
    memory = {", ".join(opcodes): text for text, opcodes in groups.items()}
    control = {", ".join(f"`{n}`" for n in names.split(", ")): text for names, text in _CONTROL.items()}
    reasons: dict[str, list[str]] = {}
    for opcode, reason in MISSING.items():
        reasons.setdefault(reason, []).append(f"`{opcode}`")
    missing = {", ".join(opcodes): reason for reason, opcodes in reasons.items()}
    nothing = ", ".join(f"`{root}`" for root in sorted(NO_EFFECT))
    parts = [
        _HEAD,
        "## Arithmetic\n",
        "Types and modifiers of each instruction on registers; not every pair of them exists.\n",
        _table(("instruction", "types and modifiers"), arithmetic),
        "\n## Control flow\n",
        _table(("instruction", ""), control),
        "\n## Memory, synchronisation, matrices and warps\n",
        _table(("instruction", ""), memory),
        f"\nWithout effect: {nothing}.\n",
        "## Known to be missing\n",
        _table(("instruction", "reason"), missing),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page())
