"""Attention over a sequence that the ranks of a process group share: context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks import options
from kernels_dsl.checks.eager_path import PLAIN_TYPES, asks_gradients, refuse_forward_mode
from kernels_dsl.distributed.agreement import agree
from kernels_dsl.distributed.all_gather import AllGather
from kernels_dsl.distributed.groups import ranks_of
from kernels_dsl.distributed.launches import Options
from kernels_dsl.distributed.listed import (
    MaskedSharing,
    check_masking,
    chunks_of_call,
    masking_of,
    ranges_of,
    whole_sequence,
)
from kernels_dsl.distributed.packed import batch_of_one, check_starts, starts_of
from kernels_dsl.distributed.parts import Lengths, Limits, PackedSharing, Sharing
from kernels_dsl.distributed.ring import Call, Ring
from kernels_dsl.distributed.sequence import ORDERS, check_local_length
from kernels_dsl.distributed.ulysses import refuse_heads, ulysses
from kernels_dsl.ops.attention.arguments import (
    AttentionArguments,
    AttentionOptions,
    describe,
    window_limits,
)
from kernels_dsl.ops.attention.operation import ATTENTION, refuse_gradient
from kernels_dsl.sparse.block_lists import BlockLists

METHODS = ("ring", "all_gather", "ulysses")


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    method: str = "ring",
    order: str = "contiguous",
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    blocks: BlockLists | Any | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux: Sequence[Any] = (),
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Any:
    """`attention` of a whole sequence whose rows the ranks of `group` share, as `shard_sequence` gives them.

    q: (B, S / ranks, H, D), k: (B, S / ranks, Hk, D), v: (B, S / ranks, Hk, Dv): this rank's rows, of the
    same shapes on all ranks. group: a process group, a device mesh of one dimension, or None for all ranks.
    order: "contiguous" or "zigzag", as in `shard_sequence`; the latter shares a causal mask's work evenly.

    method: "ring" sends keys and values from rank to rank beside the computation, those alone that are seen;
    "all_gather" collects them first; "ulysses" exchanges rows for heads, of which `ranks` must divide H.

    Causal, window, scale, softcap and deterministic are those of `attention`, for the whole sequence. Without
    a mask k and v may have another length than q.

    cu_seqlens: packed sequences, (sequences + 1,) integers that rise from 0: where each starts in the whole,
    and the end of the last; the same on all ranks. Tensors have no batch then: q (S / ranks, H, D), the
    log-sum-exp (H, S / ranks); shard with `dim=0`. Causal and window count within a sequence. Rows after the
    last sequence give 0 and -inf. The host reads them: on a GPU it waits for that.

    blocks, mask_mod, aux: as of `attention`, for the whole sequence and the same on all ranks, `BlockLists`
    or torch's `BlockMask`; i and j are places in the whole. A rank's chunks must be whole blocks, except with
    "ulysses". A ring sends no keys whose blocks nobody lists; the host reads the lists for that, once a call.

    Returns this rank's rows of the output, and with `return_lse` of the log-sum-exp, (B, H, S / ranks).
    Differentiable in q, k and v, through the log-sum-exp too: all ranks must call backward then. Results are
    merged in float32, in a fixed order: the same call gives the same bits.

    TypeError or ValueError before any communication for arguments that are wrong. Ranks that disagree wait
    for one another until the group's timeout, unless `kernels_dsl.checked()` or KERNELS_DSL_CHECK=1 has them
    compare their arguments first: ValueError on all, which names the rank. A group's first call does so too.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "context_parallel_attention runs outside torch.compile only: wrap the call in "
            "torch.compiler.disable"
        )
    ranks, named = ranks_of(group), {"q": q, "k": k, "v": v}
    limits, starts, masking = Limits(), None, None
    try:
        options.one_of("method", method, METHODS)
        options.one_of("order", order, ORDERS)
        options.boolean("return_lse", return_lse)
        if deterministic is not None:
            options.boolean("deterministic", deterministic)
        limits = Limits(*window_limits(options.boolean("causal", causal), window))
        if cu_seqlens is not None:
            starts = starts_of(cu_seqlens)
            q, k, v = batch_of_one(q, k, v)
        _check((q, k, v), AttentionOptions(scale=scale, softcap=softcap), order, limits)
        if starts is not None:
            check_starts(starts, q, k, ranks.size)
        if method == "ulysses":
            refuse_heads(q.shape[2], k.shape[2], ranks.size)
        masking = masking_of(blocks, mask_mod, aux, limits, whole_sequence((q, k, v), ranks.size))
        if masking is not None:
            check_masking(
                masking, starts, chunks_of_call(q, k, ranks.size, order), method, asks_gradients((q, k, v))
            )
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        agree(ranks, dict, error)
        raise
    choices = {
        "method": method, "order": order, "window": tuple(limits), "scale": scale, "softcap": softcap,
        "return_lse": return_lse, "deterministic": deterministic, "cu_seqlens": starts,
    }  # fmt: skip

    def say() -> dict[str, Any]:
        lists = {} if masking is None else masking.digests()
        return {"the call": "context_parallel_attention", **_form(named), **choices, **lists}

    agree(ranks, say)
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    sharing = Sharing(ranks.size, order, Lengths(q.shape[1], k.shape[1]), limits)
    if starts is not None:
        sharing = PackedSharing(**vars(sharing), starts=starts)
    elif masking is not None:
        lists = masking.blocks if method == "ring" else None
        ranges = None if lists is None else ranges_of(lists, chunks_of_call(q, k, ranks.size, order))
        sharing = MaskedSharing(**vars(sharing), ranges=ranges, listed=masking.blocks is not None)
    call = Call(ranks, sharing, Options(scale, softcap, deterministic, masking))
    if method == "ulysses":
        out, lse = ulysses(call, q, k, v, return_lse)
    else:
        out, lse = (Ring if method == "ring" else AllGather).apply(call, q, k, v)
    if starts is not None:
        out, lse = out[0], lse[0] if return_lse else lse
    return (out, lse) if return_lse else out


def _check(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    checked: AttentionOptions,
    order: str,
    limits: Limits,
) -> None:
    """Raises what `attention` would, and for rows that the order or the mask does not allow."""
    named = dict(zip("qkv", tensors))
    for name, x in named.items():
        if isinstance(x, torch.Tensor) and type(x) not in PLAIN_TYPES:
            raise TypeError(
                f"{name} is a {type(x).__name__}, must be a torch.Tensor, as a DTensor's to_local()"
            )
    q, k, v = tensors
    call = AttentionArguments(q, k, v, checked)
    found = describe(call)
    refuse_forward_mode("context_parallel_attention", named)
    ATTENTION.target_of(call).families(None, "q")
    refuse_gradient(call)
    check_local_length("q", found.q_len, order)
    check_local_length("k", found.k_len, order)
    if limits != Limits() and found.q_len != found.k_len:
        raise ValueError(f"k has {found.k_len} rows, must have {found.q_len} like q under a mask")


def _form(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """All of the tensors that must be the same on all ranks."""
    grad, form = torch.is_grad_enabled(), {}
    for name, x in tensors.items():
        form[f"{name}'s shape"] = tuple(x.shape)
        form[f"{name}'s dtype"] = x.dtype
        form[f"{name}.requires_grad"] = grad and x.requires_grad
    return form
