"""`quantize` as an operation, and what is wrong with an `out`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.checks.eager_path import check_output
from kernels_dsl.checks.overlap import byte_extent, check_alone
from kernels_dsl.config.quantize import PITCH
from kernels_dsl.ops.operation import Arguments, Operation
from kernels_dsl.ops.quantize.arguments import Scheme, check
from kernels_dsl.ops.quantize.buffers import Made, assemble, new_results
from kernels_dsl.ops.quantize.plan import Plan, build
from lowering.records import frozen


@frozen
class QuantizeArguments(Arguments):
    """The arguments of `quantize`."""

    x: torch.Tensor
    scale: torch.Tensor | None = None
    dtype: torch.dtype = torch.float8_e4m3fn
    scaling: str = "tensor"
    transpose: bool | str = False
    out: Made | None = None

    leading = "x"
    required = ("dtype", "scaling", "transpose")
    unlisted = ("out",)
    outputs = ()

    @property
    def scheme(self) -> Scheme:
        """The options, as one record."""
        return Scheme(self.dtype, self.scaling, self.transpose, self.scale is not None)

    def written(self) -> dict[str, Any]:
        """The tensors of `out` that are written."""
        return {f"out[{n}]": t for n, t in enumerate(self.out or ()) if t is not self.scale}

    def check(self) -> None:
        """TypeError or ValueError where an argument is not one of `quantize`."""
        check(self.x, self.dtype, self.scaling, self.transpose, self.scale)
        if self.out is not None:
            if not isinstance(self.out, (tuple, list)):
                raise TypeError(f"out is a {type(self.out).__name__}, must be a tuple of tensors")
            check_out(self.out, self.x, self.scale, self.scheme)

    def in_memory(self) -> QuantizeArguments:
        """The record with negated views as tensors of memory."""
        made = super().in_memory()
        if made.out is None or made.scale is self.scale:
            return made
        out = tuple(made.scale if t is self.scale else t for t in made.out)
        return replace(made, out=out)


class _Quantize(Operation[QuantizeArguments, Plan]):
    def entry(self, plan: Plan, call: QuantizeArguments, tensors: tuple[Any, ...]) -> Any:
        """The entry of the call cache: the plan, with an `out` also a check that no memory is shared."""
        if call.out is None:
            return plan
        # There is no room after rows to look at.
        exact = all(t.is_contiguous() or t.dtype == torch.float32 for t in call.out)
        return (plan, _apart(tensors)) if exact else None


def _describe(call: QuantizeArguments) -> Scheme:
    check(call.x, call.dtype, call.scaling, call.transpose, call.scale)
    return call.scheme


def _build(scheme: Scheme, call: QuantizeArguments, target: Any) -> Plan:
    return build(call.x, scheme, target)


def _follow(plan: Plan, call: QuantizeArguments) -> Made:
    if call.out is not None:
        check_out_memory(call.out, call.x, call.scale)
    return plan(call.x, call.scale, call.out)


QUANTIZE = _Quantize("quantize", QuantizeArguments, _describe, _build, _follow)


def check_out(
    out: Sequence[Any], x: torch.Tensor, scale: torch.Tensor | None, scheme: Scheme, strides: bool = True
) -> None:
    """TypeError or ValueError where `out` is not like what a call without it returns; without `strides` those
    may be others."""
    results = assemble(new_results(x.shape, scheme, torch.device("meta")), scheme, scale)
    if len(out) != len(results):
        raise ValueError(f"out has {len(out)} tensors, must have {len(results)}")
    for n, (tensor, wanted) in enumerate(zip(out, results)):
        if wanted is scale:
            if tensor is not scale:
                raise ValueError(f"out[{n}] is not scale, must be: it is returned as it is")
            continue
        check_output(f"out[{n}]", tensor)
        if tensor.dtype != wanted.dtype:
            raise TypeError(f"out[{n}] has dtype {tensor.dtype}, must be {wanted.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"out[{n}] is on {tensor.device}, must be on {x.device}")
        if tensor.shape != wanted.shape:
            raise ValueError(f"out[{n}] has shape {tuple(tensor.shape)}, must be {tuple(wanted.shape)}")
        steps = zip(tensor.stride(), wanted.stride(), tensor.shape)
        if strides and wanted.numel() and any(size > 1 and a != b for a, b, size in steps):
            raise ValueError(f"out[{n}] has strides {tensor.stride()}, must be {wanted.stride()}")
    if scheme.scaling == "tensor" and len(out) == 4 and out[1] is not out[3]:
        raise ValueError("out[3] is not out[1], must be: both outputs have the same scale")


def check_out_memory(out: Sequence[torch.Tensor], x: torch.Tensor, scale: torch.Tensor | None) -> None:
    """ValueError where the memory of `out`, which is otherwise right, is not what kernels may write."""
    for n, t in enumerate(out):
        if t is scale or t.numel() == 0:
            continue
        if t.element_size() == 1:
            if t.data_ptr() % PITCH:
                raise ValueError(
                    f"out[{n}] begins at address {t.data_ptr():#x}, must at a multiple of {PITCH}"
                )
            pitch = t.stride(-2) if t.dim() > 1 and t.shape[-2] > 1 else -(-t.shape[-1] // PITCH) * PITCH
            room = t.untyped_storage().nbytes() - t.storage_offset()
            needed = byte_extent(t) + pitch - t.shape[-1]
            if room < needed:
                raise ValueError(
                    f"out[{n}] has {room} bytes of memory from its first element on, must have {needed}: "
                    f"rows are written up to a multiple of {PITCH} bytes"
                )
        others = {f"out[{m}]": other for m, other in enumerate(out) if m < n and other is not t}
        check_alone(f"out[{n}]", t, {"x": x, "scale": scale, **others})


def _apart(like: Made) -> Callable[[Made], bool]:
    """A check that tensors like these share no memory."""
    extents = [byte_extent(t) for t in like]
    address = torch.Tensor.data_ptr

    def apart(tensors: Made) -> bool:
        end = 0
        for first, extent in sorted(zip(map(address, tensors), extents)):
            if first < end:
                return False
            end = first + extent
        return True

    return apart
