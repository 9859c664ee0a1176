"""Attention as a node of autograd: a repeated call that wants gradients costs a launch and a node.

The operator's own way, through PyTorch's dispatcher, costs far more host time; torch.compile, modes and
transforms still take it.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionArguments,
    Extras,
    keywords_of,
    longest_of,
)
from kernels_dsl.ops.attention.functions import name_of
from kernels_dsl.ops.attention.gradient import backward, setup_context
from kernels_dsl.ops.attention.plan import Plan
from kernels_dsl.sparse.block_lists import DEFAULT_BLOCK
from lowering.records import NamedTuple, frozen

_NO_LISTS = (None, None, None, None)
_NO_SEQLENS = (None, None, None, None)


@frozen(eq=False)
class Recorded:
    """The plan of attention whose calls autograd records, with the log-sum-exp.

    `keywords`: those of the operator.
    """

    forward: Plan
    keywords: dict[str, Any]
    extents: tuple[int, ...] = ()

    @property
    def plan(self) -> Recorded:
        """Itself: where the call cache has a plan, it has this."""
        return self

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output for q, k and v alone."""
        output: torch.Tensor = _apply(RecordedCall(self, NO_EXTRAS), q, k, v)[0]
        return output

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, extras: Extras) -> Any:
        """Output and log-sum-exp; `out` is None, as it has no gradient."""
        if extras is NO_EXTRAS:
            return Attention.apply(RecordedCall(self, extras), q, k, v)
        lists = _NO_LISTS if extras.blocks is None else extras.blocks.tensors
        others = (extras.mask, extras.sinks, *lists, *(extras.seqlens or _NO_SEQLENS))
        return Attention.apply(RecordedCall(self, extras), q, k, v, *others)

    def of_call(self, call: AttentionArguments, calls: dict[Any, Any]) -> Any:
        """The result of a call's record."""
        output, lse = self.run(call.q, call.k, call.v, None, call.extras)
        return (output, lse) if call.return_lse else output


class RecordedCall(NamedTuple):
    """A call beside its tensors."""

    recorded: Recorded
    extras: Extras


class Attention(torch.autograd.Function):
    """A call of `attention` in any of its forms."""

    @staticmethod
    def forward(ctx: Any, call: RecordedCall, *inputs: torch.Tensor | None) -> Any:
        """Output and log-sum-exp. `inputs`: the operator's tensors without `aux`, or the first three."""
        q, k, v, *_ = inputs
        result = call.recorded.forward.run(q, k, v, None, call.extras)
        if call.extras.aux:
            inputs = (*inputs, call.extras.aux)
        setup_context(ctx, inputs, call.recorded.keywords, result, call)
        return result

    backward = staticmethod(backward)


_apply: Any = super(torch.autograd.Function, Attention).apply
"""`Attention.apply` without its look for transforms: what repeats an earlier call has none."""


def all_keywords_of(call: AttentionArguments) -> dict[str, Any]:
    """The keywords of a call as an operator, with the log-sum-exp."""
    longest, blocks = longest_of(call.extras), call.extras.blocks
    block_q, block_k = DEFAULT_BLOCK if blocks is None else blocks.block
    return {
        **keywords_of(call.options), "layout": call.layout, "return_lse": True, "block_q": block_q,
        "block_k": block_k,
        "max_seqlen_q": longest.q, "max_seqlen_k": longest.k, "family": call.family,
        "score_mod": name_of("score_mod", call.score_mod, False),
        "mask_mod": name_of("mask_mod", call.mask_mod, False),
        "score_mod_bwd": name_of("score_mod_bwd", call.score_mod_bwd, False),
        "deterministic": call.deterministic,
    }  # fmt: skip
