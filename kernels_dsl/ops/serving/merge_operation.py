"""`merge_states` as an operation: what is checked, what a call launches, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import lowering
from kernels_dsl.checks.eager_path import check_tensor
from kernels_dsl.checks.options import shown
from kernels_dsl.ops import allocate
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.operation import Arguments, Operation
from kernels_dsl.ops.serving.vectors import width_of
from kernels_dsl.ops.target import Target
from lowering.records import NamedTuple, frozen

FUNCTION = lowering.jit("kernels_dsl.kernels.serving.merge_states:merge_states", name="merge_states")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_MODES = 5
_MOST = 2**31 - 1
"""Elements of a result that a launch makes: threads have numbers of 32 bits."""


class Merged(NamedTuple):
    """Attention over all keys: the output, and the log-sum-exp of its rows."""

    out: torch.Tensor
    lse: torch.Tensor


Plan = Callable[[torch.Tensor, torch.Tensor], Merged]


@frozen
class MergeArguments(Arguments):
    """The arguments of `merge_states`."""

    out: torch.Tensor
    lse: torch.Tensor
    out_dtype: torch.dtype | None = None

    outputs = ()
    leading = "out"

    def check(self) -> None:
        """TypeError or ValueError where an argument is not one of `merge_states`."""
        _described(self)


def _described(call: MergeArguments) -> torch.dtype:
    """The result's dtype. TypeError or ValueError where an argument is wrong."""
    out, lse, dtype = check_tensor("out", call.out), check_tensor("lse", call.lse), call.out_dtype
    if out.dtype not in DTYPES:
        raise TypeError(f"out is {out.dtype}, must be torch.bfloat16, torch.float16 or torch.float32")
    if lse.dtype != torch.float32:
        raise TypeError(f"lse is {lse.dtype}, must be torch.float32")
    if not 3 <= out.dim() <= _MAX_MODES:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, must be (n, …, H, Dv) of 3 to {_MAX_MODES} modes"
        )
    if out.shape[0] == 0:
        raise ValueError(f"out has shape {tuple(out.shape)}, must hold at least one state")
    if lse.shape != out.shape[:-1]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}, must be {tuple(out.shape[:-1])}, out's but Dv")
    if lse.device != out.device:
        raise ValueError(f"lse is on {lse.device}, must be on {out.device}")
    if out.shape[1:].numel() // max(1, *out.shape[1:-1]) > _MOST:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, must have at most {_MOST} elements a state beside its "
            "largest mode"
        )
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in DTYPES):
        raise TypeError(
            f"out_dtype is {shown(dtype)}, must be torch.bfloat16, torch.float16 or torch.float32"
        )
    return out.dtype if dtype is None else dtype


def _build(dtype: torch.dtype, call: MergeArguments, target: Target) -> Plan:
    target.families(None, "out")
    shape = tuple(call.out.shape[1:])
    make = allocate.several(
        [
            allocate.maker(shape, dtype, call.out.device),
            allocate.maker(shape[:-1], torch.float32, call.out.device),
        ]
    )
    if 0 in shape:
        return lambda out, lse: _of_nothing(out, lse, Merged(*make()))
    like = torch.empty(shape, dtype=dtype, device="meta")
    constants = {"vector": width_of(shape[-1], call.out, like), "early": target.device.capability >= (9, 0)}
    missing = _MAX_MODES - call.out.dim()

    def merge(launch: Launch, out: torch.Tensor, lse: torch.Tensor, merged: Merged) -> None:
        args = (out, lse, *merged)
        if missing:
            args = tuple([_with_modes(x, n == 0 or n == 1, missing) for n, x in enumerate(args)])
        launch(*args)

    mode = max(range(len(shape) - 1), key=lambda mode: shape[mode])
    step = max(_MOST // (math.prod(shape) // shape[mode]), 1)
    # Each part has its own: where it begins decides how its tensors are aligned.
    launches = [Launch(FUNCTION, target, constants) for _ in range(0, shape[mode], step)]

    def run(out: torch.Tensor, lse: torch.Tensor) -> Merged:
        merged = Merged(*make())
        if len(launches) == 1:
            merge(launches[0], out, lse, merged)
            return merged
        states = zip(out.split(step, mode + 1), lse.split(step, mode + 1))
        for launch, state, part in zip(launches, states, zip(*(x.split(step, mode) for x in merged))):
            merge(launch, *state, Merged(*part))
        return merged

    return run


def _with_modes(x: torch.Tensor, of_states: bool, missing: int) -> torch.Tensor:
    """`x` with as many modes of size 1 after that of the states."""
    at = 1 if of_states else 0
    for _ in range(missing):
        x = x.unsqueeze(at)
    return x


def _of_nothing(out: torch.Tensor, lse: torch.Tensor, merged: Merged) -> Merged:
    """Of rows without columns, or of none."""
    torch.logsumexp(lse, 0, out=merged.lse)
    return merged


def _follow(plan: Plan, call: MergeArguments) -> Merged:
    return plan(call.out, call.lse)


class Saved(NamedTuple):
    """The tensors that a backward pass needs."""

    out: torch.Tensor
    lse: torch.Tensor
    merged_lse: torch.Tensor


def gradients(saved: Saved, d_out: torch.Tensor, d_lse: torch.Tensor) -> Merged:
    """The gradients of the states' outputs and log-sum-exps, by PyTorch's operations."""
    empty = saved.lse == -math.inf
    weights = (saved.lse - saved.merged_lse).masked_fill(empty, -math.inf).exp()
    d_out = d_out.float()
    dots = torch.linalg.vecdot(d_out, saved.out.float().masked_fill(empty[..., None], 0.0))
    d_lses = weights * (dots - (weights * dots).sum(0) + d_lse)
    return Merged((weights[..., None] * d_out).to(saved.out.dtype), d_lses)


MERGE_STATES = Operation("merge_states", MergeArguments, _described, _build, _follow)
