"""Callers find what `public_interface.txt` lists: names, signatures, schemas, variables, commands, bundles.

A change that is meant goes into CHANGELOG.md, and `python -m tests.test_public_interface` writes the list
anew. A refactoring never does that.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import enum
import importlib
import inspect
import json
import pkgutil
import tempfile
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
LISTED = Path(__file__).with_name("public_interface.txt")
# Modules of lowering that users call by name, as `lowering.cache.clear()`.
MODULES = ("arch", "bundle", "cache", "emulator", "inspect", "recording")
# Other packages' functions under their names.
OTHERS_NAMES = ("kernels_dsl.flash_attn", "kernels_dsl.flash_attn.cute", "kernels_dsl.flashinfer")
DISTRIBUTED = ("kernels_dsl.distributed",)
# Names that the documentation imports from elsewhere than kernels_dsl and lowering.
DOCUMENTED = {
    "kernels_dsl.ops.attention.blocks": (
        "block_sizes", "causal_blocks", "document_blocks", "from_block_mask", "topk_blocks", "window_blocks",
    ),
    "kernels_dsl.blocks.epilogue_fns": ("gelu", "gelu_tanh", "identity", "relu", "sigmoid", "silu"),
}  # fmt: skip
# Defaults that depend on the machine.
OF_THE_MACHINE = ("jobs",)


def _signature(function: Any) -> str:
    """Parameters with their kinds and defaults, without annotations: "(a, b, *, c=None)"."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "").split(".")[0] in ("kernels_dsl", "lowering")


def _of_value(name: str, value: Any) -> Iterator[str]:
    """Lines for a public name and, of a class, for its public members."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield f"name {name}: enum"
        for member in value:  # a value that is a sentence may be worded better
            yield f"name {name}.{member.name}" + (f": {member.value!r}" if " " not in member.value else "")
    elif isinstance(value, type):
        yield f"name {name}: {_of_class(value)}"
        for member in _members(value):
            yield f"name {name}.{member}: {_of_member(inspect.getattr_static(value, member, None))}"
    elif typing.get_args(value):
        yield f"name {name}: {' | '.join(part.__name__ for part in typing.get_args(value))}"
    elif isinstance(value, ModuleType):
        yield f"name {name}: module"
    elif callable(value):
        yield f"name {name}: {_signature(value)}"
    else:
        yield f"name {name}: {type(value).__name__}"


def _of_class(value: type) -> str:
    """Its parameters; of an exception what it is caught as, and its parameters where it has its own."""
    if not issubclass(value, BaseException):
        return f"class {_signature(value)}"
    own = any("__init__" in vars(c) for c in value.__mro__ if _is_ours(c))
    bases = ", ".join(c.__name__ for c in value.__mro__[1:] if c not in (BaseException, object))
    return f"exception{' ' + _signature(value) if own else ''} of {bases}"


def _members(value: type) -> list[str]:
    """Public members of a class. Those of a configuration are its parameters: what it derives is its own."""
    if value.__name__.endswith("Config"):
        return []
    ours = [c for c in value.__mro__ if _is_ours(c)]
    found = {name for c in ours for name in (*vars(c), *inspect.get_annotations(c))}
    return sorted(name for name in found if not name.startswith("_"))


def _of_member(member: Any) -> str:
    if isinstance(member, (classmethod, staticmethod)):
        return f"{type(member).__name__} {_signature(member.__func__)}"
    return _signature(member) if inspect.isfunction(member) else "attribute"


def _public(module: ModuleType) -> list[str]:
    """The exports of a module: its `__all__`, else the functions and classes that it defines."""
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__)
    return list(getattr(module, "__all__", None) or (name for name in own if not name.startswith("_")))


def names() -> Iterator[str]:
    """Public names with their signatures."""
    modules = [
        "kernels_dsl",
        *OTHERS_NAMES,
        *DISTRIBUTED,
        "lowering",
        *(f"lowering.{name}" for name in MODULES),
    ]
    for module in map(importlib.import_module, modules):
        for name in _public(module):
            yield from _of_value(f"{module.__name__}.{name}", getattr(module, name))
    for place, documented in DOCUMENTED.items():
        with contextlib.suppress(ModuleNotFoundError):  # then its names are gone, and are named
            found = vars(importlib.import_module(place))
            for name in (name for name in documented if name in found):
                yield from _of_value(f"{place}.{name}", found[name])


def schemas() -> Iterator[str]:
    """The operators of PyTorch; they are registered where their modules are imported."""
    import torch

    import kernels_dsl.ops

    for module in pkgutil.walk_packages(kernels_dsl.ops.__path__, "kernels_dsl.ops."):
        importlib.import_module(module.name)
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace == "kernels_dsl":
            name, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.kernels_dsl, name), overload or "default")
            yield f"schema {full}: {operator._schema}"


def environment() -> Iterator[str]:
    """Variables that are read: this project's own anywhere in the sources, others where a call names them."""
    from lowering.toolchain import SHAPING_VARIABLES

    found = set(SHAPING_VARIABLES)
    for path in (path for package in ("kernels_dsl", "lowering") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and str(node.value).startswith("KERNELS_DSL_"):
                found |= {str(node.value)} if str(node.value).replace("_", "").isalpha() else set()
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                found |= {str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)}
    yield from (f"environment {name}" for name in found if not name.endswith("_"))


