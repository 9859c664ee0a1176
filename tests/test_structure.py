"""The layout of the project holds: who imports whom, how long files and functions are, what imports load."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import signatures

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels_dsl", "lowering", "reference", "benchmarks", "tutorials", "examples", "tests")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 120
MAX_POSITIONAL = 8

BELOW_CALLERS = ("ops", "sparse", "checks", "config", "blocks")
# Part of the project -> the parts of it that its modules may import. The longest matching name decides.
ALLOWED = {
    "reference": (
        "reference",
        "kernels_dsl.blocks.epilogue.activations",
        "kernels_dsl.blocks.epilogue.gates",
        "kernels_dsl.blocks.reduce.reductions",
    ),  # which have PyTorch's definition of each
    "lowering": ("lowering",),
    "kernels_dsl.config": ("kernels_dsl.config", "lowering.records"),
    "kernels_dsl.blocks": ("kernels_dsl.blocks", "kernels_dsl.config", "lowering.records"),
    "kernels_dsl.kernels": ("kernels_dsl.kernels", "kernels_dsl.blocks", "kernels_dsl.config"),
    "kernels_dsl.checks": ("kernels_dsl.checks", "lowering.records"),
    "kernels_dsl.sparse": (
        "kernels_dsl.sparse",
        "kernels_dsl.checks",
        "kernels_dsl.config",
        "lowering",
    ),
    "kernels_dsl.ops": (
        "kernels_dsl.ops",
        "kernels_dsl.sparse",
        "kernels_dsl.checks",
        "kernels_dsl.config",
        "kernels_dsl.kernels",
        "kernels_dsl.blocks",
        "kernels_dsl._version",
        "lowering",
    ),
    **{
        part: (
            part,
            *(f"kernels_dsl.{room}" for room in ("ops", "sparse", "checks", "config", "blocks")),
            *(["kernels_dsl.flash_attn"] if part == "kernels_dsl.integrations" else []),
            *(["kernels_dsl.nn"] if part == "kernels_dsl.aot" else []),
            "lowering",
        )
        for part in (
            "kernels_dsl.nn",
            "kernels_dsl.aot",
            "kernels_dsl.integrations",
            "kernels_dsl.flash_attn",
            "kernels_dsl.flashinfer",
            "kernels_dsl.vllm_backend",
        )
    },
    "kernels_dsl": ("kernels_dsl", "lowering", "benchmarks"),
    "benchmarks": ("benchmarks", "kernels_dsl", "lowering", "reference"),
    "tutorials": ("tutorials", "kernels_dsl", "lowering", "reference", "benchmarks"),
    "examples": ("examples", "kernels_dsl", "lowering"),
    "tests": PACKAGES,
}
EARLIER_PATHS = {
    "kernels_dsl.ops.bsr.linear": "kernels_dsl.nn.bsr_linear",
    "kernels_dsl.ops.scaled.linear": "kernels_dsl.nn.scaled_linear",
}
"""Module that older pickles name -> the one above it that has its class now."""
JOINT = (("kernels_dsl.kernels.attention.fp8_with_transpose", ["quantize"]),)
"""Modules of a kernel family whose host functions launch kernels of another, and that family."""
# Outside packages that only some parts may import at the top of a module, where it costs every user.
HEAVY = ("cutlass", "torch", "tvm_ffi", "cuda", "quack", "flash_attn", "matplotlib")
MAY_IMPORT_CUTLASS = (
    "kernels_dsl.blocks",
    "kernels_dsl.kernels",
    "lowering",
    "tutorials",
    "examples",
    "tests",
)


def _files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _module(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, at the top or inside of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = len(module.split(".")) - node.level + is_package
                base = ".".join([*module.split(".")[:keep], *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(), str(path)) for path in _files()}


def _places(found: list[tuple[Path, int, str]]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}:{line}: {text}" for path, line, text in found)


def _forbidden(module: str, imported: str) -> str | None:
    """Says why `module` may not import `imported` (both absolute); None where it may."""
    part = max((name for name in ALLOWED if _within(module, name)), key=len)
    if imported.split(".")[0] in PACKAGES:
        if not any(_within(imported, name) for name in (*ALLOWED[part], EARLIER_PATHS.get(module, part))):
            return f"{part} may not import {imported}"
        family = module.split(".")[2:3]
        other = imported.split(".")[2:3]
        between = other not in (family, ["skeleton"]) and (module, other) not in JOINT
        if part == "kernels_dsl.kernels" and _within(imported, part) and between:
            return f"a kernel family may not import another: {imported}"
    if _within(imported, "cutlass") and not any(_within(module, name) for name in MAY_IMPORT_CUTLASS):
        return "only lowering, blocks and kernels may import cutlass"
    if part == "reference" and imported.split(".")[0] in set(HEAVY) - {"torch"}:
        return f"reference needs torch alone, not {imported}"
    return None


def test_import_direction(trees):
    found = []
    for path, tree in trees.items():
        module = _module(path)
        for line, imported in _imports(tree, module, path.name == "__init__.py"):
            reason = _forbidden(module, imported)
            if reason is not None:
                found.append((path, line, reason))
    assert not found, _places(found)


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("lowering.jit", "kernels_dsl.config.gemm", False),
        ("lowering.jit", "cutlass.cute", True),
        ("kernels_dsl.config.gemm", "kernels_dsl.ops.gemm.gemm", False),
        ("kernels_dsl.config.gemm", "cutlass", False),
        ("kernels_dsl.kernels.gemm.sm90", "kernels_dsl.kernels.gemm.roles", True),
        ("kernels_dsl.kernels.gemm.sm90", "kernels_dsl.kernels.attention.forward_sm90", False),
        ("kernels_dsl.kernels.gemm.sm90", "kernels_dsl.kernels.skeleton.Mmas", True),
        ("kernels_dsl.kernels.attention.fp8_with_transpose", "kernels_dsl.kernels.quantize.tile", True),
        ("kernels_dsl.kernels.attention.fp8_with_transpose", "kernels_dsl.kernels.gemm.sm90", False),
        ("kernels_dsl.kernels.attention.forward_sm90", "kernels_dsl.kernels.quantize.tile", False),
        ("kernels_dsl.blocks.hw.tma", "kernels_dsl.kernels.gemm.sm90", False),
        ("kernels_dsl.ops.gemm.gemm", "reference.gemm", False),
        ("kernels_dsl.ops.gemm.gemm", "kernels_dsl.checks.options", True),
        ("kernels_dsl.checks.options", "kernels_dsl.ops.gemm.gemm", False),
        ("kernels_dsl.ops.bsr.plan", "kernels_dsl.sparse.tensor.BsrTensor", True),
        ("kernels_dsl.sparse.tensor", "kernels_dsl.ops.bsr.plan", False),
        ("kernels_dsl.nn.bsr_linear", "kernels_dsl.ops.bsr.bsr", True),
        ("kernels_dsl.ops.bsr.bsr", "kernels_dsl.nn.bsr_linear", False),
        ("kernels_dsl.ops.bsr.linear", "kernels_dsl.nn.bsr_linear.BsrLinear", True),
        ("kernels_dsl.ops.bsr.linear", "kernels_dsl.nn.scaled_linear", False),
        ("reference.gemm", "lowering", False),
        ("reference.gemm", "torch.nn", True),
        ("benchmarks.gemm", "kernels_dsl.gemm", True),
    ],
)
def test_the_import_rule_itself(module, imported, allowed):
    assert (_forbidden(module, imported) is None) == allowed


def test_files_are_short():
    found = []
    for path in _files():
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            found.append((path, lines, f"longer than {MAX_FILE_LINES} lines"))
    assert not found, _places(found)


NEW_IN_OPS = re.compile(
    r"serving/|sm_margin\.py|gemm/(gated\w*|reduced\w*|recorded|nodes|at_hand)|bsr/node\.py|"
    r"attention/(backward\w*|cut_tiles|gradient|kept|list_order|pages|query_lists|recorded)\.py"
)
"""Capabilities that came after `MOST_LINES_OF_OPS` was set."""
MOST_LINES_OF_OPS = 8420
"""8,200, what later capabilities added to the files of the first ones, and the heads of ten files that were
split so that a first use imports less."""


def test_the_operations_stay_small():
    """Without the newer capabilities. Formats, checks and layers have rooms of their own beside `ops`."""
    folder = ROOT / "kernels_dsl" / "ops"
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    lines = {name: len(path.read_text().splitlines()) for name, path in paths.items()}
    counted = sum(count for name, count in lines.items() if not NEW_IN_OPS.match(name))
    assert 0 < counted < sum(lines.values())
    assert counted <= MOST_LINES_OF_OPS


def test_functions_are_short(trees):
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append((path, node.lineno, f"{node.name} has {length} lines"))
    assert not found, _places(found)


def _packs(call: ast.Call) -> bool:
    """struct's `pack` takes the fields of a record one by one: there is no other way to call it."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("pack", "pack_into")


