"""Statements of Python source files, so that a report's lines to look at are counted as one reads them.

A call over several lines is one statement, and comments and blank lines are none.
"""

from __future__ import annotations

import ast
import linecache
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple


class Function(NamedTuple):
    """A function: its first line, and its last."""

    start: int
    end: int


class _Source(NamedTuple):
    starts: list[int]  # lines at which statements begin, sorted; no docstrings
    functions: list[Function]


@lru_cache(maxsize=256)
def _read(path: str) -> _Source:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return _Source([], [])
    starts: set[int] = set()
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.append(Function(node.lineno, node.end_lineno or node.lineno))
        if isinstance(node, ast.stmt) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            starts.add(node.lineno)
    return _Source(sorted(starts), functions)


def number(path: str, line: int) -> int:
    """The number of the statement that a line belongs to; of a file that cannot be read, the line."""
    starts = _read(path).starts
    return bisect_right(starts, line) if starts else line


def between(path: str, first: int, last: int) -> list[int]:
    """First lines of the statements after line `first` and before line `last`, without theirs."""
    starts = _read(path).starts
    return starts[bisect_right(starts, first) : max(number(path, last) - 1, 0)]


def function(path: str, line: int) -> Function | None:
    """The innermost function that has a line."""
    found = [f for f in _read(path).functions if f.start <= line <= f.end]
    return max(found, key=lambda f: f.start) if found else None
