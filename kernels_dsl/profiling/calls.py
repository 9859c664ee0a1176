"""The calls that `profile` can run: their operands, which are random, and their operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels_dsl.advice.calls import DTYPES
from kernels_dsl.nn.scaled_linear import RECIPES
from kernels_dsl.ops.attention.attention import attention, attention_supports
from kernels_dsl.ops.bsr.bsr import bsr_gemm, bsr_supports
from kernels_dsl.ops.gemm.gemm import gemm, supports
from kernels_dsl.ops.quantize.quantize import quantize
from kernels_dsl.ops.scaled.scaled_gemm import scaled_gemm, scaled_gemm_supports
from kernels_dsl.profiling.roofline import Work
from kernels_dsl.sparse.tensor import BsrTensor
from lowering.records import frozen


@frozen
class Asked:
    """A call to profile. operation: "gemm", "attention", "bsr" or "fp8". shape: M, N, K of a @ w.t(), or
    batch, sequence, heads and head dimension. kv_heads: of attention; 0 for as many as of queries. backward:
    attention's gradients, without the forward pass."""

    operation: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    causal: bool = False
    kv_heads: int = 0
    backward: bool = False
    density: float = 0.25
    block: tuple[int, int] = (64, 64)
    scales: str = "row"


class Prepared(NamedTuple):
    """A call on its operands, and what it computes."""

    call: Callable[[], object]
    work: Work


def prepare(asked: Asked, device: str = "cuda") -> Prepared:
    """The operands, made. ValueError: the reason why the operation does not take them here."""
    made = {"gemm": _gemm, "attention": _attention, "bsr": _bsr, "fp8": _fp8}
    return made[asked.operation](asked, device)


def _check(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)


def _factors(asked: Asked, device: str) -> list[torch.Tensor]:
    """a (M, K) and w (N, K)."""
    m, n, k = asked.shape
    return [torch.randn(rows, k, device=device, dtype=DTYPES[asked.dtype]) for rows in (m, n)]


def _text(asked: Asked, *more: str) -> str:
    return " ".join([asked.operation, "x".join(map(str, asked.shape)), asked.dtype, *more])


def _gemm(asked: Asked, device: str) -> Prepared:
    a, w = _factors(asked, device)
    out = a.new_empty(a.shape[0], w.shape[0])
    _check(supports(a, w.t(), out=out))
    m, n, k = asked.shape
    return Prepared(lambda: gemm(a, w.t(), out=out), Work(_text(asked), 2.0 * m * n * k))


def _bsr(asked: Asked, device: str) -> Prepared:
    a, w = _factors(asked, device)
    sparse = BsrTensor.by_magnitude(w, asked.block, asked.density).t()
    out = a.new_empty(a.shape[0], w.shape[0])
    _check(bsr_supports(a, sparse, out=out))
    m, n, k = asked.shape
    text = _text(asked, f"{sparse.density:.4g} of blocks of {asked.block[0]}x{asked.block[1]} kept")
    return Prepared(lambda: bsr_gemm(a, sparse, out=out), Work(text, 2.0 * m * n * k * sparse.density))


def _fp8(asked: Asked, device: str) -> Prepared:
    a, w = _factors(asked, device)
    of_a, of_w = RECIPES[asked.scales]
    (small_a, scale_a), (small_w, scale_w) = quantize(a, scaling=of_a), quantize(w, scaling=of_w)
    factors = small_a, small_w.mT, scale_a, scale_w.mT if scale_w.dim() == 2 else scale_w
    out, fast = a.new_empty(a.shape[0], w.shape[0]), asked.scales != "block"
    _check(scaled_gemm_supports(*factors, use_fast_accum=fast, out=out))
    m, n, k = asked.shape
    text = _text(asked, f"scales by {asked.scales}{', use_fast_accum=True' * fast}")
    return Prepared(
        lambda: scaled_gemm(*factors, use_fast_accum=fast, out=out), Work(text, 2.0 * m * n * k, rate=2)
    )


def _attention(asked: Asked, device: str) -> Prepared:
    batch, length, heads, dim = asked.shape
    sizes = [(batch, length, count, dim) for count in (heads, *[asked.kv_heads or heads] * 2)]
    q, k, v = (torch.randn(size, device=device, dtype=DTYPES[asked.dtype]) for size in sizes)
    _check(attention_supports(q, k, v, causal=asked.causal))
    more = [f"{asked.kv_heads} kv heads"] * bool(asked.kv_heads) + ["causal"] * asked.causal
    pairs = length * length / 2 if asked.causal else length * length
    flops = 4.0 * batch * heads * dim * pairs
    if not asked.backward:
        return Prepared(lambda: attention(q, k, v, causal=asked.causal), Work(_text(asked, *more), flops))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=asked.causal)
    gradient = torch.randn_like(out)
    work = Work(_text(asked, *more, "backward"), 2.5 * flops)
    return Prepared(lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True), work)
