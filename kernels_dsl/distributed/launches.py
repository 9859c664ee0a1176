"""One launch of attention for a part, and of its gradients."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from kernels_dsl.distributed.listed import Masking
from kernels_dsl.distributed.parts import Part, Rows
from kernels_dsl.ops.attention.arguments import Extras, MaxSeqlens, Seqlens
from kernels_dsl.ops.attention.attention import attention, attention_varlen
from kernels_dsl.ops.attention.backward import Forward, Gradients
from kernels_dsl.ops.attention.functions import name_of
from kernels_dsl.ops.attention.gradient import gradients_of
from lowering.records import frozen


class KeysValues(NamedTuple):
    """Keys and values, (B, S, Hk, D) and (B, S, Hk, Dv)."""

    k: torch.Tensor
    v: torch.Tensor

    def rows(self, rows: Rows) -> KeysValues:
        """Some of them, as views."""
        return KeysValues(self.k[:, rows.slice], self.v[:, rows.slice])


@frozen
class Options:
    """Options of every launch."""

    scale: float | None
    softcap: float
    deterministic: bool | None
    masking: Masking | None = None


@frozen
class Needed:
    """Gradients that are asked for."""

    q: bool
    kv: bool


class Packing(NamedTuple):
    """The starts of packed sequences on their device, and the rows of the longest."""

    starts: torch.Tensor
    longest: int


def packing_of(starts: tuple[int, ...], device: torch.device) -> Packing:
    """That of sequences which start there, the last number being the end of the last."""
    longest = max(end - start for start, end in pairwise(starts))
    return Packing(torch.tensor(starts, dtype=torch.int32, device=device), longest)


def launch(
    options: Options, part: Part, q: torch.Tensor, found: KeysValues, out: torch.Tensor
) -> torch.Tensor:
    """Writes `out`, and returns the log-sum-exp (B, H, S); all are the part's rows."""
    masking = None if options.masking is None else options.masking.of_part(part)
    keywords: dict[str, Any] = {
        "window": part.limits, "alignment": "top_left", "scale": options.scale, "softcap": options.softcap,
        "return_lse": True,
    }  # fmt: skip
    if masking is not None:
        keywords.update(
            window=masking.limits, blocks=masking.blocks, mask_mod=masking.mask_mod, aux=masking.aux
        )
    if not part.starts:
        lse: torch.Tensor = attention(q, *found, out=out, **keywords)[1]
        return lse
    starts, longest = packing_of(part.starts, q.device)
    tensors = (q[0], found.k[0], found.v[0])
    lse = attention_varlen(*tensors, starts, starts, longest, out=out[0], **keywords)[1]
    return lse[None]


def launch_backward(
    options: Options,
    part: Part,
    forward: Forward,
    do: torch.Tensor,
    d_lse: torch.Tensor | None,
    needed: Needed,
) -> Gradients:
    """The gradients of a part, from its rows of the whole result and of its gradients."""
    keywords: dict[str, Any] = {
        "window_left": part.limits.left, "window_right": part.limits.right, "alignment": "top_left",
        "scale": options.scale, "softcap": options.softcap, "needs_q": needed.q, "needs_kv": needed.kv,
    }  # fmt: skip
    if options.deterministic is not None:
        keywords["deterministic"] = options.deterministic
    if options.masking is not None:
        masking = options.masking.of_part(part)
        left, right = masking.limits
        keywords.update(
            window_left=left, window_right=right, mask_mod=name_of("mask_mod", masking.mask_mod, False)
        )
        extras = Extras(blocks=masking.blocks, aux=masking.aux)
        forward = forward._replace(extras=extras)
    if not part.starts:
        return gradients_of(forward, do, d_lse, **keywords)
    starts, longest = packing_of(part.starts, do.device)
    extras = Extras(seqlens=Seqlens(starts, starts), max_seqlens=MaxSeqlens(longest))
    packed = Forward(forward.q[0], forward.k[0], forward.v[0], forward.out[0], forward.lse[0], extras)
    found = gradients_of(packed, do[0], None if d_lse is None else d_lse[0], layout="thd", **keywords)
    dq, dk, dv = (None if x is None else x[None] for x in (found.q, found.k, found.v))
    return Gradients(dq, dk, dv, None)
