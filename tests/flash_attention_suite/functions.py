"""flash-attn-4's functions, private ones too, as its tests call them, on this library's operations.

What they take and `kernels_dsl.flash_attn.cute` does not is made up for here, where it can be: batches of
padded sequences are packed before a call and unpacked after it, windows with a negative side are mask
functions, and mask functions of vectors get vectors of one element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernels_dsl.flash_attn import cute

_KNOWN = ("softmax_scale", "causal", "softcap", "learnable_sink", "deterministic", "return_lse", "mask_mod",
          "aux_tensors", "block_sparse_tensors", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
          "max_seqlen_q", "max_seqlen_k")  # fmt: skip
_HINTS = ("tile_mn", "pack_gqa", "_arch", "num_threads", "m_block_size", "n_block_size", "num_splits",
          "subtile_factor")  # fmt: skip
Window = tuple[int | None, int | None]


class _Lengths(NamedTuple):
    """Lengths of a sequence, as a mask function reads them."""

    seqlen_q: Any
    seqlen_k: Any


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`flash_attn_func` of flash-attn-4."""
    aux = list(options.pop("aux_tensors", None) or ())
    mask, (window, shifted) = (
        options.pop("mask_mod", None),
        _plain_window(options.pop("window_size", (None, None))),
    )
    if mask is not None or shifted is not None:
        assert mask is None or shifted is None, "a window with a negative side beside a mask function"
        chosen = shifted if mask is None else _of_scalars(mask, len(aux))
        lengths = torch.tensor([q.shape[1], k.shape[1]], dtype=torch.int32, device=q.device)
        options.update(mask_mod=chosen, aux_tensors=[*aux, lengths])
    return cute.flash_attn_func(q, k, v, window_size=window, **options)


def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """`flash_attn_varlen_func` of flash-attn-4."""
    starts_q, starts_k = (options.pop(f"cu_seqlens_{name}", None) for name in "qk")
    used_q, used_k = (options.pop(f"seqused_{name}", None) for name in "qk")
    rows, keys = _Packing.of(q, starts_q, used_q), _Packing.of(k, starts_k, used_k)
    found = cute.flash_attn_varlen_func(
        rows.pack(q),
        keys.pack(k),
        keys.pack(v),
        cu_seqlens_q=rows.starts,
        cu_seqlens_k=keys.starts,
        **options,
    )
    return rows.unpack(found[0]), None if found[1] is None else rows.unpack(found[1].mT.contiguous())


class _Packing(NamedTuple):
    """The rows of sequences: `kept` of padded ones (B, S), None where they are packed already."""

    starts: torch.Tensor
    kept: torch.Tensor | None

    @classmethod
    def of(cls, x: torch.Tensor, starts: torch.Tensor | None, used: torch.Tensor | None) -> _Packing:
        """The packing of x, (T, H, D) with `starts`, else (B, S, H, D)."""
        if starts is not None:
            assert used is None, "lengths beside the starts of packed sequences"
            return cls(starts, None)
        batch, length = x.shape[:2]
        used = torch.full((batch,), length, dtype=torch.int32, device=x.device) if used is None else used
        starts = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
        return cls(starts, torch.arange(length, device=x.device) < used[:, None])

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """(T, ...) of x."""
        return x if self.kept is None else x[self.kept]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse, zeros between."""
        if self.kept is None:
            return x
        return x.new_zeros(*self.kept.shape, *x.shape[1:]).masked_scatter(
            self.kept.view(*self.kept.shape, *[1] * (x.dim() - 1)), x
        )


def _flash_attn_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: Any = None, lse: Any = None, **options: Any
) -> Any:
    """The forward pass without autograd. `out` and `lse` are written, too, where they are given."""
    with torch.no_grad():
        found = _either(q, k, v, {**options, "return_lse": True})
    for mine, theirs in zip((out, lse), found):
        if mine is not None:
            mine.copy_(theirs)
    return (*found, None, None, None)


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    *,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v; the output and its log-sum-exp are computed again."""
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    options.pop("block_sparse_tensors", None)  # theirs go from keys to queries; the mask function says it all
    found = torch.autograd.grad(_either(*operands, options)[0], operands, dout)
    for mine, theirs in zip((dq, dk, dv), found):
        if mine is not None:
            mine.copy_(theirs)
    return tuple(theirs if mine is None else mine for mine, theirs in zip((dq, dk, dv), found))


def _either(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Any:
    """A call of dense or of packed sequences with the private functions' names of options."""
    sides = tuple(options.pop(f"window_size_{side}", None) for side in ("left", "right"))
    chosen = {name: x for name, x in options.items() if name in _KNOWN and x is not None}
    left_out = {name for name, x in options.items() if name not in (*_KNOWN, *_HINTS) and x is not None}
    assert not left_out, f"not supported: {left_out}"
    packed = any(options.get(name) is not None for name in ("cu_seqlens_q", "seqused_q", "seqused_k"))
    function = flash_attn_varlen_func if packed else flash_attn_func
    return function(q, k, v, window_size=sides, **chosen)


def _plain_window(window: Window) -> tuple[Window, Callable | None]:
    """The window that this library takes, and a mask function for what it does not: a negative side."""
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        return (None, None), None
    if left is not None and left < 0:
        least = -left
        return (None, right), lambda b, h, i, j, lengths: j >= i + lengths[1] - lengths[0] + least
    if right is not None and right < 0:
        most = -right
        return (left, None), lambda b, h, i, j, lengths: j <= i + lengths[1] - lengths[0] - most
    return window, None


def _of_scalars(function: Callable, count: int) -> Callable:
    """A mask function of vectors as one of single positions; the `count` tensors and the lengths follow."""

    def mask(b: Any, h: Any, i: Any, j: Any, *aux: Any) -> Any:
        import cutlass
        from flash_attn.cute import utils

        places = [utils.scalar_to_ssa(cutlass.Int32(x), cutlass.Int32) for x in (b, h, i, j)]
        return utils.ssa_to_scalar(function(*places, _Lengths(aux[-1][0], aux[-1][1]), list(aux[:count])))

    return mask
