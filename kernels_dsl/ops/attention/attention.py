"""Attention forward on PyTorch tensors: O = softmax(scale · Q Kᵀ + mask) V, in three forms of call.

`attention` takes (B, S, H, D) as FlashAttention does, `scaled_dot_product_attention` (B, H, S, D) as
PyTorch does, `attention_varlen` packed sequences. They differ in where a causal mask lies if the lengths
differ: `attention` and `attention_varlen` align it to the bottom right (the last query sees all keys),
PyTorch's `is_causal` to the top left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES, watched
from kernels_dsl.checks.options import boolean, integer, one_of, real
from kernels_dsl.checks.overlap import ranges_meet
from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.ops import call_cache
from kernels_dsl.ops.attention.arguments import (
    MODES,
    NO_EXTRAS,
    AttentionArguments,
    AttentionOptions,
    Extras,
    MaxSeqlens,
    Seqlens,
    aux_of,
    checked_scalars,
    widths_of,
)
from kernels_dsl.ops.attention.operation import ATTENTION, refuse_gradient
from kernels_dsl.ops.attention.supports import PACKED, parts_of
from kernels_dsl.ops.checked import is_checked
from kernels_dsl.sparse.block_lists import BlockLists
from kernels_dsl.sparse.torch_masks import causal_alignment, of_block_mask

_FLOAT32 = torch.float32
_NO_AUX: tuple[Any, ...] = ()  # of which there is one object
_NAMES = (
    "mask", "sinks", "blocks", "aux", "score_mod", "score_mod_bwd", "mask_mod", "return_lse", "deterministic",
    "out", "config", "family",
)  # fmt: skip
"""The arguments of `attention` that are no `AttentionOptions`."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    blocks: BlockLists | Any | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux: Sequence[Any] = (),
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
    family: str | None = None,
) -> Any:
    """softmax(scale · q kᵀ + mask) v.

    q: (B, Sq, H, D), k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv), bf16 or fp16 of one dtype. H is a multiple of Hk.
    D and Dv are multiples of 8 up to 256. Any strides; a head dimension that is not contiguous, or strides
    and addresses that are not multiples of 16 bytes, cost a copy. Autocast casts float32, as in PyTorch.

    With shift = Sk - Sq (`alignment` "bottom_right") or 0 ("top_left"), query i attends to key j where
    causal: j <= i + shift; window (left, right): i + shift - left <= j <= i + shift + right, None or -1 being
    no limit; mask: a tensor that broadcasts to (B, H, Sq, Sk), true where a query may attend, or numbers to
    add to the scaled scores; blocks: `BlockLists` or torch's `BlockMask`, blocks that are not listed are not
    attended to; `mask_mod(b, h, i, j, *aux)` is true. In blocks that are listed as full nothing is masked,
    but numbers are added. A BlockMask's own function counts where `mask_mod` is None; it must not hold
    tensors.

    softcap c > 0: scores become c · tanh(score / c). `score_mod(score, b, h, i, j, *aux)` returns the score
    to use; it and mask_mod are traced by the CuTe DSL. Order: scale, softcap, score_mod, mask.
    sinks: (H,), a logit a head that takes part in the softmax with the value 0.
    scale: default 1/√D, greater than 0. config: the tiles to use in place of the chosen ones. family: "sm90"
    or "sm80" forces a family of kernels, "sm80" that of gradients too.

    Returns the output (B, Sq, H, Dv), and with `return_lse` the natural logarithm of the sum of exponentials,
    float32 (B, H, Sq). A row that attends to nothing gives 0 and -inf. V must be finite where a query's tile
    reaches, also under its mask: 0 · NaN is NaN, as in PyTorch; rows and blocks of K and V that no query of a
    tile attends to are not read into the result.

    Differentiable in q, k, v, sinks and additive masks, through the log-sum-exp too; with `blocks` whose
    sizes are multiples of 64. `score_mod_bwd(gradient, score, b, h, i, j, *aux)` returns the gradient
    of the score that `score_mod` was given, in proportion to `gradient`; it is needed where `score_mod` is
    more than +, -, × and /. RuntimeError where a gradient is asked for that is not there. The same call gives
    gradients of the same bits, unless `deterministic` is False: dQ is then summed in the order in which its
    shares arrive where that is faster. `torch.use_deterministic_algorithms(True)`, read in the backward pass,
    overrides that. The output always has the same bits.
    """
    if deterministic is not None:
        deterministic = boolean("deterministic", deterministic)
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    window = window if window is None else widths_of(window)
    key: Any = None
    if mask is sinks is blocks is score_mod is score_mod_bwd is mask_mod is out is None and aux is _NO_AUX:
        if return_lse is False and config is None and family is None:
            key = _key(q, k, "bshd", (causal, window, alignment, scale, softcap, deterministic))
            if key is not None:
                alone = (q, k, v)
                output = call_cache.served(ATTENTION.calls, key, alone, alone)
                if output is not None:
                    return output
    options = AttentionOptions(causal, window, alignment, scale, softcap)
    extras = NO_EXTRAS
    if not mask is sinks is blocks is None or aux is not _NO_AUX:
        mask_mod, blocks = of_block_mask(blocks, mask_mod, _lengths(q, k, "bshd"))
        extras = Extras(mask, sinks, blocks, aux_of(aux))
    return _other(q, k, v, options, "bshd", extras, key, score_mod=score_mod, mask_mod=mask_mod,
                  score_mod_bwd=score_mod_bwd, return_lse=return_lse, deterministic=deterministic,
                  config=config, family=family, out=out)  # fmt: skip


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    deterministic: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` for (B, H, S, D), and (H, S, D) as a batch of one.

    As there, `is_causal` is aligned to the top left and excludes `attn_mask`, which may be a `CausalBias`
    (`torch.nn.attention.bias`) too. dropout_p must be 0. deterministic: as that of `attention`.
    """
    if deterministic is not None:
        deterministic = boolean("deterministic", deterministic)
    if (is_causal is not True and is_causal is not False) or type(scale) is bool:
        is_causal = boolean("is_causal", is_causal)
    if type(dropout_p) is not float:
        real("dropout_p", dropout_p)
    if enable_gqa is not True and enable_gqa is not False:
        enable_gqa = boolean("enable_gqa", enable_gqa)
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p is {dropout_p}, must be 0: there is no dropout")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask is given beside is_causal, must be None")
    if type(query) not in PLAIN_TYPES or type(key) not in PLAIN_TYPES:
        for name, x in (("query", query), ("key", key)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} is a {type(x).__name__}, must be a torch.Tensor")
    unbatched = query.dim() == 3
    if unbatched:
        for name, x in (("key", key), ("value", value)):
            if isinstance(x, torch.Tensor) and x.dim() != 3:
                raise ValueError(f"{name} has shape {tuple(x.shape)}, must have 3 modes like query")
        query, key, value = query[None], key[None], value[None]
    if not enable_gqa and query.dim() == 4 and key.dim() == 4 and query.size(1) != key.size(1):
        raise ValueError(
            f"key has {key.size(1)} heads, must have {query.size(1)} like query where enable_gqa is false"
        )
    alignment = "top_left"
    if attn_mask is not None and type(attn_mask) not in PLAIN_TYPES:
        found = causal_alignment(attn_mask, (query.shape[-2], key.shape[-2]))
        if found is not None:
            attn_mask, is_causal, alignment = None, True, found
    seen: Any = None
    if attn_mask is None and not unbatched:
        seen = _key(query, key, "bhsd", (is_causal, None, alignment, scale, 0.0, deterministic))
        if seen is not None:
            alone = (query, key, value)
            output = call_cache.served(ATTENTION.calls, seen, alone, alone)
            if output is not None:
                return output
    extras = NO_EXTRAS if attn_mask is None else Extras(mask=attn_mask)
    options = AttentionOptions(is_causal, None, alignment, scale, 0.0)
    out = _other(query, key, value, options, "bhsd", extras, seen, deterministic=deterministic)
    return out[0] if unbatched else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float = 0.0,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    blocks: BlockLists | Any | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux: Sequence[Any] = (),
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
    family: str | None = None,
) -> Any:
    """Attention of packed sequences, each to itself. Arguments as those of `attention`, and:

    q: (Tq, H, D), k: (Tk, Hk, D), v: (Tk, Hk, Dv). cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,) rising
    from 0: where each sequence starts. max_seqlen_q: no sequence has more queries (rows beyond, and
    those behind the last sequence, are not written); it must be given. max_seqlen_k: none has more keys;
    needed beside `mask` only. seqused_k: int32 (sequences,), the keys of each that count.

    block_table: int32 (sequences, n), the pages of each sequence; then k and v are a cache of pages, (pages,
    keys of a page, Hk, D) and (…, Dv), `transpose(1, 2)` of one with heads before keys. cu_seqlens_k must be
    None, and seqused_k, read by the GPU alone, says how many keys each sequence has: prefills, chunks of them
    and decoding mix in one call. Entries past a sequence's keys are not used, and keys past its end may hold
    NaN. Not differentiable.

    i, j and b are places within a sequence and its number, for `mask` and `blocks` too, which are padded:
    `mask` broadcasts to (sequences, H, max_seqlen_q, max_seqlen_k), and the lists of `blocks` have
    (sequences or 1, H or 1, query blocks of max_seqlen_q) as their first modes. What they say of places past
    the end of a sequence does not count.

    Returns (Tq, H, Dv), and with `return_lse` float32 (H, Tq).
    """
    if deterministic is not None:
        deterministic = boolean("deterministic", deterministic)
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    window = window if window is None else widths_of(window)
    mask_mod, blocks = of_block_mask(blocks, mask_mod, None)
    if type(max_seqlen_q) is not int:
        if max_seqlen_q is None:
            raise TypeError("max_seqlen_q is None, must be given: the most queries of a sequence")
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and (type(max_seqlen_k) is not int or max_seqlen_k < 0):
        max_seqlen_k = integer("max_seqlen_k", max_seqlen_k, least=0)
    longest = MaxSeqlens(max_seqlen_q, None if mask is None else max_seqlen_k)
    seqlens = Seqlens(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    extras = Extras(mask, sinks, blocks, aux_of(aux), seqlens, longest)
    options = AttentionOptions(causal, window, alignment, scale, softcap)
    return _other(q, k, v, options, "thd", extras, None, score_mod=score_mod, mask_mod=mask_mod,
                  score_mod_bwd=score_mod_bwd, return_lse=return_lse, deterministic=deterministic,
                  config=config, family=family, out=out)  # fmt: skip


def _key(q: Any, k: Any, form: Any, options: tuple[object, ...]) -> Any:
    """The key that a call is found by again, `form` being its layout or what else is special to it; None for
    tensors that only a first call looks at."""
    if type(q) not in PLAIN_TYPES or type(k) not in PLAIN_TYPES:
        return None
    try:
        return q.shape, k.shape, form, options
    except RuntimeError:  # of nested tensors, which have no shape
        return None


def _other(
    q: Any,
    k: Any,
    v: Any,
    options: AttentionOptions,
    layout: str,
    extras: Extras,
    key: Any,
    *,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    config: Any = None,
    family: str | None = None,
    out: Any = None,
) -> Any:
    """A call with more than q, k and v, or that the call cache does not have."""
    tensors: tuple[Any, ...] = (q, k, v)
    special = score_mod, score_mod_bwd, mask_mod, config, family, out
    if key is None and extras is NO_EXTRAS and return_lse is False and all(x is None for x in special):
        # Of q, k, v and `AttentionOptions` alone, as a call of `attention` that the cache may have.
        key = _key(q, k, layout, (*options, deterministic))
        alone = (q, k, v)
        output = None if key is None else call_cache.served(ATTENTION.calls, key, alone, alone)
        if output is not None:
            return output
    elif key is None and not is_checked():
        form = (
            layout, extras is NO_EXTRAS or extras.form(), out is None, score_mod, score_mod_bwd, mask_mod,
            return_lse, deterministic, config, family,
        )  # fmt: skip
        key = _key(q, k, form, options)
        if key is not None:
            if extras is not NO_EXTRAS:
                tensors += tuple(extras.values())
            if out is not None:
                tensors += (out,)
            found = call_cache.find(ATTENTION.calls, key, tensors)
            if found is not None and (out is None or not ranges_meet(out, tensors[:-1], found.extents)):
                try:
                    result = found.plan.run(q, k, v, out, extras)
                    return result if return_lse else result[0]
                except ValueError as error:
                    call_cache.refused(ATTENTION.calls, key, error)
    cast = _autocast((q, k, v))
    if cast is not None:
        return _other(*cast, options, layout, extras, None, score_mod=score_mod, mask_mod=mask_mod,
                      score_mod_bwd=score_mod_bwd, return_lse=return_lse, deterministic=deterministic,
                      config=config, family=family, out=out)  # fmt: skip
    call = AttentionArguments(
        q, k, v, options, layout, extras, score_mod, mask_mod,
        return_lse=return_lse, config=config, family=family, out=out, score_mod_bwd=score_mod_bwd,
        deterministic=deterministic is not False,
    )  # fmt: skip
    if not watched():
        boolean("return_lse", return_lse)
        refuse_gradient(call)
    return ATTENTION.first(call, key, tensors, _operator)


def _autocast(tensors: tuple[Any, Any, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """q, k and v in autocast's dtype, where that is on and one of them is float32; None: as they are."""
    if any(not isinstance(x, torch.Tensor) for x in tensors) or all(x.dtype != _FLOAT32 for x in tensors):
        return None
    kind = tensors[0].device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return None
    q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in tensors)
    return q, k, v


def _operator() -> Callable[[AttentionArguments], Any]:
    from kernels_dsl.ops.attention import register

    return register.attention


def _lengths(q: Any, k: Any, layout: str) -> tuple[int, int] | None:
    """(Sq, Sk); None where q or k is no tensor of this layout, or sequences are packed."""
    rows = MODES[layout][1]
    for x in (q, k):
        if layout == "thd" or not isinstance(x, torch.Tensor) or x.dim() != 4:
            return None
    return None if q.is_nested or k.is_nested else (q.shape[rows], k.shape[rows])


def attention_supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: str = "bshd", **options: Any
) -> str | None:
    """Says why `attention(q, k, v, **options)` cannot run here; None if it can. Compiles nothing.

    layout: "bshd", "bhsd" (as `scaled_dot_product_attention`), or "thd" with `cu_seqlens_q`, `cu_seqlens_k`,
    `max_seqlen_q` and perhaps `max_seqlen_k`, `seqused_k` and `block_table` (as `attention_varlen`).
    """
    try:
        one_of("layout", layout, tuple(MODES))
        q, k, v = _autocast((q, k, v)) or (q, k, v)
        packed = layout == "thd"
        names = (*_NAMES, *PACKED, "max_seqlen_k") if packed else _NAMES
        parts = parts_of("attention_varlen" if packed else "attention", options, names)
        others, extras = parts.others, parts.extras
        mask_mod, blocks = of_block_mask(extras.blocks, others.pop("mask_mod", None), _lengths(q, k, layout))
        deterministic = others.pop("deterministic", None)
        call = AttentionArguments(
            q, k, v, parts.options, layout, extras._replace(blocks=blocks), mask_mod=mask_mod,
            deterministic=deterministic is None or boolean("deterministic", deterministic), **others,
        )  # fmt: skip
        call.check()
        if not watched():
            refuse_gradient(call)
        ATTENTION.new_plan(call.in_memory())
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return None
