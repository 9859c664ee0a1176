"""Cases of `gemm_reduce`, checked whole: both outputs, and the memory around them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels_dsl.ops.gemm.reduced import gemm_reduce
from reference import buffers, inputs, reduced, tolerance


class Case(NamedTuple):
    """One call. `columns`: D is column-major. `gap`: elements after each number of the reduction."""

    m: int
    n: int
    k: int
    reduce: str = "sum"
    dim: int = -1
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    batch: int | None = None
    columns: bool = False
    gap: int = 0
    options: str = ""
    """Any of "linear" (alpha, beta · c, bias, residual), "gelu"."""


def _shape(case: Case, *extents: int) -> tuple[int, ...]:
    return extents if case.batch is None else (case.batch, *extents)


def options_of(case: Case, device: str) -> dict[str, Any]:
    """The epilogue's options."""
    options: dict[str, Any] = {}
    if "linear" in case.options:
        full = _shape(case, case.m, case.n)
        options = {
            "alpha": 0.5, "beta": 2.0, "c": inputs.normal(full, case.dtype, seed=4, device=device),
            "bias": inputs.normal((case.n,), torch.float32, seed=3, device=device) + 3.0,
            "residual": inputs.normal(full, case.dtype, seed=5, device=device),
        }  # fmt: skip
    if "gelu" in case.options:
        options["activation"] = "gelu"
    return options


def run(case: Case, device: str, **forced: Any) -> torch.Tensor:
    """Calls `gemm_reduce` on the case and checks every element of the outputs and what lies around them.

    Returns the reduction.
    """

    def values(number: int, *extents: int) -> torch.Tensor:
        return inputs.normal(_shape(case, *extents), case.dtype, seed=number, device=device)

    a, b, options = values(1, case.m, case.k), values(2, case.n, case.k).mT, options_of(case, device)
    out = buffers.poisoned(
        _shape(case, case.m, case.n), case.out_dtype, device=device, contiguous=-2 if case.columns else -1
    )
    lines = case.m if case.dim == -1 else case.n
    place = buffers.poisoned((*_shape(case, lines), 1), torch.float32, device=device, pad=case.gap)
    found = gemm_reduce(
        a, b, reduce=case.reduce, dim=case.dim, out=out.tensor, reduced_out=place.tensor[..., 0], **options,
        **forced,
    )  # fmt: skip
    assert found.out is out.tensor and found.reduced.data_ptr() == place.tensor.data_ptr()
    asked: dict[str, Any] = {"reduce": case.reduce, "dim": case.dim, **options}
    exact = reduced.gemm_reduce(a, b, **asked)
    peer = reduced.gemm_reduce_same_dtype(a, b, out_dtype=case.out_dtype, **asked)
    buffers.check_output(out)
    buffers.check_output(place)
    tolerance.check(out.tensor, exact.out, peer.out, case=str(case))
    as_rows = (-1, lines)
    tolerance.check(
        found.reduced.reshape(as_rows), exact.reduced.reshape(as_rows), peer.reduced.reshape(as_rows),
        case=str(case),
    )  # fmt: skip
    return found.reduced
