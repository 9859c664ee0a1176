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

from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.ops import call_cache, checked, overlap
from kernels_dsl.ops.attention import plan as attention_plan
from kernels_dsl.ops.attention.arguments import (
    MODES,
    NAMES,
    NO_EXTRAS,
    Extras,
    aux_of,
    checked_scalars,
    describe,
    widths_of,
)
from kernels_dsl.ops.attention.blocks import BlockLists
from kernels_dsl.ops.attention.functions import unwrapped
from kernels_dsl.ops.attention.outputs import check_out, out_shape
from kernels_dsl.ops.attention.torch_masks import causal_alignment, of_block_mask
from kernels_dsl.ops.eager_path import (
    PLAIN_TYPES,
    check_memory,
    check_output,
    check_tensor,
    signature,
    watched,
    written_out,
)
from kernels_dsl.ops.options import boolean, integer, one_of, real
from kernels_dsl.ops.target import target_of

_PLANS: dict[Any, Any] = {}
"""Plans, and of calls without extras, `out` and log-sum-exp their `bare` (`call_cache`)."""
_grad_enabled = torch.is_grad_enabled
_NO_AUX: tuple[Any, ...] = ()  # of which there is one object
NO_CHOICE = (None, None)
"""Neither a configuration nor a family is asked for."""


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
    mask_mod: Callable[..., Any] | None = None,
    aux: Sequence[Any] = (),
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
    family: str | None = None,
) -> Any:
    """softmax(scale · q kᵀ + mask) v.

    q: (B, Sq, H, D), k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv), bf16 or fp16 of one dtype. H is a multiple of Hk.
    D and Dv are multiples of 8 up to 256. Any strides; a head dimension that is not contiguous, or strides
    and addresses that are not multiples of 16 bytes, cost a copy.

    With shift = Sk - Sq (`alignment` "bottom_right") or 0 ("top_left"), query i attends to key j where
    causal: j <= i + shift; window (left, right): i + shift - left <= j <= i + shift + right, None or -1 being
    no limit; mask: a tensor that broadcasts to (B, H, Sq, Sk), true where a query may attend, or numbers to
    add to the scaled scores; blocks: `BlockLists` or torch's `BlockMask`, blocks that are not listed are not
    attended to; mask_mod(b, h, i, j, *aux) is true. In blocks that are listed as full nothing is masked, but
    numbers are added. A BlockMask's own function counts where `mask_mod` is None; it must not hold tensors.

    softcap c > 0: scores become c · tanh(score / c). score_mod(score, b, h, i, j, *aux) returns the score to
    use; it and mask_mod are traced by the CuTe DSL. Order: scale, softcap, score_mod, mask.
    sinks: (H,), a logit a head that takes part in the softmax with the value 0.
    scale: default 1/√D, greater than 0. config: the tiles to use in place of the chosen ones. family: "sm90"
    or "sm80" forces a family of kernels.

    Returns the output (B, Sq, H, Dv), and with `return_lse` the natural logarithm of the sum of exponentials,
    float32 (B, H, Sq). A row that attends to nothing gives 0 and -inf. V must be finite where a query's tile
    reaches, also under its mask: 0 · NaN is NaN, as in PyTorch; rows and blocks of K and V that no query of a
    tile attends to are not read into the result. No gradients yet: RuntimeError where they are asked for.
    """
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    options = (causal, window if window is None else widths_of(window), alignment, scale, softcap)
    if mask is sinks is blocks is score_mod is mask_mod is out is None and aux is _NO_AUX:
        if return_lse is False and config is None and family is None:
            output = _repeated(q, k, v, "bshd", options)
            if output is not None:
                return output
        extras = NO_EXTRAS
    else:
        mask_mod, blocks = of_block_mask(blocks, mask_mod, _lengths(q, k, "bshd"))
        extras = Extras(mask, sinks, blocks, aux_of(aux))
    boolean("return_lse", return_lse)
    if _through_dispatcher(q, k, v, extras):
        from kernels_dsl.ops.attention import register as attention_register

        functions = (score_mod, mask_mod, return_lse, out, family)
        return attention_register.call(q, k, v, "bshd", options, extras, functions)
    rest = (return_lse, out, (config, family))
    return run_direct(q, k, v, "bshd", options, extras, (score_mod, mask_mod), rest)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` for (B, H, S, D), and (H, S, D) as a batch of one.

    As there, `is_causal` is aligned to the top left and excludes `attn_mask`, which may be a `CausalBias`
    (`torch.nn.attention.bias`) too. dropout_p must be 0.
    """
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
    options = (is_causal, None, alignment, scale, 0.0)
    if attn_mask is None and not unbatched:
        output = _repeated(query, key, value, "bhsd", options)
        if output is not None:
            return output
    extras = NO_EXTRAS if attn_mask is None else Extras(mask=attn_mask)
    if _through_dispatcher(query, key, value, extras):
        from kernels_dsl.ops.attention import register as attention_register

        functions = (None, None, False, None, None)
        out = attention_register.call(query, key, value, "bhsd", options, extras, functions)
    else:
        out = run_direct(query, key, value, "bhsd", options, extras, (None, None), (False, None, NO_CHOICE))
    return out[0] if unbatched else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: Sequence[int | None] | None = None,
    alignment: str = "bottom_right",
    scale: float | None = None,
    softcap: float = 0.0,
    seqused_k: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    blocks: BlockLists | Any | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux: Sequence[Any] = (),
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
    family: str | None = None,
) -> Any:
    """Attention of packed sequences, each to itself. Arguments as those of `attention`, and:

    q: (Tq, H, D), k: (Tk, Hk, D), v: (Tk, Hk, Dv). cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,) rising
    from 0: where each sequence starts. max_seqlen_q: no sequence has more queries (rows beyond, and
    those behind the last sequence, are not written). max_seqlen_k: none has more keys; needed beside `mask`
    only. seqused_k: int32 (sequences,), the keys of each that count.
    i, j and b are places within a sequence and its number, for `mask` and `blocks` too, which are padded:
    `mask` broadcasts to (sequences, H, max_seqlen_q, max_seqlen_k), and the lists of `blocks` have
    (sequences or 1, H or 1, query blocks of max_seqlen_q) as their first modes. What they say of places past
    the end of a sequence does not count.

    Returns (Tq, H, Dv), and with `return_lse` float32 (H, Tq).
    """
    if (causal is not True and causal is not False) or type(scale) is bool or type(softcap) is bool:
        causal = checked_scalars(causal, scale, softcap)
    options = (causal, window if window is None else widths_of(window), alignment, scale, softcap)
    mask_mod, blocks = of_block_mask(blocks, mask_mod, None)
    seqlens = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    if type(max_seqlen_q) is not int:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and (type(max_seqlen_k) is not int or max_seqlen_k < 0):
        max_seqlen_k = integer("max_seqlen_k", max_seqlen_k, least=0)
    boolean("return_lse", return_lse)
    max_seqlens = (max_seqlen_q, None if mask is None else max_seqlen_k)
    extras = Extras(mask, sinks, blocks, aux_of(aux), seqlens, max_seqlens)
    if _through_dispatcher(q, k, v, extras):
        from kernels_dsl.ops.attention import register as attention_register

        functions = (score_mod, mask_mod, return_lse, out, family)
        return attention_register.call(q, k, v, "thd", options, extras, functions)
    rest = (return_lse, out, (config, family))
    return run_direct(q, k, v, "thd", options, extras, (score_mod, mask_mod), rest)


def _lengths(q: Any, k: Any, layout: str) -> tuple[int, int] | None:
    """(Sq, Sk); None where q or k is no tensor of this layout, or sequences are packed."""
    rows = MODES[layout][1]
    for x in (q, k):
        if layout == "thd" or not isinstance(x, torch.Tensor) or x.dim() != 4:
            return None
    return None if q.is_nested or k.is_nested else (q.shape[rows], k.shape[rows])


def _through_dispatcher(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras) -> bool:
    """Whether torch.compile, a mode, a transform or a tensor subclass must see this call as an operator.

    RuntimeError where a gradient is asked for.
    """
    if watched():
        return True
    values = (q, k, v) if extras is NO_EXTRAS else (q, k, v, extras.mask, extras.sinks, *extras.aux)
    grad = _grad_enabled()
    subclass = False
    for x in values:
        if type(x) in PLAIN_TYPES:
            if grad and x.requires_grad:
                raise RuntimeError(_no_gradient(x, q, k, v, extras))
        elif x is not None and isinstance(x, torch.Tensor):
            if hasattr(x, "seq_len_kv"):
                raise TypeError(f"mask is a {type(x).__name__}, must be None: say causal and alignment")
            check_tensor(_name_of(x, q, k, v, extras), x)
            subclass = True
    return subclass and all(isinstance(x, torch.Tensor) for x in (q, k, v))


def _no_gradient(
    tensor: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras
) -> str:
    """Why there is no gradient of `tensor`, one of the arguments."""
    name = _name_of(tensor, q, k, v, extras)
    return (
        f"{name} requires grad, but attention has no backward yet: call it under torch.no_grad(), or on "
        "detached tensors"
    )


def _name_of(tensor: torch.Tensor, q: Any, k: Any, v: Any, extras: Extras) -> str:
    """What the caller knows one of the arguments as."""
    named = {"q": q, "k": k, "v": v, **extras.tensors()}
    return next((name for name, x in named.items() if x is tensor), "an input")


def _repeated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, options: tuple[Any, ...]
) -> torch.Tensor | None:
    """The output of a call like one that has gone the long way before; None where there was none."""
    if type(q) not in PLAIN_TYPES or type(k) not in PLAIN_TYPES:
        return None
    try:
        key = (q.shape, k.shape, layout, options)
    except RuntimeError:  # of nested tensors, which have no shape
        return None
    bare = call_cache.find(_PLANS, key, (q, k, v))
    if bare is not None:
        try:
            return bare(q, k, v)
        except ValueError:
            call_cache.look_at_addresses(_PLANS, key)
    return None


def run_direct(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    options: tuple[Any, ...],
    extras: Extras,
    functions: tuple[Any, Any],
    rest: tuple[Any, ...],
) -> Any:
    """A call on plain tensors, past the dispatcher.

    `options`: (causal, window, alignment, scale, softcap). `functions`: (score_mod, mask_mod). `rest`:
    (return_lse, out, (config, family)[, True: the caller drops rows that belong to no sequence]).
    """
    return_lse, out, choice = rest[:3]
    if isinstance(out, torch.Tensor) and out.is_neg():  # which a signature does not say
        check_output("out", out)
    key: Any = None
    if isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
        if q.is_neg() or k.is_neg() or v.is_neg():
            q, k, v = written_out((q, k, v)) or (q, k, v)
        key = (*map(signature, (q, k, v)), layout, options, functions, return_lse, choice)
    if key is not None and (extras is not NO_EXTRAS or out is not None):
        tensors = extras.tensors()
        if any(x.is_neg() for x in tensors.values()):
            extras = extras.written_out()
            tensors = extras.tensors()
        block = None if extras.blocks is None else extras.blocks.block
        others = tuple((name, signature(x)) for name, x in tensors.items())
        key = (key, others, tuple(map(type, extras.aux)), block, extras.max_seqlens, signature(out))
    plan: attention_plan.Plan | None = None
    try:
        plan = None if key is None else _PLANS.get(key)
    except TypeError:  # as in `_repeated`
        key = None
    if plan is None:
        plan = _plan(q, k, v, layout, options, extras, functions, rest)
        check_memory({"q": q, "k": k, "v": v, **extras.tensors(), "out": out})
        if key is not None and not target_of(q, "q").emulated:
            call_cache.put(_PLANS, key, plan)
    if out is not None:
        named = {"q": q, "k": k, "v": v, **extras.tensors()}
        overlap.check_overlap(out, named, tuple(named))
    if extras is not NO_EXTRAS and checked.is_checked():
        rows = MODES[layout][1]
        checked.check_values(extras, (q.shape[rows], k.shape[rows]), out is None and len(rest) == 3)
    result, lse = plan.run(q, k, v, out, extras)
    if plan.bare is not None and extras is NO_EXTRAS and functions == choice == NO_CHOICE:
        call_cache.keep(_PLANS, (q.shape, k.shape, layout, options), (q, k, v), plan.bare)
    return (result, lse) if return_lse else result


def _plan(
    q: Any, k: Any, v: Any, layout: str, options: Any, extras: Extras, functions: Any, rest: Any
) -> attention_plan.Plan:
    """The plan for a call, with the arguments of `run_direct`."""
    causal, window, alignment, scale, softcap = options
    return_lse, out, choice = rest[:3]
    call = describe(
        q, k, v, layout=layout, causal=causal, window=window, alignment=alignment, scale=scale,
        softcap=softcap, score_mod=unwrapped(functions[0]), mask_mod=unwrapped(functions[1]), extras=extras,
    )  # fmt: skip
    if extras.aux and functions == (None, None):
        raise ValueError("aux is given, must be empty without score_mod and mask_mod, whose arguments it is")
    check_out(out, out_shape(call), q.dtype, q.device)
    overlap.check_self_overlap(out)
    target = target_of(q, NAMES[layout][0] if layout in NAMES else "q")
    return attention_plan.build(call, (q, k, v), out, return_lse, target, choice)


def attention_supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, layout: str = "bshd", **options: Any
) -> str | None:
    """Why `attention(q, k, v, **options)` cannot run here; None if it can. Compiles nothing.

    layout: "bshd", "bhsd" (as `scaled_dot_product_attention`), or "thd" with `cu_seqlens_q`, `cu_seqlens_k`,
    `max_seqlen_q` and perhaps `max_seqlen_k` and `seqused_k` (as `attention_varlen`).
    """
    defaults = {"causal": False, "window": None, "alignment": "bottom_right", "scale": None, "softcap": 0.0}
    picked = {name: options.pop(name, default) for name, default in defaults.items()}
    functions = (options.pop("score_mod", None), options.pop("mask_mod", None))
    try:
        one_of("layout", layout, tuple(MODES))
        lengths = _lengths(q, k, layout)
        mask_mod, blocks = of_block_mask(options.pop("blocks", None), functions[1], lengths)
        seqlens = tuple(options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
        max_seqlens = (options.pop("max_seqlen_q", 0), options.pop("max_seqlen_k", None))
        extras = Extras(
            options.pop("mask", None),
            options.pop("sinks", None),
            blocks,
            aux_of(options.pop("aux", ())),
            seqlens if layout == "thd" else None,
            max_seqlens if layout == "thd" else None,
        )
        choice = (options.pop("config", None), options.pop("family", None))
        rest = (boolean("return_lse", options.pop("return_lse", False)), options.pop("out", None), choice)
        if options:
            raise TypeError(f"unknown arguments {sorted(options)}")
        _through_dispatcher(q, k, v, extras)
        if picked["window"] is not None:
            picked["window"] = widths_of(picked["window"])
        _plan(q, k, v, layout, tuple(picked.values()), extras, (functions[0], mask_mod), rest)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return None
