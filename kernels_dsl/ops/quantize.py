"""`quantize`: fp8 values and float32 scales of a tensor, of its transpose, or of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import lowering
from kernels_dsl.config.quantize import (
    COLUMN_TILES,
    PITCH,
    TILE,
    TileQuantization,
    row_quantization,
)
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target, target_of

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = ("tensor", "matrix", "row", "1x128", "128x128")
OUTPUTS: dict[Any, tuple[bool, bool]] = {False: (True, False), True: (False, True), "both": (True, True)}
_FOLDER = "kernels_dsl.kernels.quantize"
FUNCTIONS = {
    "tile": lowering.jit(f"{_FOLDER}.tile:quantize_tile", name="quantize_tile"),
    "rows": lowering.jit(f"{_FOLDER}.rows:quantize_rows", name="quantize_rows"),
    "amax": lowering.jit(f"{_FOLDER}.amax:amax_parts", name="quantize_amax"),
    "scales": lowering.jit(f"{_FOLDER}.amax:scales_of_parts", name="quantize_scales"),
}
PARTS_PER_SM = 4
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_PLANS: dict[Any, Any] = {}
_MAX_PLANS = 8192
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: str = "tensor",
    transpose: bool | str = False,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(values, scales): fp8 values with values · scales close to x.

    x: (…, M, K) or (K,), bf16, fp16 or fp32, any strides. dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    scaling, and the shape of the float32 scales: "tensor" (), "matrix" (…, 1, 1), "row" (…, M, 1),
    "1x128" (…, M, ceil(K / 128)) with contiguous M as `torch._scaled_mm` and DeepGEMM take it, "128x128"
    (…, ceil(M / 128), ceil(K / 128)).
    transpose: False; True for `quantize(x.mT)`, values (…, K, M) with contiguous M; "both" for four results,
    values, scales, values of x.mT and scales of x.mT, from one read of x where the scales allow.
    scale: with "tensor", a float32 tensor of one element to use in place of a computed scale; it is returned.

    Values are new tensors, the last mode contiguous, rows at multiples of 16 bytes (so with K not a multiple
    of 16 they are a view of a wider tensor). A group's scale is its largest finite magnitude over the largest
    fp8 value, and 1 where that is 0. Rounding is to nearest even; what is too large, infinities too, becomes
    the largest value of its sign, NaN stays NaN (`reference/quantize.py` has the definition to the bit).

    Not differentiable. Compute capability 8.9 or later. Raises TypeError and ValueError that name the
    argument; `quantize_supports` gives the same reasons as text.
    """
    if _is_compiling() or _dispatch_modes() or type(x) not in _PLAIN_TYPES:
        from kernels_dsl.ops import quantize_register

        return quantize_register.call(x, dtype, scaling, transpose, scale)
    return assemble(run_direct(x, dtype, scaling, transpose, scale), scaling, transpose, scale)


