"""PTX as text: statements with their lines and sources, tokens, functions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from .reports import PtxError

_TOKEN = re.compile(
    r"\s*(0[fFdD][0-9a-fA-F]+|-?0[xX][0-9a-fA-F]+U?|-?\d+U?|[%$_A-Za-z][\w$%.]*(?:::\w+)?|[\[\]{}|,+!()<>=-])"
)


class Source(NamedTuple):
    """A line of a source file by its number. ``column`` may stand for a call stack, see call_stacks.py."""

    file: int = 0
    line: int = 0
    column: int = 0


@dataclass
class Statement:
    """An instruction, a directive, a label ``x:``, ``{`` or ``}``."""

    text: str
    line: int
    source: Source


def statements(text: str, first_line: int) -> list[Statement]:
    """Split a body into instruction texts, labels ``x:``, ``{`` and ``}``, with line and source."""
    out: list[Statement] = []
    source = Source()
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
                    source = Source(*map(int, numbers[1:4]))
            continue
        while line:
            if not pending:
                pending_line = number
            if not pending and line[0] in "{}":
                out.append(Statement(line[0], number, source))
                line = line[1:].strip()
                continue
            label = re.match(r"([$\w]+):(?!:)\s*", line) if not pending else None
            if label:
                out.append(Statement(label.group(1) + ":", number, source))
                line = line[label.end() :]
                continue
            end = line.find(";")
            if end < 0:
                pending += line + " "
                break
            out.append(Statement((pending + line[:end]).strip(), pending_line, source))
            pending, line = "", line[end + 1 :].strip()
    return [s for s in out if s.text]


def without_lines_of(text: str, files: dict[int, str], path: str) -> str:
    """``text`` with no ``.loc`` of the file ``path``, so that the line before holds on."""
    for number in (number for number, found in files.items() if found.endswith(path)):
        text = re.sub(rf"^\s*\.loc\s+{number}\s.*$", "", text, flags=re.M)
    return text


def closing_brace(text: str, start: int) -> int:
    """Position of the brace that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group(0) == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxError("the body of a kernel has no end")


def tokens(text: str) -> list[str]:
    """The tokens of an operand list."""
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise PtxError(f"cannot read {text[at : at + 40]!r}")
        found.append(match.group(1))
        at = match.end()
    return found


@dataclass
class Function:
    """A ``.func`` with a body: its parameters' declarations (results, inputs) and its statements."""

    name: str
    results: list[str]
    inputs: list[str]
    body: list[Statement]


_FUNCTION = re.compile(r"\.func\s*(?:\(([^)]*)\))?\s*([\w$]+)\s*(?:\(([^)]*)\))?[^;{]*([;{])")


def functions(text: str) -> tuple[dict[str, Function], str]:
    """Functions by name, and the text with their bodies blanked."""
    found = {}
    for match in list(_FUNCTION.finditer(text)):
        if match.group(4) == ";":
            continue
        start = match.end() - 1
        end = closing_brace(text, start)
        results, inputs = (
            [" ".join(d.split()) for d in (match.group(n) or "").split(",") if d.strip()] for n in (1, 3)
        )
        body = statements(text[start + 1 : end], text.count("\n", 0, start) + 1)
        found[match.group(2)] = Function(match.group(2), results, inputs, body)
        text = text[: match.start()] + re.sub(r"[^\n]", " ", text[match.start() : end + 1]) + text[end + 1 :]
    return found, text
