"""Cases of `gemm_gated`, checked whole: both outputs, and the memory around them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels_dsl.ops.gemm.gated import gemm_gated
from reference import buffers, gated, inputs, tolerance


class Place(NamedTuple):
    """The layout of an output: contiguous mode (-1 rows, -2 columns), gap after rows, shift of its start."""

    contiguous: int = -1
    pad: int = 0
    offset: int = 0


class Case(NamedTuple):
    """One call. `kept`: z is written too, to its place."""

    m: int
    n: int
    k: int
    kept: Place | None = None
    out: Place = Place()
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    batch: int | None = None
    activation: str = "swiglu"
    linear: bool = False  # alpha, beta · c and bias


def _shape(case: Case, *extents: int) -> tuple[int, ...]:
    return extents if case.batch is None else (case.batch, *extents)


def run(case: Case, device: str, **forced: Any) -> None:
    """Calls `gemm_gated` on the case and checks every element of the outputs and what lies around them."""

    def values(number: int, *extents: int) -> torch.Tensor:
        return inputs.normal(_shape(case, *extents), case.dtype, seed=number, device=device)

    a, b = values(1, case.m, case.k), values(2, case.n, case.k).mT
    options: dict[str, Any] = {}
    if case.linear:
        bias = inputs.normal((case.n,), torch.float32, seed=3, device=device)
        options = {"alpha": 0.5, "beta": 2.0, "c": values(4, case.m, case.n), "bias": bias}
    out = buffers.poisoned(
        _shape(case, case.m, case.n // 2), case.out_dtype, device=device, **case.out._asdict()
    )
    kept = None
    if case.kept is not None:
        kept = buffers.poisoned(
            _shape(case, case.m, case.n), case.out_dtype, device=device, **case.kept._asdict()
        )
    found = gemm_gated(
        a, b, activation=case.activation, out=out.tensor, **options, **forced,
        preact_out=None if kept is None else kept.tensor,
    )  # fmt: skip
    assert (found if kept is None else found.out) is out.tensor
    exact = gated.gemm_gated(a, b, activation=case.activation, **options)
    peer = gated.gemm_gated_same_dtype(a, b, activation=case.activation, out_dtype=case.out_dtype, **options)
    buffers.check_output(out)
    tolerance.check(out.tensor, exact.out, peer.out, case=str(case))
    if kept is not None:
        buffers.check_output(kept)
        tolerance.check(kept.tensor, exact.preact, peer.preact, case=str(case))
