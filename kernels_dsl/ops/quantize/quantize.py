"""`quantize`: fp8 values and float32 scales of a tensor, of its transpose, or of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernels_dsl.config.quantize import PITCH, TILE
from kernels_dsl.ops import fresh, recent
from kernels_dsl.ops.plain import PLAIN_TYPES, needs_dispatcher, signature
from kernels_dsl.ops.quantize.plan import Kernels, Plan
from kernels_dsl.ops.target import Target, target_of

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = ("tensor", "matrix", "row", "1x128", "128x128")
# transpose -> whether there are values of x, of x.mT
OUTPUTS: dict[Any, tuple[bool, bool]] = {False: (True, False), True: (False, True), "both": (True, True)}
_PLANS: dict[Any, Any] = {}


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

    Not differentiable: a backward pass that comes here raises RuntimeError. Compute capability 8.9 or later.
    Raises TypeError and ValueError that name the argument; `quantize_supports` gives the same reasons as
    text.
    """
    key: Any = None
    usual = (x,) if scale is None else (x, scale)
    if type(x) in PLAIN_TYPES:
        key = (x.shape, scale is None, dtype, scaling, transpose)
        plan: Plan | None = recent.find(_PLANS, key, usual)
        if plan is not None:
            try:
                return plan(x, scale)
            except ValueError:
                recent.look_at_addresses(_PLANS, key)
    if needs_dispatcher((x, scale)) or key is None:
        from kernels_dsl.ops.quantize import register as quantize_register

        return quantize_register.call(x, dtype, scaling, transpose, scale)
    plan = _plan_of(x, dtype, scaling, transpose, scale)
    results = plan(x, scale)
    if not target_of(x, "x").emulated:
        recent.keep(_PLANS, key, usual, plan)
    return results


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
        check_target(target_of(x, "x"))
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


