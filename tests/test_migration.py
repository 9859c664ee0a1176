"""The page of migration: its examples run in the emulator, and give what PyTorch does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels_dsl
from lowering import emulator
from reference import inputs, tolerance

PAGE = Path(__file__).parents[1] / "docs/reference/migration.md"
EXAMPLES = {
    heading: re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for heading, text in re.findall(
        r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
}


def _normal(*shape: int) -> torch.Tensor:
    return inputs.normal(shape, torch.bfloat16, seed=sum(shape))


def _heads(*layout: int) -> dict[str, Any]:
    return {name: _normal(*layout) * scale for name, scale in zip("qkv", (1, -1, 0.5))}


def _swapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in (q, k, v)]


def _softmax(qkv: Iterable[torch.Tensor], kept: torch.Tensor, dtype: torch.dtype, shift: Any = 0.0):
    """Attention in `dtype`, all (B, H, S, D), fewer heads in k and v repeated."""
    q, k, v = (x.to(dtype) for x in qkv)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5 + shift).to(dtype)
    return scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v


I, J = torch.arange(48)[:, None], torch.arange(48)


def _flash():
    names = _heads(1, 48, 2, 64)
    qkv, kept = _swapped(**names), (J <= I) & (J >= I - 31)
    return names, lambda dtype: _softmax(qkv, kept, dtype).transpose(1, 2)


def _sdpa():
    names = {"q": _normal(1, 4, 40, 64), "k": -_normal(1, 2, 48, 64), "v": _normal(1, 2, 48, 64)}
    qkv = tuple(names.values())
    return names, lambda dtype: _softmax(qkv, (J <= I)[:40], dtype)


def _flex():
    from torch.nn.attention.flex_attention import create_block_mask

    def distance(score, b, h, i, j):
        return score - 0.125 * (i - j)

    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 48, 48, device="cpu", BLOCK_SIZE=128)
    names = _heads(1, 2, 48, 64)
    qkv = tuple(names.values())
    shift = -0.125 * (I - J)
    return {**names, "distance": distance, "blocks": blocks}, lambda d: _softmax(qkv, J <= I, d, shift)


def _scaled():
    a8, w8 = (_normal(rows, 64).to(torch.float8_e4m3fn) for rows in (48, 32))
    scale_a, scale_b, bias = torch.tensor([0.5]), torch.linspace(0.25, 1.0, 32)[None], _normal(32)

    def expected(dtype):
        wide = torch.promote_types(dtype, torch.float32)
        return (((a8.to(wide) @ w8.to(wide).t()) * scale_a) * scale_b + bias).to(dtype)

    return {"a8": a8, "w8": w8, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}, expected


def _grouped():
    x, w = _normal(48, 64), _normal(2, 64, 32)
    names = {"x": x, "w": w, "ends": torch.tensor([20, 48], dtype=torch.int32)}
    return names, lambda d: torch.cat([x[:20].to(d) @ w[0].to(d), x[20:].to(d) @ w[1].to(d)])


def _sparse():
    dense, b = _normal(48, 64), _normal(64, 32)
    dense[:16, 16:48] = 0
    return {"dense": dense, "b": b}, lambda dtype: dense.to(dtype) @ b.to(dtype)


def _xformers():
    names = {"q": _normal(1, 40, 2, 64), "k": -_normal(1, 48, 2, 64), "v": _normal(1, 48, 2, 64)}
    qkv = _swapped(**names)
    return names, lambda dtype: _softmax(qkv, (J <= I)[:40], dtype).transpose(1, 2)


CASES: dict[str, Callable[[], Any]] = {
    "flash_attn": _flash,
    "torch: scaled_dot_product_attention": _sdpa,
    "torch: FlexAttention": _flex,
    "torch: _scaled_mm": _scaled,
    "torch: grouped_mm and _grouped_mm": _grouped,
    "torch: sparse_bsr": _sparse,
    "xFormers: memory_efficient_attention": _xformers,
}
"""Section -> the names that its example uses, and its result in a dtype."""


@pytest.mark.parametrize("section", CASES)
def test_the_example_gives_what_pytorch_does(section):
    (code,) = EXAMPLES[section]
    names, expected = CASES[section]()
    names |= {"torch": torch, "kernels_dsl": kernels_dsl}
    with emulator.run(arch="sm_90a"):
        exec(code, names)
    tolerance.check(names["out"], expected(torch.float64), expected(torch.bfloat16), case=section)
    if "same" in names:
        assert torch.equal(names["same"], names["out"])


def test_every_section_has_a_case():
    """That of FlashInfer names a page, whose example is tested with its interface."""
    assert [section for section in EXAMPLES if section != "FlashInfer"] == list(CASES)
