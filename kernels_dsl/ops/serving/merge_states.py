"""`merge_states`: attention over several sets of keys, from the results over each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.serving.merge_operation import MERGE_STATES, MergeArguments, Merged


def merge_states(out: torch.Tensor, lse: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> Merged:
    """Merges n results of attention, each over keys of its own, into the result over all keys: (out, lse).

    out: (n, …, H, Dv), bf16, fp16 or fp32, with up to two modes between the first and H. lse: (n, …, H)
    float32, natural logarithms, as attention returns them with `return_lse` (of shape (B, H, S) there:
    `lse.mT`). Any strides. out_dtype: of the result; default out's.

    The weights are exp(lse - the result's lse), the sums float32, in the order of the states. A state with
    an lse of -inf has seen no key: its output is not read. Where all have, the result is 0 with lse -inf.

    Differentiable in both. Raises TypeError and ValueError that name the argument.
    """
    key: Any = None
    if type(out) in PLAIN_TYPES and type(lse) in PLAIN_TYPES and not out.is_nested:
        key = (out.shape, out_dtype)
        plan = call_cache.find(MERGE_STATES.calls, key, (out, lse))
        if plan is not None:
            try:
                result: Merged = plan(out, lse)
                return result
            except ValueError as error:
                call_cache.refused(MERGE_STATES.calls, key, error)
    merged: Merged = MERGE_STATES.first(MergeArguments(out, lse, out_dtype), key, (out, lse), _operator)
    return merged


def _operator() -> Callable[[MergeArguments], Merged]:
    from kernels_dsl.ops.serving import register

    return register.merge_states
