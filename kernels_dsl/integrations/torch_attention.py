"""This attention behind PyTorch's own calls: `torch.nn.attention.register_flash_attention_impl`.

    name = kernels_dsl.register_torch_attention()
    torch.nn.attention.activate_flash_attention_impl(name)       # and restore_flash_attention_impl()

Once activated, what PyTorch gives to its FlashAttention backend (`scaled_dot_product_attention` where that
backend is chosen, `torch.nn.attention.varlen.varlen_attn`) runs here, forward and backward, keys in pages
included where its version has them (`block_table`, as 2.13). What this attention does not do (dropout,
another GPU) still runs PyTorch's kernels. Either's gradients need the output and the log-sum-exp alone, so
that one may run after the other's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.options import text
from kernels_dsl.ops.attention.arguments import (
    NO_EXTRAS,
    AttentionOptions,
    Extras,
    MaxSeqlens,
    Seqlens,
    keywords_of,
    widths_of,
)
from kernels_dsl.ops.attention.attention import attention, attention_varlen

_SDPA = "_scaled_dot_product_flash_attention"
_SDPA_BACKWARD = "_scaled_dot_product_flash_attention_backward"
_FLASH = "_flash_attention_forward"
_FLASH_BACKWARD = "_flash_attention_backward"
_FLASH_INTO = "_flash_attention_forward_no_dropout_inplace"
Original = Callable[..., Any]


class Declined(Exception):
    """This call is one for PyTorch's kernel."""


def register_torch_attention(name: str = "kernels_dsl") -> str:
    """Make `torch.nn.attention.activate_flash_attention_impl(name)` known; activates nothing. Returns `name`.

    RuntimeError where this PyTorch has no registry of FlashAttention implementations.
    """
    text("name", name)
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise RuntimeError(
            f"torch is {torch.__version__}, must have torch.nn.attention.register_flash_attention_impl"
        )
    register(name, register_fn=activate)
    return name


class Handle:
    """Keeps the kernels in the dispatcher until `remove`, which PyTorch calls to restore its own."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """PyTorch's kernels are the ones that run again."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def activate() -> Handle:
    """Put the kernels into the dispatcher for CUDA tensors; PyTorch calls this."""
    return _activated("CUDA")


def _activated(key: str) -> Handle:
    library = torch.library.Library("aten", "IMPL", key)
    for name, function in _FUNCTIONS.items():
        if hasattr(torch.ops.aten, name):  # not in every version
            library.impl(name, _or_original(name, function), with_keyset=True)
    return Handle(library)