def assemble(
    fresh: list[torch.Tensor], scaling: str, transpose: bool | str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """What the caller gets, from the new tensors: a scale of all is there once, if it is new, and last."""
    if scaling != "tensor":
        return tuple(fresh)
    if scale is None:
        *fresh, scale = fresh
    return (fresh[0], scale) if transpose != "both" else (fresh[0], scale, fresh[1], scale)


def new_ones(
    results: tuple[torch.Tensor, ...], scaling: str, transpose: bool | str, scale: torch.Tensor | None
) -> list[torch.Tensor]:
    """The other way round: what is new of what the caller gets."""
    if scaling != "tensor":
        return list(results)
    values = [results[0]] if transpose != "both" else [results[0], results[2]]
    return values if scale is not None else [*values, results[1]]


class Buffer(NamedTuple):
    """A tensor that a call makes, and what its caller gets of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    result: Callable[[torch.Tensor], torch.Tensor] | None = None
    """A view; None: the tensor as it is."""

    def on(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def _merged_lead(lead: tuple[int, ...]) -> tuple[int, ...]:
    """Leading modes beyond two are one."""
    return lead if len(lead) <= 2 else (math.prod(lead[:-1]), lead[-1])


def _values(lead: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype) -> Buffer:
    """In rows of whole 16 bytes, of which the caller gets the first `columns`."""
    pitch = -(-columns // PITCH) * PITCH
    shape = (*_merged_lead(lead), rows, pitch)
    result: Callable[[torch.Tensor], torch.Tensor] | None = None
    if len(lead) > 2:
        result = lambda t: t.view(*lead, rows, pitch)[..., :columns]  # noqa: E731
    elif pitch != columns:
        result = lambda t: t[..., :columns]  # noqa: E731
    return Buffer(shape, fresh.dense_strides(shape), dtype, result)


def _scales(lead: tuple[int, ...], rows: int, columns: int, scaling: str) -> Buffer:
    groups = -(-columns // TILE)
    last = {
        "matrix": (1, 1),
        "row": (rows, 1),
        "1x128": (rows, groups),
        "128x128": (-(-rows // TILE), groups),
    }[scaling]
    shape = (*_merged_lead(lead), *last)
    strides = fresh.dense_strides(shape)
    if scaling == "1x128":
        strides = (*fresh.dense_strides((*shape[:-2], groups, rows))[:-2], 1, max(rows, 1))
    split = (lambda t: t.unflatten(0, lead[:-1])) if len(lead) > 2 else None
    return Buffer(shape, strides, torch.float32, split)


def buffers_of(
    shape: torch.Size, dtype: torch.dtype, scaling: str, transpose: bool | str, given: bool
) -> list[Buffer]:
    """What a call makes: values and scales of each output in turn, one scale of all last."""
    lead, (rows, columns) = tuple(shape[:-2]), shape[-2:]
    plain, turned = OUTPUTS[transpose]
    made = []
    for m, k in [(rows, columns)] * plain + [(columns, rows)] * turned:
        made.append(_values(lead, m, k, dtype))
        if scaling != "tensor":
            made.append(_scales(lead, m, k, scaling))
    if scaling == "tensor" and not given:
        made.append(Buffer((), (), torch.float32))
    return made


def finished(buffers: list[Buffer], made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the caller gets of them."""
    return [t if b.result is None else b.result(t) for b, t in zip(buffers, made)]


def run_direct(
    x: torch.Tensor, dtype: torch.dtype, scaling: str, transpose: bool | str, scale: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """`quantize` past the dispatcher."""
    return _plan_of(x, dtype, scaling, transpose, scale)(x, scale)


def _plan_of(
    x: torch.Tensor, dtype: torch.dtype, scaling: str, transpose: bool | str, scale: torch.Tensor | None
) -> Plan:
    """What serves a call."""
    key = (signature(x), dtype, scaling, transpose, signature(scale))
    plan: Plan | None = _PLANS.get(key)
    if plan is None:
        check(x, dtype, scaling, transpose, scale)
        target = target_of(x, "x")
        check_target(target)
        plan = _plan(x, dtype, scaling, transpose, target, scale is not None)
        if not target.emulated:
            recent.put(_PLANS, key, plan)
    return plan


def _plan(
    x: torch.Tensor, dtype: torch.dtype, scaling: str, transpose: bool | str, target: Target, given: bool
) -> Plan:
    """What serves calls like this one."""
    if x.dim() == 1:
        inner = _plan(x[None], dtype, scaling, transpose, target, given)
        return lambda x, scale: tuple(t[0] if t.dim() else t for t in inner(x[None], scale))
    buffers = buffers_of(x.shape, dtype, scaling, transpose, given)
    if x.numel() == 0:
        return lambda x, scale: assemble(
            finished(buffers, [b.on(x.device).fill_(1.0) for b in buffers]), scaling, transpose, scale
        )
    prepare, swap = _preparation(x)
    kernels = Kernels(FORMATS[dtype], target, prepare(x) if prepare else x)
    make = fresh.several([fresh.maker(b.shape, b.dtype, x.device, b.strides) for b in buffers])
    send = kernels.sends(scaling, given, _places(scaling, transpose, swap), make)
    one_scale = scaling == "tensor" and not given
    if prepare is None and all(b.result is None for b in buffers):
        if one_scale:
            return _with_one_scale(send)
        if scaling != "tensor":
            return send  # the shortest way: a caller gets the tensors as the kernels have them

    def run(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        made = send(x if prepare is None else prepare(x), scale)
        return assemble(finished(buffers, made), scaling, transpose, scale)

    return run


def _with_one_scale(send: Plan) -> Plan:
    """The same where a scale of all is made."""

    def run(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        made = send(x, None)
        if len(made) == 2:
            return made
        values, turned, one = made
        return values, one, turned, one

    return run


def _places(scaling: str, transpose: bool | str, swap: bool) -> tuple[tuple[int, int] | None, ...]:
    """Where among the buffers the kernels' plain and turned output are, (values, scales) or None. With `swap`
    the kernels read the transpose of x."""
    count = sum(OUTPUTS[transpose])
    pairs = iter([(n, count) if scaling == "tensor" else (2 * n, 2 * n + 1) for n in range(count)])
    places = [next(pairs) if wanted else None for wanted in OUTPUTS[transpose]]
    return tuple(reversed(places)) if swap else tuple(places)


def _preparation(x: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, bool]:
    """(what makes a tensor that the kernels read, or None, whether that is the transpose)."""
    rank = x.dim()
    contiguous = x.stride(-1) == 1 or x.shape[-1] == 1
    if contiguous and rank <= 4:
        return None, False
    if contiguous or x.stride(-2) != 1:
        return (lambda x: _merged(x if contiguous else x.contiguous(), rank)), False
    return (lambda x: _merged(x.mT, rank)), True


def _merged(x: torch.Tensor, rank: int) -> torch.Tensor:
    """At most four modes: leading ones beyond two become one, by a copy if their strides demand it."""
    return x if rank <= 4 else x.flatten(0, rank - 4)
