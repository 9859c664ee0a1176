"""Messages quoted on the page of troubleshooting: the source has each, and wrong calls raise them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernels_dsl
import lowering

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/troubleshooting.md"
QUOTED = re.findall(r"^- `(.+)`$", PAGE.read_text(), re.MULTILINE)
PLACE = "…"
"""Stands for a value, on the page and in a template."""


def _template(node: ast.AST) -> str | None:
    """A string of the source, f-strings with `PLACE` for each value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(x.value) if isinstance(x, ast.Constant) else PLACE for x in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def templates(tree: ast.AST) -> Iterator[str]:
    """Strings of a module that are values, whole: no docstrings, no parts of f-strings."""
    left_out = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        text = _template(node)
        if text and id(node) not in left_out:
            yield text


def pattern(quoted: str, value: str) -> re.Pattern[str]:
    """A quoted message as a pattern, with `value` for what stands for values."""
    return re.compile(value.join(map(re.escape, quoted.split(PLACE))), re.DOTALL)


def in_source(quoted: str, texts: list[str]) -> bool:
    """True where one string has the whole message; values side by side are one on the page."""
    wanted = pattern(quoted, rf"{PLACE}(?:\W?{PLACE})*")
    return any(wanted.search(text) for text in texts)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    files = [path for package in ("kernels_dsl", "lowering") for path in (ROOT / package).rglob("*.py")]
    return [text for path in files for text in templates(ast.parse(path.read_text()))]


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_source_has_the_message(quoted, texts):
    assert in_source(quoted, texts), f"no string of kernels_dsl or lowering reads {quoted!r}"


def test_every_entry_says_cause_and_remedy():
    entries = re.split(r"^- `.+`$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(QUOTED) == len(set(QUOTED)) >= 40
    lacking = [message for message, text in zip(QUOTED, entries) if "*Cause" not in text]
    lacking += [m for m, text in zip(QUOTED, entries) if not re.search(r"\*Remedy:|and remedy:\*", text)]
    assert not lacking


def test_the_comparison_itself():
    source = 'def f():\n    """x is y, must be z."""\n    raise E(f"{a} is {b}.{c}, " f"must be {d}")\n'
    (text,) = templates(ast.parse(source))
    assert text == "… is ….…, must be …"
    assert in_source("… is …, must be …", [text])
    assert not in_source("… was …, must be …", [text])
    assert not in_source("… is one, must be …", [text])
    assert not in_source("x is y, must be z.", [text])


def _zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _closure():
    factor = _zeros(1)
    return kernels_dsl.gemm(_zeros(16, 16), _zeros(16, 16), epilogue=lambda acc: acc * factor)


def _out_of_input():
    a = _zeros(16, 16)
    return kernels_dsl.gemm(a, a, out=a)


def _out_with_gradient():
    a = _zeros(16, 16).requires_grad_()
    return kernels_dsl.gemm(a, a, out=_zeros(16, 16))


def _tangent():
    a = _zeros(16, 16)
    return torch.func.jvp(lambda x: kernels_dsl.gemm(x, a), (a,), (a,))


def _attention(*shape: int, **options):
    q, k = _zeros(1, 8, *shape), _zeros(1, 8, 2, shape[-1])
    return kernels_dsl.attention(q, k, k, **options)


def _torch_attention(**options):
    q, k = _zeros(1, 4, 8, 64), _zeros(1, 2, 8, 64)
    return kernels_dsl.scaled_dot_product_attention(q, k, k, **options)


def _grouped():
    counts = torch.tensor([0, 8, 16], dtype=torch.int32)
    return kernels_dsl.grouped_gemm(_zeros(16, 16), _zeros(2, 16, 16), counts)


def _twice():
    kept = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)
    kernels_dsl.BsrTensor(*kept, _zeros(2, 16, 16), (16, 32)).check()


REFUSALS = TypeError, ValueError, NotImplementedError
RAISED = {
    "must be one that fits": lambda: _attention(
        4, 64, config=kernels_dsl.Sm90AttentionConfig(80, 64, 64, 64)
    ),
    "must be a multiple of … up to": lambda: _attention(4, 100),
    "number of heads": lambda: _attention(3, 64),
    "enable_gqa": _torch_attention,
    "there is no dropout": lambda: _torch_attention(dropout_p=0.1),
    "must be … like …": lambda: kernels_dsl.attention(*[_zeros(1, 8, 2, 64)] * 2, _zeros(1, 8, 2, 64).half()),
    "must get tensors as arguments": _closure,
    "shares memory with": _out_of_input,
    "a tensor requires grad": _out_with_gradient,
    "has a tangent": _tangent,
    "an end for each matrix of b": _grouped,
    "twice in block row": _twice,
    "must be strided (dense)": lambda: kernels_dsl.gemm(_zeros(16, 16).to_sparse_coo(), _zeros(16, 16)),
}
"""Part of one message of the page -> a call that its cause befalls."""


@pytest.mark.parametrize("part", RAISED)
def test_the_cause_raises_the_message(part):
    (quoted,) = (message for message in QUOTED if part in message)
    with lowering.recording.record(arch="sm_90a"), pytest.raises(REFUSALS) as raised:
        RAISED[part]()
    assert pattern(quoted, ".+").search(str(raised.value)), raised.value


def test_a_call_on_the_cpu_raises_the_message():
    (quoted,) = (message for message in QUOTED if "must be on a CUDA device" in message)
    with pytest.raises(ValueError) as raised:
        kernels_dsl.gemm(_zeros(16, 16), _zeros(16, 16))
    assert pattern(quoted, ".+").search(str(raised.value))