def commands() -> Iterator[str]:
    """Commands of `python -m kernels_dsl` with their options."""
    from kernels_dsl.cli.main import build_parser

    yield from _of_parser("", build_parser())


def _of_parser(prefix: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"command {prefix}{name}"
                yield from _of_parser(f"{prefix}{name} ", command)
            continue
        if isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
            continue
        words = ["/".join(action.option_strings) or action.dest, type(action).__name__.strip("_")]
        shown = {"nargs": action.nargs, "choices": action.choices, "default": action.default}
        shown |= {"required": action.required or None}
        for label, value in shown.items():
            if value is not None and not (label == "default" and action.dest in OF_THE_MACHINE):
                words.append(f"{label}={list(value) if label == 'choices' else value!r}")
        yield f"command {prefix}{' '.join(words)}"


def bundles() -> Iterator[str]:
    """The members of a bundle, what its manifest says of a kernel, and how an entry ends."""
    from lowering import bundle
    from lowering.launch import CompiledKernel
    from lowering.store import FOOTER, MAGIC, Entry

    known = {"key": "k", "name": "n", "arch": "sm_90a", "parts": {}, "seconds": 0.0, "kind": "shared"}
    entry = Entry.make(b"library", "ptx", b"cubin", {**known, "launches": []})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle.zip"
        bundle.export(path, [CompiledKernel(entry, "memory")])
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read("manifest.json"))
            yield f"bundle format: {manifest.pop('format')}"
            yield f"bundle members: {archive.namelist()}"
            yield f"bundle entry: {archive.read('k.so')[-FOOTER.size :][:8]!r} {FOOTER.format} {MAGIC!r}"
    yield f"bundle manifest: {sorted(manifest)} of {sorted(manifest['kernels'][0])}"


def interface() -> list[str]:
    """All lines of the list."""
    lines = {*names(), *schemas(), *environment(), *commands(), *bundles()}
    assert not [line for line in lines if " at 0x" in line], "an address is in a default"
    return sorted(lines)


def _subject(line: str) -> str:
    return line.partition(": ")[0]


def differences(before: list[str], after: list[str]) -> list[str]:
    """The names that are gone, changed and new, in words."""
    old, new = ({_subject(line): line for line in lines} for lines in (before, after))
    said = [f"gone: {old[subject]}" for subject in old if subject not in new]
    both = ((line, new[subject]) for subject, line in old.items() if subject in new)
    said += [f"changed: {was}\n     to: {now}" for was, now in both if was != now]
    return said + [f"new: {new[subject]}" for subject in new if subject not in old]


def test_the_public_interface_is_the_listed_one():
    found = differences(LISTED.read_text().splitlines(), interface())
    assert not found, (
        "the public interface changed:\n" + "\n".join(found) + "\nA refactoring keeps it: restore what is "
        "gone or changed (a name that moved stays importable from its old place). A change that is meant "
        f"goes into CHANGELOG.md; then `python -m tests.{Path(__file__).stem}` writes the list anew."
    )


def test_differences_are_named():
    before = ["name a.f: (x, *, y=1)", "environment OLD", "schema k::s: (Tensor a)"]
    after = ["name a.f: (x, *, y=2)", "environment NEW", "schema k::s: (Tensor a)"]
    assert differences(before, after) == [
        "gone: environment OLD",
        "changed: name a.f: (x, *, y=1)\n     to: name a.f: (x, *, y=2)",
        "new: environment NEW",
    ]
    assert differences(after, after) == []


def test_the_list_has_every_kind_of_entry():
    lines = LISTED.read_text().splitlines()
    kinds = ("name", "schema", "environment", "command", "bundle")
    assert {line.split()[0] for line in lines} == set(kinds)
    for line in ("environment KERNELS_DSL_CACHE_DIR", "command compile", "bundle format: 1"):
        assert line in lines
    assert any(line.startswith("name kernels_dsl.gemm: (a, b, *, c=None, ") for line in lines)


if __name__ == "__main__":
    LISTED.write_text("".join(f"{line}\n" for line in interface()))
    print(f"wrote {LISTED}: {len(LISTED.read_text().splitlines())} lines")