def quantize_supports(
    x: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: str = "tensor",
    transpose: bool | str = False,
    scale: torch.Tensor | None = None,
) -> str | None:
    """Why `quantize` with these arguments cannot run here; None if it can. Compiles nothing."""
    try:
        check(x, dtype, scaling, transpose, scale)
        _check_target(target_of(x))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def check(x: Any, dtype: Any, scaling: Any, transpose: Any, scale: Any) -> None:
    """TypeError or ValueError where an argument is not one of `quantize`."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, must be a torch.Tensor")
    if x.layout != torch.strided:
        raise TypeError(f"x has layout {x.layout}, must be strided")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x is {x.dtype}, must be torch.bfloat16, torch.float16 or torch.float32")
    if x.dim() < 1:
        raise ValueError("x has no modes, must have at least one")
    if dtype not in FORMATS:
        raise TypeError(f"dtype is {dtype}, must be torch.float8_e4m3fn or torch.float8_e5m2")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling is {scaling!r}, must be one of {SCALINGS}")
    if transpose not in OUTPUTS:
        raise ValueError(f"transpose is {transpose!r}, must be False, True or 'both'")
    if x.dim() == 1 and (transpose or scaling == "128x128"):
        raise ValueError("x has one mode, must have at least two for a transpose and for scaling '128x128'")
    if scale is not None:
        if scaling != "tensor":
            raise ValueError(f"scale is given with scaling {scaling!r}, must be None: it goes with 'tensor'")
        if not isinstance(scale, torch.Tensor):
            raise TypeError(
                f"scale is a {type(scale).__name__}, must be a float32 torch.Tensor of one element"
            )
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device:
            raise ValueError(
                f"scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}, must be torch.float32 of "
                f"one element on {x.device}"
            )


def _check_target(target: Target) -> None:
    if target.device.capability < (8, 9):
        major, minor = target.device.capability
        raise ValueError(
            f"x is on {target.device.name} of compute capability {major}.{minor}, must be 8.9 or later: no "
            "conversion to fp8 before"
        )


def assemble(
    fresh: list[torch.Tensor], scaling: str, transpose: bool | str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """What the caller gets, from the tensors that `run_direct` made: a scale of all is there once."""
    if scaling != "tensor":
        return tuple(fresh)
    values, shared = (fresh, scale) if scale is not None else (fresh[:-1], fresh[-1])
    return tuple(t for value in values for t in (value, shared))


class Output(NamedTuple):
    """One of the results, as far as it can be known before a call."""

    scaling: str
    columns: int
    values_shape: tuple[int, ...]
    """With the pitch: as many columns as fill whole 16 bytes."""
    scales_shape: tuple[int, ...]
    scales_strides: tuple[int, ...]

    def trimmed(self, values: torch.Tensor) -> torch.Tensor:
        """`values` without the columns that are there for the pitch alone."""
        return values[..., : self.columns] if self.columns % PITCH else values


def _output(lead: tuple[int, ...], rows: int, columns: int, scaling: str) -> Output:
    groups = -(-columns // TILE)
    shape = {
        "tensor": (),
        "matrix": (*lead, 1, 1),
        "row": (*lead, rows, 1),
        "1x128": (*lead, rows, groups),
        "128x128": (*lead, -(-rows // TILE), groups),
    }[scaling]
    stored = (*lead, groups, rows) if scaling == "1x128" else shape
    strides = [math.prod(max(size, 1) for size in stored[i + 1 :]) for i in range(len(stored))]
    if scaling == "1x128":
        strides[-2:] = reversed(strides[-2:])
    pitch = -(-columns // PITCH) * PITCH
    return Output(scaling, columns, (*lead, rows, pitch), shape, tuple(strides))


def outputs_of(shape: torch.Size, scaling: str, transpose: bool | str) -> list[Output]:
    """The results that a call has, in order."""
    lead, (rows, columns) = tuple(shape[:-2]), shape[-2:]
    plain, turned = OUTPUTS[transpose]
    found = [_output(lead, rows, columns, scaling)] if plain else []
    return found + ([_output(lead, columns, rows, scaling)] if turned else [])


def allocate(
    x: torch.Tensor, dtype: torch.dtype, outputs: list[Output], scale: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(values with their pitch, scales) for each output; scales are 1 where x is empty."""
    values = [x.new_empty(output.values_shape, dtype=dtype) for output in outputs]
    if scale is not None:
        return values, [scale] * len(values)
    scales = [
        x.new_empty_strided(output.scales_shape, output.scales_strides, dtype=torch.float32)
        for output in (outputs[:1] if outputs[0].scaling == "tensor" else outputs)
    ]
    if x.numel() == 0:
        for t in scales:
            t.fill_(1.0)
    return values, scales * (len(values) // len(scales))


def fresh_tensors(
    outputs: list[Output], values: list[torch.Tensor], scales: list[torch.Tensor], given: bool
) -> list[torch.Tensor]:
    """The results that a call made, each once: values and scales in turn, one scale of all last."""
    trimmed = [output.trimmed(value) for output, value in zip(outputs, values)]
    if outputs[0].scaling == "tensor":
        return trimmed if given else [*trimmed, scales[0]]
    return [t for pair in zip(trimmed, scales) for t in pair]


def run_direct(
    x: torch.Tensor, dtype: torch.dtype, scaling: str, transpose: bool | str, scale: torch.Tensor | None
) -> list[torch.Tensor]:
    """`quantize` past the dispatcher: the new tensors alone, one shared scale last."""
    key = None
    if isinstance(x, torch.Tensor) and x.layout == torch.strided:
        key = (
            x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device(), dtype, scaling, transpose,
            scale is None or (scale.dtype, scale.shape, scale.device, scale.data_ptr() & 15),
        )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        check(x, dtype, scaling, transpose, scale)
        target = target_of(x)
        _check_target(target)
        plan = _plan(x, dtype, scaling, transpose, target)
        if not target.emulated:
            if len(_PLANS) >= _MAX_PLANS:
                _PLANS.clear()
            _PLANS[key] = plan
    return plan(x, scale)


def _plan(
    x: torch.Tensor, dtype: torch.dtype, scaling: str, transpose: bool | str, target: Target
) -> Callable[..., list[torch.Tensor]]:
    """What serves calls like this one."""
    if x.dim() == 1:
        inner = _plan(x[None], dtype, scaling, transpose, target)
        return lambda x, scale: [t[0] if t.dim() else t for t in inner(x[None], scale)]
    outputs = outputs_of(x.shape, scaling, transpose)
    launch = _Launches(FORMATS[dtype], scaling, target)
    prepare, swap = _preparation(x)
    plain, turned = OUTPUTS[transpose]
    rank, empty = x.dim(), x.numel() == 0

    def run(x: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
        values, scales = allocate(x, dtype, outputs, scale)
        if not empty:
            read = prepare(x)
            if scaling == "tensor" and scale is None:
                launch.matrix_scales(read, scales[0])
            pairs = list(zip(values, scales))
            if rank > 4:
                pairs = [(_merged(v, rank), s if scaling == "tensor" else _merged(s, rank)) for v, s in pairs]
            first, second = pairs[0] if plain else None, pairs[-1] if turned else None
            launch.convert(read, *((second, first) if swap else (first, second)))
        return fresh_tensors(outputs, values, scales, scale is not None)

    return run


def _preparation(x: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor], bool]:
    """(what makes a tensor that the kernels read, whether that is the transpose)."""
    rank = x.dim()
    if x.stride(-1) == 1 or x.shape[-1] == 1 or x.stride(-2) != 1:
        contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
        return (lambda x: _merged(x if contiguous else x.contiguous(), rank)), False
    return (lambda x: _merged(x.mT, rank)), True


def _merged(x: torch.Tensor, rank: int) -> torch.Tensor:
    """At most four modes: leading ones beyond two become one, by a copy if their strides demand it."""
    return x if rank <= 4 else x.flatten(0, rank - 4)


class _Launches:
    """The kernels of one plan."""

    def __init__(self, format: str, scaling: str, target: Target) -> None:
        self.format = format
        self.scaling = scaling
        self.target = target
        self._kernels: dict[str, Launch] = {}

    def _launch(self, name: str, args: tuple[Any, ...], constexprs: Callable[[], dict[str, Any]]) -> None:
        """Launch kernel `name`, which a plan has one form of; `constexprs` is called before the first."""
        launch = self._kernels.get(name)
        if launch is None:
            launch = self._kernels[name] = Launch(FUNCTIONS[name], self.target, constexprs())
        launch(*args)

    def matrix_scales(self, x: torch.Tensor, scales: torch.Tensor) -> None:
        """Scales of each matrix, or one for all where there is one scale."""
        matrices = x.shape[:-2].numel()
        tiles = -(-x.shape[-2] // TILE) * -(-x.shape[-1] // TILE)
        parts = max(1, min(tiles, PARTS_PER_SM * self.target.device.sm_count // matrices))
        maxima = x.new_empty((matrices, parts), dtype=torch.float32)
        self._launch("amax", (x, maxima), lambda: {"columns": False})
        parts_of_scales = maxima.view(1, -1) if scales.numel() == 1 else maxima
        self._launch("scales", (parts_of_scales, scales.view(-1)), lambda: {"format": self.format})

    def convert(self, x: torch.Tensor, plain: Any, turned: Any) -> None:
        """The passes that write values. `plain`, `turned`: None or (values, scales), of x and of x.mT."""
        scaling = self.scaling
        if scaling == "matrix":
            first, *others = [pair[1] for pair in (plain, turned) if pair is not None]
            self.matrix_scales(x, first)
            for other in others:
                other.copy_(first)
        if scaling == "row":
            if plain is not None:
                width = x.shape[-1]
                self._launch("rows", (x, *plain), lambda: {"spec": row_quantization(self.format, width)})
                plain = None
            if turned is None:
                return
            self._column_scales(x, turned[1])
        kind = {"1x128": "group", "128x128": "block"}.get(scaling, "given")
        args: list[Any] = [x]
        for pair in (plain, turned):
            if pair is None:
                args += [None, None]
                continue
            values, scales = pair
            args += [values, scales.expand(*values.shape[:-1], 1) if kind == "given" else scales]
        kinds = (None if plain is None else kind, None if turned is None else kind)
        self._launch("tile", tuple(args), lambda: {"spec": TileQuantization(self.format, *kinds)})

    def _column_scales(self, x: torch.Tensor, scales: torch.Tensor) -> None:
        """Scales (…, K, 1) of the columns of x."""
        matrices = x.shape[:-2].numel()
        parts = -(-x.shape[-2] // (COLUMN_TILES * TILE))
        maxima = x.new_empty((matrices, parts, x.shape[-1]), dtype=torch.float32)
        self._launch("amax", (x, maxima), lambda: {"columns": True})
        self._launch("scales", (maxima, scales.view(matrices, -1)), lambda: {"format": self.format})
