"""The rule of signatures: several values have several names, or a record that names them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

CONVENTIONAL = {"self", "cls", "stream", "loc", "ip"}
"""Parameters that the DSL and Python give their meaning."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def records(trees: Iterable[ast.AST]) -> set[str]:
    """Names of the NamedTuples and dataclasses."""
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    marks = ("NamedTuple", "dataclass", "frozen")
    return {
        node.name
        for node in classes
        for mark in (*node.bases, *node.decorator_list)
        if ast.unparse(mark).split("(")[0].split(".")[-1] in marks
    }


def bare_tuple(annotation: ast.expr | None) -> bool:
    """True for `tuple` without elements, anywhere in an annotation."""
    if annotation is None:
        return False
    nodes = list(ast.walk(annotation))
    subscripted = {id(node.value) for node in nodes if isinstance(node, ast.Subscript)}
    return any(isinstance(n, ast.Name) and n.id == "tuple" and id(n) not in subscripted for n in nodes)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def indexed(function: Function, name: str) -> bool:
    """True if a function indexes `name` by a constant number or asks for its length."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and _is(node.value, name):
            index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
            if isinstance(index, ast.Slice) or (isinstance(index, ast.Constant) and type(index.value) is int):
                return True
        if isinstance(node, ast.Call) and _is(node.func, "len") and any(_is(arg, name) for arg in node.args):
            return True
    return False


def unpacked(function: Function, name: str) -> bool:
    """True if a function assigns `name` to several names, or stars it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _is(node.value, name) and isinstance(node.targets[0], ast.Tuple):
            return True
        if isinstance(node, ast.Starred) and _is(node.value, name):
            return True
    return False


def faults(tree: ast.AST, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, text) of each annotation and parameter that breaks the rule. `known`: names of records."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and bare_tuple(node.annotation):
            yield node.lineno, f"{ast.unparse(node.target)} is a bare tuple"
        if isinstance(node, Function):
            for text in _of_function(node, known):
                yield node.lineno, f"{node.name}: {text}"


def _of_function(function: Function, known: set[str]) -> Iterator[str]:
    arguments = function.args
    for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        words = "" if arg.annotation is None else ast.unparse(arg.annotation)
        if bare_tuple(arg.annotation):
            yield f"{arg.arg} is a bare tuple"
        elif arg.arg in CONVENTIONAL:
            continue
        elif words in ("", "Any") and (indexed(function, arg.arg) or unpacked(function, arg.arg)):
            yield f"{arg.arg} holds several values and has no type"
        elif words in known and indexed(function, arg.arg):
            yield f"{arg.arg}, a record, is indexed by a number"
    extra = arguments.vararg
    if extra is not None and (extra.annotation is None or ast.unparse(extra.annotation) == "Any"):
        yield f"*{extra.arg} holds several values and has no type"
    if bare_tuple(function.returns):
        yield "returns a bare tuple"


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, int]]:
    """Each call with its positional arguments; a starred tuple counts as many as its function writes in
    it."""
    outer = [node for node in ast.iter_child_nodes(tree) if not isinstance(node, Function)]
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    for nodes in (_within(outer), *(_within(function.body) for function in functions)):
        sizes = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                sizes |= {t.id: len(node.value.elts) for t in node.targets if isinstance(t, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.Call):
                yield node, sum(_size(arg, sizes) for arg in node.args)


def _within(body: Iterable[ast.AST]) -> list[ast.AST]:
    """All nodes but those of nested functions."""
    found: list[ast.AST] = []
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, Function)]
    return found


def _size(arg: ast.expr, sizes: dict[str, int]) -> int:
    value = arg.value if isinstance(arg, ast.Starred) else None
    if isinstance(value, ast.Tuple):
        return len(value.elts)
    return sizes.get(value.id, 1) if isinstance(value, ast.Name) else 1
