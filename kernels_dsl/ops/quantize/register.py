"""`quantize` as an operator of PyTorch: schema, fake implementation, and what autograd is told."""

from __future__ import annotations

import torch

from kernels_dsl.ops.gradients import refuse_forward_mode, refuse_written
from kernels_dsl.ops.operators import define
from kernels_dsl.ops.quantize.arguments import check
from kernels_dsl.ops.quantize.buffers import Made, assemble, new_ones, new_results
from kernels_dsl.ops.quantize.into import check_memory, check_out
from kernels_dsl.ops.quantize.plan import run_direct

_TRANSPOSES: dict[str, bool | str] = {"no": False, "yes": True, "both": "both"}
_NAMES = {value: name for name, value in _TRANSPOSES.items()}


def _quantize(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, dtype: torch.dtype, scaling: str, transpose: str
) -> list[torch.Tensor]:
    which = (scaling, _TRANSPOSES[transpose], scale)
    return new_ones(run_direct(x, dtype, *which), *which)


def _quantize_fake(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, dtype: torch.dtype, scaling: str, transpose: str
) -> list[torch.Tensor]:
    check(x, dtype, scaling, _TRANSPOSES[transpose], scale)
    return new_results(x.shape, dtype, scaling, _TRANSPOSES[transpose], scale is not None, x.device)


def _quantize_out(
    x: torch.Tensor,
    written: list[torch.Tensor],
    scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    scaling: str,
    transpose: str,
) -> None:
    which = (scaling, _TRANSPOSES[transpose], scale)
    results = assemble(written, *which)
    check_out(results, x, dtype, *which, strides=False)
    try:
        check_out(results, x, dtype, *which)
        check_memory(results, x, scale)
    except ValueError:  # copies that torch.compile made lie as they like
        for t, made in zip(written, _quantize(x, scale, dtype=dtype, scaling=scaling, transpose=transpose)):
            t.copy_(made)
    else:
        run_direct(x, dtype, *which, results)


def _quantize_out_fake(
    x: torch.Tensor,
    written: list[torch.Tensor],
    scale: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    scaling: str,
    transpose: str,
) -> None:
    which = (scaling, _TRANSPOSES[transpose], scale)
    check(x, dtype, *which)
    check_out(assemble(written, *which), x, dtype, *which, strides=False)


define(
    "quantize",
    "(Tensor x, Tensor? scale=None, *, ScalarType dtype, str scaling, str transpose) -> Tensor[]",
    _quantize, _quantize_fake, "gradient: call it under torch.no_grad() or detach x",
)  # fmt: skip
define(
    "quantize_out",
    # No argument called "out": Dynamo has rules of its own for those.
    "(Tensor x, Tensor(a!)[] written, Tensor? scale=None, *, ScalarType dtype, str scaling, str transpose)"
    " -> ()",
    _quantize_out, _quantize_out_fake,
)  # fmt: skip


def call(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    transpose: bool | str,
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """A call as an operator, with the arguments of `kernels_dsl.quantize`."""
    check(x, dtype, scaling, transpose, scale)
    return operator(x, dtype, scaling, transpose, scale)


def operator(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    transpose: bool | str,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """`call` with arguments that are right."""
    refuse_forward_mode("quantize", {"x": x, "scale": scale})
    made = torch.ops.kernels_dsl.quantize(x, scale, dtype=dtype, scaling=scaling, transpose=_NAMES[transpose])
    return assemble(made, scaling, transpose, scale)


def call_into(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: str,
    transpose: bool | str,
    scale: torch.Tensor | None,
    out: Made,
) -> Made:
    """A call with an `out` that is right as an operator."""
    written = new_ones(out, scaling, transpose, scale)
    named = {f"out[{n}]": t for n, t in enumerate(out) if t is not scale}
    refuse_written((x, scale), **named)
    refuse_forward_mode("quantize", {"x": x, "scale": scale, **named})
    torch.ops.kernels_dsl.quantize_out(
        x, written, scale, dtype=dtype, scaling=scaling, transpose=_NAMES[transpose]
    )
    return out