STARRED = {"attention_sm90_fp8", "kernel", "launch"}
"""Called with more positional arguments, some of them starred. The set may only shrink."""


def test_calls_have_few_positional_arguments(trees):
    """In kernels_dsl a starred tuple counts as what is in it. A record may be written with all of its
    fields."""
    records = signatures.records(trees.values())
    found = []
    for path, tree in trees.items():
        for call, count in signatures.calls(tree):
            if path.relative_to(ROOT).parts[0] != "kernels_dsl":
                count = len(call.args)
            name = ast.unparse(call.func).split(".")[-1]
            starred = any(isinstance(arg, ast.Starred) for arg in call.args)
            allowed = name in records or _packs(call) or (starred and name in STARRED)
            if count > MAX_POSITIONAL and not allowed:
                found.append((path, call.lineno, f"{count} positional arguments"))
    assert not found, _places(found)


SEVERAL = {
    "blocks/epilogue": 2,
    "kernels/bsr": 1,
    "ops/attention": 1,
    "nn/bsr_linear.py": 1,
    "sparse/torch_masks.py": 1,
    "integrations/torch_attention.py": 1,
}
"""Folder -> things in its signatures that hold several values under one name (`signatures`): what is left of
them. Numbers may only fall."""


NAMED_ARGUMENTS = (
    "kernels", "blocks", "checks", "sparse", "ops", "nn", "aot", "integrations", "flash_attn", "flashinfer",
    "vllm_backend",
)  # fmt: skip
"""Parts of `kernels_dsl` that are held to it."""


