"""The arguments of `quantize`, and the errors that name a wrong one."""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks import options
from kernels_dsl.checks.eager_path import check_tensor
from kernels_dsl.ops.target import Target
from lowering.records import NamedTuple

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = ("tensor", "matrix", "row", "1x128", "128x128")
OUTPUTS: dict[Any, tuple[bool, bool]] = {False: (True, False), True: (False, True), "both": (True, True)}
"""transpose -> whether there are values of x, of x.mT."""


class Scheme(NamedTuple):
    """The options of `quantize` that decide on its results."""

    dtype: torch.dtype
    scaling: str
    transpose: bool | str
    has_scale: bool
    """True if the caller gives the scale."""

    @property
    def outputs(self) -> tuple[bool, bool]:
        """True for values of x, and for values of x.mT."""
        return OUTPUTS[self.transpose]


def check(x: Any, dtype: Any, scaling: Any, transpose: Any, scale: Any) -> None:
    """TypeError or ValueError where an argument is not one of `quantize`."""
    check_tensor("x", x)
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x is {x.dtype}, must be torch.bfloat16, torch.float16 or torch.float32")
    if x.dim() < 1:
        raise ValueError("x has no modes, must have at least one")
    if not isinstance(dtype, torch.dtype) or dtype not in FORMATS:
        raise TypeError(f"dtype is {options.shown(dtype)}, must be torch.float8_e4m3fn or torch.float8_e5m2")
    options.one_of("scaling", scaling, SCALINGS)
    if not isinstance(transpose, bool) and not (isinstance(transpose, str) and transpose == "both"):
        raise (ValueError if isinstance(transpose, str) else TypeError)(
            f"transpose is {options.shown(transpose)}, must be False, True or 'both'"
        )
    if x.dim() == 1 and (transpose or scaling in ("matrix", "128x128")):
        raise ValueError(
            "x has one mode, must have at least two for a transpose and for scaling 'matrix' and '128x128'"
        )
    if scale is not None:
        if scaling != "tensor":
            raise ValueError(f"scale is given with scaling {scaling!r}, must be None: it goes with 'tensor'")
        if not isinstance(scale, torch.Tensor):
            raise TypeError(
                f"scale is a {type(scale).__name__}, must be a float32 torch.Tensor of one element"
            )
        check_tensor("scale", scale)
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device:
            raise ValueError(
                f"scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}, must be torch.float32 of "
                f"one element on {x.device}"
            )


def check_target(target: Target) -> None:
    """ValueError where the GPU has no conversion to fp8."""
    if target.device.capability < (8, 9):
        major, minor = target.device.capability
        raise ValueError(
            f"x is on {target.device.name} of compute capability {major}.{minor}, must be 8.9 or later: no "
            "conversion to fp8 before"
        )
