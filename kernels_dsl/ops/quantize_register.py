"""`quantize` as an operator of PyTorch: schema, fake implementation, and what autograd is told."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.quantize import assemble, buffers_of, check, finished, run_direct

LIBRARY = torch.library.Library("kernels_dsl", "FRAGMENT")
LIBRARY.define(
    "quantize(Tensor x, Tensor? scale=None, *, ScalarType dtype, str scaling, str transpose) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_TRANSPOSES: dict[str, bool | str] = {"no": False, "yes": True, "both": "both"}
_NAMES = {value: name for name, value in _TRANSPOSES.items()}


def _quantize(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, dtype: torch.dtype, scaling: str, transpose: str
) -> list[torch.Tensor]:
    return run_direct(x, dtype, scaling, _TRANSPOSES[transpose], scale)


def _quantize_fake(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, dtype: torch.dtype, scaling: str, transpose: str
) -> list[torch.Tensor]:
    check(x, dtype, scaling, _TRANSPOSES[transpose], scale)
    if x.dim() == 1:
        made = _quantize_fake(x[None], scale, dtype=dtype, scaling=scaling, transpose=transpose)
        return [t[0] if t.dim() else t for t in made]
    buffers = buffers_of(x.shape, dtype, scaling, _TRANSPOSES[transpose], scale is not None)
    return finished(buffers, [b.on(x.device) for b in buffers])


def _setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    """Nothing to keep: there is no backward."""


def _backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("kernels_dsl::quantize has no gradient: call it under torch.no_grad() or detach x")


for _key in ("CUDA", "CPU"):  # CPU tensors are for the emulator, and get an error that says so elsewhere
    LIBRARY.impl("quantize", _quantize, _key)
torch.library.register_fake("kernels_dsl::quantize", _quantize_fake, lib=LIBRARY)
torch.library.register_autograd("kernels_dsl::quantize", _backward, setup_context=_setup_context, lib=LIBRARY)


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
    made = torch.ops.kernels_dsl.quantize(x, scale, dtype=dtype, scaling=scaling, transpose=_NAMES[transpose])
    return assemble(made, scaling, transpose, scale)
