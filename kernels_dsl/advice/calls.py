"""The calls that `advise` compares: dense products, and those of one block size at several densities.

Operands are random. Each group is made when it is measured, and its memory is freed after that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kernels_dsl.advice.records import Block, Question, block_text
from kernels_dsl.measure import Call
from kernels_dsl.nn.scaled_linear import RECIPES
from kernels_dsl.ops.bsr.bsr import bsr_gemm, bsr_supports
from kernels_dsl.ops.bsr.scaled import bsr_scaled_gemm, bsr_scaled_supports
from kernels_dsl.ops.gemm.gemm import gemm, supports
from kernels_dsl.ops.quantize.quantize import quantize, quantize_supports
from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm, scaled_gemm_supports
from kernels_dsl.sparse.tensor import BsrTensor

DENSITIES = (0.05, 0.1, 0.25, 0.5, 1.0)
"""Densities between which a crossover is interpolated."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OURS, TORCH = "gemm(a, w.t())", "torch.mm(a, w.t())"


class Way(NamedTuple):
    """A call to time. kind: "dense", "fp8 dense", "sparse", "fp8 sparse". before: the name of the call that
    comes before it for each new a, "" for none. density: of a sparse one."""

    kind: str
    call: Call
    before: str = ""
    density: float = 1.0


class Group(NamedTuple):
    """Calls that are timed in turns, by the text that names each; `steps`: those that come before others;
    reasons why some are not tried."""

    ways: dict[str, Way]
    steps: dict[str, Call]
    refused: list[str]

    def calls(self) -> dict[str, Call]:
        """All that are to be timed."""
        return {**{name: way.call for name, way in self.ways.items()}, **self.steps}


def _always(function: Callable[[], object]) -> Call:
    """A function without arguments, as timing calls it."""
    return lambda _set: function()


def _dense_calls(a: torch.Tensor, w: torch.Tensor) -> dict[str, Way]:
    out = a.new_empty(a.shape[0], w.shape[0])
    return {
        OURS: Way("dense", _always(lambda: gemm(a, w.t(), out=out))),
        TORCH: Way("dense", _always(lambda: torch.mm(a, w.t(), out=out))),
    }


def _operands(question: Question, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    made = (
        torch.randn(rows, question.k, device=device, dtype=DTYPES[question.dtype])
        for rows in (question.m, question.n)
    )
    return next(made), next(made)


def dense_group(question: Question, device: str) -> Group:
    """Products without sparsity. ValueError where not even `gemm` runs."""
    a, w = _operands(question, device)
    if (reason := supports(a, w.t())) is not None:
        raise ValueError(f"advise has nothing to measure: {reason}")
    group = Group(_dense_calls(a, w), {}, [])
    for recipe, (of_a, of_w) in RECIPES.items():
        reason = quantize_supports(a, scaling=of_a) or quantize_supports(w, scaling=of_w)
        if reason is None:
            reason = _add_scaled(group, recipe, a, w)
        if reason is not None:
            group.refused.append(f"fp8 with scales by {recipe}: {reason}")
    return group


def _add_scaled(group: Group, recipe: str, a: torch.Tensor, w: torch.Tensor) -> str | None:
    """Add an fp8 product and the quantisation of a before it; returns the reason where it cannot run."""
    of_a, of_w = RECIPES[recipe]
    made, of_weight = quantize(a, scaling=of_a), quantize(w, scaling=of_w)
    scale_w = of_weight[1].mT if of_weight[1].dim() == 2 else of_weight[1]
    fast, out = recipe != "block", a.new_empty(a.shape[0], w.shape[0])
    tensors = (made[0], of_weight[0].mT, made[1], scale_w)
    reason = scaled_gemm_supports(*tensors, use_fast_accum=fast, out=out)
    if reason is not None:
        return reason
    step = f'quantize(a, scaling="{of_a}")'
    name = f"scaled_gemm, scales by {recipe}" + ", use_fast_accum=True" * fast
    call = _always(lambda: scaled_gemm(*tensors, use_fast_accum=fast, out=out))
    group.ways[name] = Way("fp8 dense", call, step)
    group.steps[step] = _always(lambda: quantize(a, scaling=of_a, out=made))
    return None


def sparse_group(question: Question, block: Block, device: str) -> Group:
    """Products with w of blocks of one size, at DENSITIES and the question's, and dense ones beside them."""
    a, w = _operands(question, device)
    if question.n % block[0] or question.k % block[1]:
        size = f"({question.n}, {question.k})"
        return Group({}, {}, [f"blocks of {block_text(block)}: they do not divide w, which is {size}"])
    group = Group(_dense_calls(a, w), {}, [])
    out = a.new_empty(question.m, question.n)
    for density in sorted({*DENSITIES, question.density or 1.0}):
        sparse = BsrTensor.by_magnitude(w, block, density).t()
        if (reason := bsr_supports(a, sparse)) is not None:
            return Group({}, {}, [f"blocks of {block_text(block)}: {reason}"])
        name = f"bsr_gemm(a, w.t()), blocks of {block_text(block)}, {density:.4g} kept"
        call = _always(partial(bsr_gemm, a, sparse, out=out))
        group.ways[name] = Way("sparse", call, density=density)
        if density == question.density and (reason := _add_scaled_sparse(group, a, sparse)) is not None:
            group.refused.append(f"fp8 in blocks of {block_text(block)}: {reason}")
    return group


def _add_scaled_sparse(group: Group, a: torch.Tensor, sparse: BsrTensor) -> str | None:
    """Add the product with fp8 blocks; returns the reason where it cannot run."""
    reason = quantize_supports(a, scaling="row")
    if reason is not None:
        return reason
    made, (values, scales) = quantize(a, scaling="row"), quantize(sparse.values, scaling="matrix")
    small, out = sparse.with_values(values), a.new_empty(a.shape[0], sparse.size[1])
    reason = bsr_scaled_supports(made[0], small, made[1], scales, out=out)
    if reason is not None:
        return reason
    step = 'quantize(a, scaling="row")'
    name = f"bsr_scaled_gemm, blocks of {block_text(sparse.block)}, a scale each"
    call = _always(lambda: bsr_scaled_gemm(made[0], small, made[1], scales, out=out))
    group.ways[name] = Way("fp8 sparse", call, step, sparse.density)
    group.steps[step] = _always(lambda: quantize(a, scaling="row", out=made))
    return None