def test_signatures_name_what_they_take(trees):
    own = (ROOT / "kernels_dsl", ROOT / "lowering")  # a class of a test's may have the name of a tuple
    records = signatures.records(tree for path, tree in trees.items() if any(map(path.is_relative_to, own)))
    found: dict[str, list[tuple[Path, int, str]]] = {}
    for path, tree in trees.items():
        package, part, *inner = (*path.relative_to(ROOT).parts, "")
        if package == "kernels_dsl" and part in NAMED_ARGUMENTS:
            folder = f"{part}/{inner[0]}"
            for line, text in signatures.faults(tree, records):
                found.setdefault(folder, []).append((path, line, text))
    for folder, faults in found.items():
        allowed = SEVERAL.get(folder, 0)
        assert len(faults) <= allowed, f"{folder} has {len(faults)}, may have {allowed}:\n{_places(faults)}"


@pytest.mark.parametrize(
    ("text", "faulty"),
    [
        ("def f(x: tuple): ...", True),
        ("def f(x: tuple | None): ...", True),
        ("def f(x: cutlass.Constexpr[tuple]): ...", True),
        ("def f(x: tuple[int, int]): ...", False),
        ("def f(x) -> tuple: ...", True),
        ("class A:\n    x: tuple", True),
        ("def f(x): return x[0]", True),
        ("def f(x): return x[-1]", True),
        ("def f(x, i): return x[i]", False),
        ("def f(x: Any): a, b = x", True),
        ("def f(x: Any): g(*x)", True),
        ("def f(x): return len(x)", True),
        ("def f(x: cute.Tensor): return x[0]", False),
        ("class A(NamedTuple):\n    b: int\ndef f(x: A): return x[0]", True),
        ("class A(NamedTuple):\n    b: int\ndef f(x: A): (b,) = x", False),
        ("def f(*x): ...", True),
        ("def f(*x: int): ...", False),
    ],
)
def test_the_signature_rule_itself(text, faulty):
    tree = ast.parse(text)
    assert bool(list(signatures.faults(tree, signatures.records([tree])))) == faulty


QUESTIONS = ("what", "whether", "where", "how", "which")
VAGUE = {*QUESTIONS, "given", "usual", "rest"}
"""Names that do not say what a variable holds."""
NAMED_SO = {"kernels_dsl/nn/scaled_linear.py": {"where"}}
"""A public function's parameter."""


def _names_given(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_variables_say_what_they_hold(trees):
    found = []
    for path, tree in trees.items():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("kernels_dsl/"):
            wrong = VAGUE - NAMED_SO.get(name, set())
            found += [(path, line, f"{x!r} says nothing") for line, x in _names_given(tree) if x in wrong]
    assert not found, _places(found)


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings that are statements: those of modules, classes, functions, and of names after their values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.lineno, node.value.value


def _opens_with_a_question(docstring: str) -> bool:
    first = re.match(r"[^\w]*([a-z]+)", docstring.lower())
    return first is not None and first[1] in (*QUESTIONS, "why", "who", "whose")


def test_docstrings_open_with_a_noun_or_a_verb(trees):
    tools = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tools").rglob("*.py"))}
    found = []
    for path, tree in {**trees, **tools}.items():
        for line, text in _docstrings(tree):
            if _opens_with_a_question(text):
                found.append((path, line, f"opens with {text.split()[0]!r}"))
    assert not found, _places(found)


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ('"""Why not."""', True),
        ('def f():\n    """\n    Who, where.\n    """', True),
        ('x = 1\n"""What x counts."""', True),
        ('"""Says why not."""\nx = "what"', False),
        ('"""Whole tiles."""', False),
        ('""""""', False),
    ],
)
def test_the_docstring_rule_itself(text, asks):
    assert any(_opens_with_a_question(found) for _, found in _docstrings(ast.parse(text))) == asks


