"""`quantize` as an operator of PyTorch: schema, fake implementation, and what autograd is told."""

from __future__ import annotations

import torch

from kernels_dsl.ops.operators import define, refuse_forward_mode
from kernels_dsl.ops.quantize.quantize import assemble, buffers_of, check, finished, new_ones, run_direct

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
    if x.dim() == 1:
        made = _quantize_fake(x[None], scale, dtype=dtype, scaling=scaling, transpose=transpose)
        return [t[0] if t.dim() else t for t in made]
    buffers = buffers_of(x.shape, dtype, scaling, _TRANSPOSES[transpose], scale is not None)
    return finished(buffers, [b.on(x.device) for b in buffers])


define(
    "quantize",
    "(Tensor x, Tensor? scale=None, *, ScalarType dtype, str scaling, str transpose) -> Tensor[]",
    _quantize, _quantize_fake, "gradient: call it under torch.no_grad() or detach x",
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
