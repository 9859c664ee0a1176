"""The documentation points at things that exist, and its example of a call runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "docs", ROOT / "tutorials", ROOT / "examples", ROOT / "benchmarks")
PAGES = (page for folder in FOLDERS for page in sorted(folder.rglob("*.md")))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES]


def _anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).strip().lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", document.read_text()):
        place, _, anchor = link.partition("#")
        page = document.parent / place if place else document
        if "://" not in link and (not page.exists() or (anchor and anchor not in _anchors(page))):
            missing.append(link)
    assert not missing, f"{document.name} links to {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_exist(document):
    """Names called as `kernels_dsl.name(`, modules that are run, and files of the code."""
    import kernels_dsl

    text = document.read_text()
    names = set(re.findall(r"\bkernels_dsl\.(\w+)\(", text))
    modules = set(re.findall(r"python -m ((?:benchmarks|kernels_dsl|lowering)[\w.]*)", text))
    lost = [name for name in names if not hasattr(kernels_dsl, name)]
    lost += [
        path
        for path in re.findall(r"`((?:kernels_dsl|lowering|reference)/[\w./]+)", text)
        if not (ROOT / path).exists()
    ]
    lost += [module for module in modules if importlib.util.find_spec(module.rstrip(".")) is None]
    assert not lost, f"{document.name} speaks of {lost}"


def test_commands_of_the_readme_exist(capsys):
    from kernels_dsl.cli.main import build_parser

    commands = re.findall(r"python -m kernels_dsl ([^#\n`]+)", (ROOT / "README.md").read_text())
    assert len(commands) >= 6
    for command in commands:
        build_parser().parse_args(command.strip().rstrip(".").split())


def test_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "test-fast"} <= targets


def test_the_readmes_calls_are_right_in_the_emulator(seed):
    """The three calls of the first example, on small CPU tensors."""
    from lowering import emulator
    from reference import inputs, tolerance
    from reference.gemm import gemm, gemm_same_dtype

    code = (ROOT / "README.md").read_text().partition("## Call a kernel")[2].partition("## ")[0]
    calls = re.findall(r"^d = (kernels_dsl\.gemm\(.*\))", code, re.MULTILINE)
    assert len(calls) == 3
    a = inputs.normal((48, 64), torch.bfloat16, seed=seed)
    w = inputs.normal((40, 64), torch.bfloat16, seed=seed + 1)
    bias = inputs.normal((40,), torch.bfloat16, seed=seed + 2)
    epilogues = ({}, {"bias": bias, "activation": "gelu"}, {"alpha": 0.5})
    import kernels_dsl

    names = {"kernels_dsl": kernels_dsl, "a": a, "w": w, "bias": bias}
    for call, epilogue in zip(calls, epilogues):
        with emulator.run(arch="sm_90a", check=False):
            d = eval(call, dict(names))
        tolerance.check(d, gemm(a, w.t(), **epilogue), gemm_same_dtype(a, w.t(), **epilogue), case=call)


@pytest.mark.parametrize("number, holds", [(0, "kernels_dsl.attention("), (2, "@cute.kernel")])
def test_the_readmes_programs_run_as_they_stand(number, holds, tmp_path):
    code = _blocks("README.md")[number]
    assert holds in code
    (tmp_path / "own.py").write_text(code)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "own.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/gemm.md",
        "docs/attention.md",
        "docs/bsr.md",
        "docs/decoding.md",
        "docs/quick_start.md",
        "docs/gemm_reduce.md",
    ],
)
def test_examples_of_calls_are_taken(page):
    """Every block that calls operations: kernels are asked for, none is compiled."""
    import lowering

    smaller = _smaller if page in ("README.md", "docs/gemm.md", "docs/gemm_reduce.md") else str
    text = "\n".join(
        block for block in _blocks(page) if not re.search(r"@lowering|emulator|autotune|_impl", block)
    )
    lines = [
        smaller(line)
        for line in text.replace('device="cuda"', 'device="cpu"')
        .replace('device = "cuda"', 'device = "cpu"')
        .splitlines()
    ]
    with lowering.recording.record(arch="sm_90a") as calls:
        exec("\n".join(lines), {})
    assert len(calls) >= max(1, text.count("kernels_dsl.gemm("))


FP8_PAGES = {"quantize": 1, "fp8_gemm": 2, "fp8_linear": 1, "attention_fp8": 1}
"""Page -> how many examples it has."""


@pytest.mark.parametrize("page", FP8_PAGES)
def test_examples_of_fp8_are_taken(page):
    """Each block by itself, on tensors of the names that it uses."""
    import kernels_dsl
    import lowering

    def matrices(*shapes):
        return [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]

    named = dict(zip(("x", "weight", "bias"), matrices((64, 256), (128, 256), (128,))))
    named |= dict(zip("qkv", matrices(*[(1, 40, 2, 64)] * 3)))
    named |= {"torch": torch, "kernels_dsl": kernels_dsl, "tokens_of_expert": torch.tensor([24, 40])}
    named["linear"] = torch.nn.Linear(256, 128, dtype=torch.bfloat16).requires_grad_(False)
    named["model"] = torch.nn.Sequential(torch.nn.Linear(8, 8))
    (experts,) = matrices((2, 128, 256))
    blocks = _blocks(f"docs/{page}.md")
    assert len(blocks) == FP8_PAGES[page]
    for block in blocks:
        own = {"weight": experts} if "grouped" in block else {}
        with lowering.recording.record(arch="sm_90a") as calls:
            exec(block, {**named, **own})
        assert calls


def _blocks(page: str) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def _smaller(line: str) -> str:
    """A line of an example, with the sizes of tensors that it makes divided by 8."""
    if "torch.rand" not in line:
        return line
    return re.sub(r"\b\d{3,}\b", lambda size: str(int(size[0]) // 16 * 2), line)


def test_the_reference_lists_every_public_name():
    import kernels_dsl

    text = (ROOT / "docs/reference/api.md").read_text()
    listed = re.findall(r"^\.\. auto(?:function|class):: kernels_dsl\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted({*kernels_dsl._PUBLIC} - {"__version__"})


def test_the_reference_lists_every_block():
    text = (ROOT / "docs/reference/blocks.md").read_text()
    listed = re.findall(r"^\.\. automodule:: kernels_dsl\.blocks\.(\w+)\.(\w+)$", text, flags=re.MULTILINE)
    files = (ROOT / "kernels_dsl" / "blocks").glob("*/[a-z]*.py")
    assert sorted(listed) == sorted((file.parent.name, file.stem) for file in files)