def test_starred_tuples_count_as_what_is_in_them():
    tree = ast.parse("def f():\n    pair = 1, 2\n    g(*pair, *(3, 4, 5), 6, *unknown)\nh(*pair)")
    assert sorted(count for _, count in signatures.calls(tree)) == [1, 7]


def _runtime_imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """The imports of a module when it runs, inside of functions too: no names that only types need."""
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in for_types:
            yield from (name for _, name in _imports(node, module, is_package))


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for module in arrows:
        seen, waiting = set(), [module]
        while waiting:
            for other in arrows[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        reach[module] = seen
    found = {frozenset(o for o in reach[m] if m in reach[o]) for m in arrows if m in reach[m]}
    return sorted(map(sorted, found))


def test_no_import_goes_in_a_circle(trees):
    modules = {_module(path): (path, tree) for path, tree in trees.items()}
    arrows: dict[str, set[str]] = {}
    for module, (path, tree) in modules.items():
        arrows[module] = set()
        for imported in _runtime_imports(tree, module, path.name == "__init__.py"):
            name = imported
            while name and name not in modules:  # the module that a name is imported from
                name = name.rpartition(".")[0]
            arrows[module] |= {name} - {"", module}
    assert _circles(arrows) == []


def test_the_circle_rule_itself():
    assert _circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    tree = ast.parse("if TYPE_CHECKING:\n    import x\ndef f():\n    from . import y")
    assert list(_runtime_imports(tree, "k.z", False)) == ["k.y"]


def _loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import kernels_dsl", {"cutlass", "torch", "tvm_ffi"}),
        ("import lowering", {"cutlass", "torch"}),
        ("import kernels_dsl.config.gemm", {"cutlass", "torch", "tvm_ffi"}),
        ("import kernels_dsl.cli.main", {"cutlass", "torch", "tvm_ffi"}),
        ("from kernels_dsl import gemm", {"cutlass"}),
        ("import reference.gemm, reference.tolerance, reference.inputs", {"cutlass", "tvm_ffi"}),
    ],
)
def test_what_an_import_does_not_load(statement, absent):
    loaded = _loaded_by(statement)
    assert not loaded & absent, f"`{statement}` imports {sorted(loaded & absent)}"


def test_type_checkers_see_every_public_name():
    import kernels_dsl

    tree = ast.parse((ROOT / "kernels_dsl/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {name.asname: statement.module for statement in block.body for name in statement.names}
    assert seen == kernels_dsl._PUBLIC, "a public name is added to _PUBLIC and under TYPE_CHECKING"


def test_a_module_of_the_users_that_shadows_ours_is_named(tmp_path):
    (tmp_path / "lowering.py").write_text("mine = 1\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "import kernels_dsl"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path,
    )  # fmt: skip
    assert f"Python finds {tmp_path / 'lowering.py'} first on sys.path" in done.stderr


def test_every_public_name_resolves():
    import kernels_dsl

    for name in kernels_dsl.__all__:
        assert getattr(kernels_dsl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'gem'"):
        kernels_dsl.gem  # noqa: B018


def test_test_files_have_names_of_their_own():
    """pytest imports them by their base name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


ROOMS = {
    "hw": set(),
    "schedule": {"hw"},
    "reduce": {"hw"},
    "epilogue": {"hw", "reduce"},
    "mainloop": {"hw", "epilogue"},
    "attention": {"hw"},
}
"""Room of `kernels_dsl.blocks` -> the other rooms that it may import."""
ROOMLESS = ("kernels_dsl.blocks", "kernels_dsl.blocks.epilogue_fns")
"""The package itself, and names that it had before there were rooms."""


def test_blocks_are_in_rooms(trees):
    found, rooms = [], set()
    for path, tree in trees.items():
        module = _module(path)
        if not _within(module, "kernels_dsl.blocks") or module in ROOMLESS:
            continue
        room = module.split(".")[2]
        rooms.add(room)
        for line, imported in _imports(tree, module, path.name == "__init__.py"):
            other = imported.split(".")[2:3]
            if _within(imported, "kernels_dsl.blocks") and other != [room] and set(other) - ROOMS[room]:
                found.append((path, line, f"{room} may not import {imported}"))
    assert not found, _places(found)
    assert rooms == set(ROOMS)
