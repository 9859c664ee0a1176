"""From a checked call of attention and the gradient of its output to the gradients of q, k and v.

Three launches: row sums and clean sums of dQ, then dK, dV and the sums, then dQ. All that lies between is a
workspace of O(rows · D): the scores are computed again from the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import lowering
from kernels_dsl.config.attention_backward import (
    Sm80BackwardConfig,
    Sm90BackwardConfig,
    sm80_backward_config,
    sm90_backward_config,
)
from kernels_dsl.config.problem import Device
from kernels_dsl.ops.attention.arguments import AttentionArguments, AttentionCall, Extras, describe
from kernels_dsl.ops.attention.outputs import is_empty
from kernels_dsl.ops.attention.views import Step, prepared_for_tma
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target

_MODULES = "kernels_dsl.kernels.attention."
PREPARE = lowering.jit(_MODULES + "backward_prepare:prepare_backward", name="attention_backward_prepare")
FINISH = lowering.jit(_MODULES + "backward_finish:finish_dq", name="attention_backward_finish")
FUNCTIONS = {
    "sm90": lowering.jit(_MODULES + "backward_sm90:attention_backward_sm90", name="attention_backward_sm90"),
    "sm80": lowering.jit(_MODULES + "backward_sm80:attention_backward_sm80", name="attention_backward_sm80"),
}
BackwardConfig = Sm90BackwardConfig | Sm80BackwardConfig
MAX_GRID = 65535
"""Heads and sequences of a launch whose grid has a mode for each."""


@dataclass(frozen=True)
class Forward:
    """The arguments and results of the forward pass that a backward pass needs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    extras: Extras


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss with respect to q, k and v, of their shapes and dtypes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def why_not_variant(call: AttentionCall) -> str | None:
    """Why a call of attention has no gradient on any GPU; None where it may have."""
    variant = call.variant
    if max(call.dim, call.dim_v) > 128:
        return f"attention has no gradient with head dimensions above 128 yet: {call.dim} and {call.dim_v}"
    given = {
        "softcap": variant.softcap, "mask": variant.mask, "score_mod": variant.score_mod,
        "mask_mod": variant.mask_mod, "sinks": variant.sinks, "blocks": call.block,
    }  # fmt: skip
    for name, value in given.items():
        if value:
            return f"attention has no gradient with {name} yet"
    if max(call.heads, call.batch) > MAX_GRID:
        sizes = f"{call.heads} heads and {call.batch} sequences"
        return f"attention has no gradient with more than {MAX_GRID} of either: {sizes}"
    return None


def why_not(call: AttentionCall, target: Target) -> str | None:
    """Why a call of attention has no gradient on `target`; None where it has."""
    if not target.device.families():
        return f"attention has no gradient on {target.device.name}, only from compute capability 8.0 on"
    return why_not_variant(call)


def choose(call: AttentionCall, device: Device, deterministic: bool) -> BackwardConfig:
    """The configuration for a call: of the fastest family of kernels that the device has."""
    if device.families()[0] == "sm90":
        return sm90_backward_config(call.dim, call.dim_v, deterministic)
    return sm80_backward_config(call.dim, call.dim_v, deterministic, device.smem_bytes)


def check_gradient(call: AttentionArguments, asked: str, target: Target | None) -> None:
    """RuntimeError where there is no gradient of a call whose argument `asked` requires it.

    `target` is where it runs, None for a call that is only traced.
    """
    described = describe(call)
    reason = why_not_variant(described) if target is None else why_not(described, target)
    if reason is not None:
        raise RuntimeError(f"{asked} requires grad, but {reason}: call it under torch.no_grad()")


class BackwardPlan:
    """The computation of gradients of calls like one that was seen; `run(forward, do, d_lse)`."""

    def __init__(
        self,
        call: AttentionCall,
        forward: Forward,
        do: torch.Tensor,
        target: Target,
        deterministic: bool = True,
        config: BackwardConfig | None = None,
    ) -> None:
        reason = why_not(call, target)
        if reason is not None:
            raise ValueError(reason)
        self.call = call
        self.config = config or choose(call, target.device, deterministic)
        self.steps: list[Step | None] = [
            prepared_for_tma(x) for x in (forward.q, forward.k, forward.v, forward.out, do)
        ]
        tile = (self.config.tile_q, self.config.dim)
        common = {"layout": call.layout, "tile": tile}
        self.prepare = Launch(PREPARE, target, common)
        self.main = Launch(
            FUNCTIONS[self.config.family],
            target,
            {"layout": call.layout, "config": self.config, "variant": call.variant},
        )
        self.finish = Launch(FINISH, target, {**common, "order": self.config.sums})

    def run(self, forward: Forward, do: torch.Tensor, d_lse: torch.Tensor | None = None) -> Gradients:
        """The gradients. do: like the output; d_lse: float32 like the log-sum-exp, or None."""
        call, extras = self.call, forward.extras
        new: Callable[..., torch.Tensor] = torch.zeros_like if self._leaves_rows(extras) else torch.empty_like
        dq, dk, dv = (
            new(x, memory_format=torch.contiguous_format) for x in (forward.q, forward.k, forward.v)
        )
        if is_empty(call):
            return Gradients(dq, dk, dv)
        tensors = (forward.q, forward.k, forward.v, forward.out, do)
        q, k, v, out, do = (x if step is None else step(x) for x, step in zip(tensors, self.steps))
        lse, row_sums, dq_sums, turns = self._workspace(q)
        cu_q = None if extras.seqlens is None else extras.seqlens[0]
        if d_lse is not None:
            d_lse = d_lse.float()
        sums = (lse, row_sums, dq_sums, turns)
        launch = self.prepare
        launch(out, do, forward.lse, d_lse, *sums, cu_q, call.longest_q)
        launch = self.main
        numbers = (call.scale, call.softcap, call.left, call.right)
        launch(q, k, v, do, dk, dv, *sums, *numbers, extras.seqlens, call.longest_k, None, None)
        self.finish(dq_sums, dq, call.scale, cu_q, call.longest_q)
        return Gradients(dq, dk, dv)

    def _leaves_rows(self, extras: Extras) -> bool:
        """Kernels leave rows that belong to no sequence, and keys that do not count."""
        return extras.seqlens is not None or is_empty(self.call)

    def _workspace(self, q: torch.Tensor) -> tuple[Any, ...]:
        """float32 log-sum-exp and row sums by rows, sums of dQ, and int32 turns or None."""
        call, config = self.call, self.config
        if call.packed:
            tiles = call.heads * (call.q_len // config.tile_q + call.batch)
        else:
            tiles = call.batch * call.heads * -(-call.q_len // config.tile_q)
        rows = tiles * config.tile_q
        memory = torch.empty(rows * (config.dim + 2) + 2 * tiles, dtype=torch.float32, device=q.device)
        dq_sums, lse, row_sums, turns = memory.split([rows * config.dim, rows, rows, 2 * tiles])
        return lse, row_sums, dq_sums, turns.view(torch.int32) if config.deterministic else None
