"""fp8 products of rows in groups, as in mixtures of experts, against PyTorch's: a suite of `fp8`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.attention_calls import DEVICE
from benchmarks.harness import OURS, Case
from kernels_dsl.measure import Call


class Experts(NamedTuple):
    """`rows` in `groups` of random sizes, each times its own (k, n)."""

    groups: int
    rows: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.groups} groups, {self.rows} rows, {self.k}→{self.n}"


SHAPES = (
    Experts(8, 16384, 14336, 4096),
    Experts(64, 16384, 4096, 7168),
    Experts(128, 4096, 1536, 4096),
    Experts(32, 128, 4096, 4096),
)
"""Few large experts, many, many with few rows each, and the decoding of a batch."""


def ends_of(shape: Experts) -> Any:
    """(groups,) int32: where each group ends; a few groups have most rows."""
    import torch

    weights = torch.randn(shape.groups, generator=torch.Generator().manual_seed(shape.groups)).exp()
    ends = (weights.cumsum(0) / weights.sum() * shape.rows).round().to(torch.int32)
    ends[-1] = shape.rows
    return ends.to(DEVICE)


def calls_of(shape: Experts, a: Any, b: Any, ends: Any) -> dict[str, Call]:
    """The competitors; a (rows, K) and b (groups, N, K), bf16.

    "ours_dense": one product of all rows with one matrix, what groups cannot beat. "torch" has the scales and
    sums of ours; "ours_blocks" has those of 1x128 and 128x128.
    """
    import torch

    import kernels_dsl

    (a8, of_a), (b8, of_b) = (kernels_dsl.quantize(x, scaling="row") for x in (a, b))
    (a1, blocks_a), (b1, blocks_b) = (
        kernels_dsl.quantize(x, scaling=s) for x, s in ((a, "1x128"), (b, "128x128"))
    )
    rows = a8, b8.mT, of_a.squeeze(-1), of_b.squeeze(-1)
    torch_options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return {
        OURS: lambda _set: kernels_dsl.scaled_grouped_gemm(*rows, ends, use_fast_accum=True),
        "ours_promoted": lambda _set: kernels_dsl.scaled_grouped_gemm(*rows, ends),
        "ours_blocks": lambda _set: kernels_dsl.scaled_grouped_gemm(a1, b1.mT, blocks_a, blocks_b.mT, ends),
        "ours_bf16": lambda _set: kernels_dsl.grouped_gemm(a, b.mT, ends),
        "torch": lambda _set: torch._scaled_grouped_mm(*rows, ends, **torch_options),
        "torch_bf16": lambda _set: torch._grouped_mm(a, b.mT, ends),
        "ours_dense": lambda _set: kernels_dsl.scaled_gemm(
            a8, b8[0].mT, of_a, of_b[0].mT, use_fast_accum=True
        ),
    }


def cases() -> Iterator[Case]:
    """Every shape."""
    import torch

    import kernels_dsl

    for shape in SHAPES:
        a = torch.randn(shape.rows, shape.k, device=DEVICE).bfloat16()
        b = torch.empty(shape.groups, shape.n, shape.k, dtype=torch.bfloat16, device=DEVICE).normal_()
        ends = ends_of(shape)
        calls = calls_of(shape, a, b, ends)

        def verify() -> None:
            exact = kernels_dsl.grouped_gemm(a, b.mT, ends).float()  # noqa: B023
            largest = int(ends.diff(prepend=ends.new_zeros(1)).argmax())  # noqa: B023
            rows = slice(int(ends[largest - 1]) if largest else 0, int(ends[largest]))  # noqa: B023
            plain = a[rows].float() @ b[largest].float().mT  # noqa: B023
            assert float((exact[rows] - plain).norm() / plain.norm()) < 0.01
            for name in (OURS, "ours_promoted", "ours_blocks"):
                found: Any = calls[name](0)  # noqa: B023
                assert float((found.float() - exact).norm() / exact.norm()) < 0.05, name

        yield Case(str(shape), 2 * shape.rows * shape.n * shape.k, calls, verify=verify)
        torch.cuda.empty_cache()