def _or_original(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and PyTorch's kernel of this name where that declines."""
    original = _original(name)

    def call(keys: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except (Declined, TypeError, ValueError):
            if original is None:
                raise
        return original(keys, *args, **keywords)

    return call


def _original(name: str) -> Original | None:
    """PyTorch's kernel for CUDA tensors; None where it has none (a CPU build)."""
    try:
        return torch.library.get_kernel(f"aten::{name}", "CUDA").call_boxed
    except (AttributeError, RuntimeError):
        return None


def _auxiliary(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """State of a random generator, its offset, a mask for debugging: nobody reads them without dropout."""
    state, offset = (q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return state, offset, q.new_empty(0)


def scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention` for (B, H, S, D); causal to the bottom right, as there."""
    if dropout_p != 0.0 or return_debug_mask:
        raise Declined
    with torch.no_grad():  # autograd has seen the call already
        views = [x.transpose(1, 2) for x in (query, key, value)]
        out, lse = attention(*views, causal=is_causal, scale=scale, return_lse=True)
    sizes = (None, None, query.shape[2], key.shape[2])
    return (out.transpose(1, 2), lse, *sizes, *_auxiliary(query))


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """`aten::_flash_attention_forward`: (B, S, H, D), or packed (T, H, D) with `cum_seq_q`, `cum_seq_k`.

    With `block_table` key and value are pages (pages, keys of a page, Hk, D), and `seqused_k` says how many
    keys each sequence has. num_splits: 1 asks for bits of a sequence that do not depend on the others; other
    numbers are hints. out: what to write to, from `flash_forward_into`.
    """
    packed = cum_seq_q is not None and (cum_seq_k is not None or block_table is not None)
    paged = seqused_k is not None or block_table is not None
    if dropout_p != 0.0 or return_debug_mask or alibi_slopes is not None or (paged and not packed):
        raise Declined
    window = _window(window_size_left, window_size_right)
    options: dict[str, Any] = {
        "causal": is_causal, "scale": scale, "window": window, "return_lse": True, "out": out,
    }  # fmt: skip
    with torch.no_grad():
        if block_table is not None:
            from kernels_dsl.ops.serving.paged_attention import paged_attention  # few programs need it

            assert cum_seq_q is not None
            result, lse = paged_attention(
                query, key, value, cu_seqlens_q=cum_seq_q, max_seqlen_q=max_q, seqused_k=seqused_k,
                block_table=block_table, batch_invariant=num_splits == 1, **options,
            )  # fmt: skip
        elif packed:
            lengths: tuple[Any, ...] = (cum_seq_q, cum_seq_k, max_q, max_k)
            result, lse = attention_varlen(query, key, value, *lengths, seqused_k=seqused_k, **options)
        else:
            result, lse = attention(query, key, value, **options)
    return (result, lse, *_auxiliary(query))


def flash_forward_into(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> torch.Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: `flash_forward` into `out`; the log-sum-exp."""
    _, lse, *_ = flash_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q=max_q, max_k=max_k, dropout_p=dropout_p,
        is_causal=is_causal, return_debug_mask=return_debug_mask, out=out, **options,
    )  # fmt: skip
    return lse


def _window(left: int | None, right: int | None) -> tuple[int | None, ...] | None:
    return None if (left, right) in ((None, None), (-1, -1)) else widths_of((left, right))


def scaled_dot_product_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """`aten::_scaled_dot_product_flash_attention_backward` for (B, H, S, D)."""
    del cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset  # of packed calls, of dropout
    if dropout_p != 0.0:
        raise Declined
    do, q, k, v, own = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    options = AttentionOptions(is_causal, scale=scale)
    found = _gradients((q, k, v, own, logsumexp), NO_EXTRAS, do, options)
    return tuple(x.transpose(1, 2) for x in found)


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """`aten::_flash_attention_backward`: gradients of query, key and value, in `flash_forward`'s layouts.

    The same call gives the same bits, with `torch.use_deterministic_algorithms` and without.
    """
    del max_k, rng_state, unused  # of dropout
    if dropout_p != 0.0:
        raise Declined
    extras = NO_EXTRAS
    if cum_seq_q is not None and cum_seq_k is not None:
        extras = Extras(seqlens=Seqlens(cum_seq_q, cum_seq_k), max_seqlens=MaxSeqlens(max_q))
    options = AttentionOptions(is_causal, _window(window_size_left, window_size_right), scale=scale)
    return _gradients((query, key, value, out, logsumexp), extras, grad_out, options)


def _gradients(
    saved: Sequence[torch.Tensor], extras: Extras, do: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v. saved: these, the output and the log-sum-exp of the forward pass."""
    from kernels_dsl.ops.attention.backward import Forward  # imported by those who train
    from kernels_dsl.ops.attention.gradient import gradients_of

    q, k, v, out, lse = saved
    *lead, heads, _ = q.shape
    packed = extras.seqlens is not None
    if lse.shape != ((heads, *lead) if packed else (lead[0], heads, *lead[1:])):
        raise Declined  # a padded one
    forward = Forward(q, k, v, out, lse.contiguous(), extras)
    with torch.no_grad():
        found = gradients_of(forward, do, layout="thd" if packed else "bshd", **keywords_of(options))
    assert found.q is not None and found.k is not None and found.v is not None
    return found.q, found.k, found.v


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    _SDPA: scaled_dot_product,
    _SDPA_BACKWARD: scaled_dot_product_backward,
    _FLASH: flash_forward,
    _FLASH_BACKWARD: flash_backward,
    _FLASH_INTO: flash_forward_into,
}
"""Operator of PyTorch -> what runs in its place."""
