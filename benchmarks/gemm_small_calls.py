"""Operands and calls of `gemm_small`: ours, cuBLAS and cuBLASLt on the same memory, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.attention_calls import DEVICE
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.config.promotion import GROUP
from kernels_dsl.measure import Call

KINDS = ("bf16", "tensor", "row", "block", "tensor-fast")
"""bf16, or e4m3 with one scale, scales of rows and columns, of 1×128 and 128×128; `-fast`: not promoted."""
SETS_BYTES = 240e6
"""Weights of all sets together, three times what L2 holds and more; a graph of 20 calls goes through them."""
MOST_SETS = 20
POOL_BYTES = 1 << 30
TOLERANCE = 0.01
"""Error of the largest element, as a part of the root mean square of D: an element is rounded to bf16."""


class Problem(NamedTuple):
    """x (M, K) by a layer's weight (N, K)."""

    kind: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.kind}"

    @property
    def weight_bytes(self) -> int:
        return self.n * self.k * (2 if self.kind == "bf16" else 1)

    @property
    def traffic(self) -> int:
        """Bytes that must move: weight and x read once, D written once."""
        return self.weight_bytes * (self.n + self.m) // self.n + 2 * self.m * self.n

    @property
    def fast(self) -> bool:
        return self.kind.endswith("-fast")

    @property
    def scaling(self) -> str:
        return self.kind.removesuffix("-fast")

    @property
    def sets(self) -> int:
        """Weights to rotate through."""
        return max(2, min(MOST_SETS, -(-int(SETS_BYTES) // self.weight_bytes)))


class Operands(NamedTuple):
    """x (M, K), weight (N, K), and for fp8 their scales as `torch._scaled_mm` takes them."""

    x: Any
    weight: Any
    scale_x: Any = None
    scale_weight: Any = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of a product: x, the weight's transpose, scales."""
        scales = () if self.scale_x is None else (self.scale_x, self.scale_weight)
        return self.x, self.weight.t(), *scales


def pools() -> dict[bool, Any]:
    """Random values N(0, 1) that weights are views of, by whether they are fp8; a GiB each."""
    import torch

    wide = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device=DEVICE).normal_()
    narrow = torch.empty(POOL_BYTES, dtype=torch.float8_e4m3fn, device=DEVICE)
    for half in narrow.split(POOL_BYTES // 2):
        half.copy_(wide)
    return {False: wide, True: narrow}


def weight_views(problem: Problem, pool: Any) -> list[Any]:
    """(N, K) views of the pool, one after the other; from its start again where it ends."""
    size = problem.n * problem.k
    places = max(1, pool.numel() // size)
    return [pool[i % places * size :][:size].view(problem.n, problem.k) for i in range(problem.sets)]


def operands(problem: Problem, pool: Any | None) -> list[Operands]:
    """The sets of a problem; on the CPU, without values, where there is no pool: to be recorded."""
    import torch

    kind, m, n, k = problem
    fp8 = kind != "bf16"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    device = "cpu" if pool is None else DEVICE
    if pool is None:
        weights = [torch.empty(n, k, dtype=dtype)]
        x = torch.empty(m, k, dtype=dtype)
    else:
        weights, x = weight_views(problem, pool), torch.randn(m, k, device=DEVICE).to(dtype)
    if not fp8:
        return [Operands(x, weight) for weight in weights]

    def scales(*shape: int) -> Any:
        return torch.rand(shape, device=device) + 0.5

    groups = -(-k // GROUP)
    if problem.scaling == "tensor":
        scale_x, scale_weight = scales(1)[0], scales(1)[0]
    elif problem.scaling == "row":
        scale_x, scale_weight = scales(m, 1), scales(1, n)
    else:
        scale_x, scale_weight = scales(groups, m).t(), scales(-(-n // GROUP), groups).t()
    return [Operands(x, weight, scale_x, scale_weight) for weight in weights]


def our_call(
    problem: Problem, sets: Sequence[Operands], out: Any, config: GemmConfig | None = None
) -> Callable[[int], Any]:
    """Ours into `out`, with the table's configuration or another."""
    import kernels_dsl

    arguments = [each.arguments for each in sets]
    if problem.kind == "bf16":
        return lambda i: kernels_dsl.gemm(*arguments[i], out=out, config=config)
    fast = problem.fast
    return lambda i: kernels_dsl.scaled_gemm(*arguments[i], out=out, config=config, use_fast_accum=fast)


def peer_calls(problem: Problem, sets: Sequence[Operands], out: Any) -> dict[str, Call]:
    """cuBLAS and cuBLASLt into `out`, in each way that PyTorch has for such operands.

    bf16: torch.mm and a linear layer by cuBLAS, torch.mm by cuBLASLt, and by cuBLAS with weights that lie
    in memory as (K, N), another layout of the same numbers. fp8: torch._scaled_mm, which takes one layout.
    """
    import torch

    arguments = [each.arguments for each in sets]
    if problem.kind != "bf16":
        options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": problem.fast, "out": out}
        return {"cublaslt": lambda i: torch._scaled_mm(*arguments[i], **options)}
    other = [each.weight.view(problem.k, problem.n) for each in sets]

    def by_library(name: str, i: int) -> None:
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(name)
        torch.mm(*arguments[i], out=out)
        torch.backends.cuda.preferred_blas_library(before)

    return {
        "cublas/mm": partial(by_library, "cublas"),
        "cublas/linear": lambda i: torch.nn.functional.linear(sets[i].x, sets[i].weight),
        "cublas/mm, (K, N) weights": lambda i: torch.mm(sets[i].x, other[i], out=out),
        "cublaslt": partial(by_library, "cublaslt"),
    }


def exact(problem: Problem, one: Operands) -> Any:
    """The product in float32 of the operands as they are."""
    x, weight = one.x.float(), one.weight.float()
    if problem.kind == "bf16":
        return x @ weight.t()
    scale_x, scale_weight = one.scale_x, one.scale_weight.t() if one.scale_weight.dim() else one.scale_weight
    if problem.scaling == "block":
        scale_x = scale_x.repeat_interleave(GROUP, 1)[:, : problem.k]
        scale_weight = scale_weight.repeat_interleave(GROUP, 0)[: problem.n]
        scale_weight = scale_weight.repeat_interleave(GROUP, 1)[:, : problem.k]
    return (x * scale_x) @ (weight * scale_weight).t()


def error(found: Any, right: Any, fast: bool) -> float:
    """The largest error as a part of the root mean square; sums that are not promoted keep 14 bits or so."""
    worst = float((found.float() - right).abs().max() / right.square().mean().sqrt())
    return worst / (8.0 if fast else 1.0)


def check(call: Call, out: Any, right: Any, fast: bool) -> None:
    """AssertionError where a call does not write the product of the first set into `out`."""
    out.fill_(float("nan"))
    call(0)
    worst = error(out, right, fast)
    # Of values of up to five times the root mean square, half a unit in the last place of bf16 is 0.008.
    assert worst < 4 * TOLERANCE, f"largest error {worst:.4f} of the root mean square"
