"""This attention in the continuous batching of transformers (the extra `hf`), on its cache of pages.

    name = kernels_dsl.register_transformers_paged_attention()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=name)
    model.generate_batch(prompts, max_new_tokens=100)

Batches that only decode run `append_kv` and `attention_decode` on the pages themselves. Those that read
prompts run `attention_varlen` on keys that transformers has gathered.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, NamedTuple

import torch

from kernels_dsl.checks.options import text
from kernels_dsl.integrations.transformers_attention import attention_forward, attention_mask_of
from kernels_dsl.ops.attention.attention import attention_varlen
from kernels_dsl.ops.serving.append_kv import append_kv
from kernels_dsl.ops.serving.decode import attention_decode

_NAMES: set[str] = set()
"""Implementations that were registered."""


class Pages(NamedTuple):
    """Caches (pages, keys of a page, Hk, D) of keys and of values, and the pages of each sequence."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor


def register_transformers_paged_attention(name: str = "kernels_dsl_flash_2") -> str:
    """Make `attn_implementation=name` known to transformers and to its continuous batching. Returns `name`.

    name: has "flash" in it and later a 2 or a 3, by which transformers tells which implementations need no
    mask, and which can write to its pages.

    Beside the public registries this wraps one private function of transformers, by which continuous batching
    looks up the functions of flash-attn: for `name` they are those of `kernels_dsl.flash_attn`.

    ImportError where transformers is not installed, or its continuous batching is not as that of 5.24.
    """
    text("name", name)
    if re.search("flash.*[23]", name) is None:
        raise ValueError(
            f"name is {name!r}, must have 'flash' in it and then 2 or 3, as in kernels_dsl_flash_2"
        )
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers import modeling_flash_attention_utils as utils
        from transformers.generation.continuous_batching import PagedAttentionCache
    except ImportError as error:
        raise ImportError(
            "transformers with continuous batching is not installed, must be 5.24 or later: kernels-dsl[hf]"
        ) from error
    look_up = getattr(utils, "_lazy_imports", None)
    update = inspect.signature(PagedAttentionCache.update).parameters
    if look_up is None or "kwargs" not in update:
        raise ImportError(
            f"transformers is {transformers.__version__}, whose continuous batching calls attention in "
            "another way, must be as 5.24"
        )
    if not hasattr(look_up, "kernels_dsl"):
        utils._lazy_imports = _with_ours(look_up, utils)
    _NAMES.add(name)
    AttentionInterface.register(name, paged_attention_forward)
    AttentionMaskInterface.register(name, attention_mask_of)
    return name


def _with_ours(look_up: Any, utils: Any) -> Any:
    """`look_up`, and for implementations of ours the functions of `kernels_dsl.flash_attn`."""
    from kernels_dsl import flash_attn

    @functools.wraps(look_up)
    def lazy_imports(implementation: str | None, attention_wrapper: Any = None, **options: Any) -> Any:
        if implementation not in _NAMES:
            return look_up(implementation, attention_wrapper, **options)
        functions = (
            flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache
        )  # fmt: skip
        return (*functions, utils._pad_input, utils._unpad_input)

    lazy_imports.kernels_dsl = True  # type: ignore[attr-defined]
    return lazy_imports


def paged_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    block_table: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that a layer calls: as that of `register_transformers_attention`, and in two more forms.

    With `cu_seq_lens_q` and `cu_seq_lens_k`: packed sequences, query (1, H, Tq, D), key and value
    (1, Hk, Tk, D), cumulative lengths int32 (sequences + 1,); rows past the last sequence are not written.

    With `block_table` too: one query a sequence, query (1, H, sequences, D), and its own key and value, which
    are written to `k_cache` and `v_cache` (pages, keys of a page, Hk, D) first. Sequences without keys are
    padding.

    Gives (1, Tq, H, D). ValueError for dropout and a position bias, and for a mask beside packed sequences.
    """
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is not None:
        raise ValueError("attention_mask is given beside cu_seq_lens_q, must be None: lengths say it all")
    if options.get("dropout"):
        raise ValueError(f"dropout is {options['dropout']}, must be 0: call model.eval()")
    if options.get("position_bias") is not None:
        raise ValueError("position_bias is given, must be None")
    is_causal, window = options.get("is_causal"), None
    causal = bool(module.is_causal if is_causal is None else is_causal)
    if options.get("sliding_window") is not None:
        width = options["sliding_window"] - 1
        window = (width, None if causal else width)
    rules: dict[str, Any] = {
        "causal": causal, "window": window, "scale": options.get("scaling"),
        "softcap": options.get("softcap") or 0.0, "sinks": options.get("s_aux"),
    }  # fmt: skip
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if block_table is None or k_cache is None or v_cache is None:
        if max_length_q is None:
            raise ValueError("max_length_q is None, must be given beside cu_seq_lens_q")
        out: Any = attention_varlen(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, **rules)
        return out[None], None
    pages = _apart(k_cache, v_cache, block_table)
    used, size = cu_seq_lens_k.diff(), k_cache.shape[1]
    last = (used - 1).clamp(min=0)
    page = pages.table.gather(1, (last // size)[:, None].long())[:, 0]
    slots = torch.where(used > 0, page.long() * size + last % size, -1)
    append_kv(k, v, pages.k, pages.v, slots)
    out = attention_decode(
        q[:, None], pages.k, pages.v, seqused_k=used, block_table=pages.table, **rules
    )  # fmt: skip
    return out.transpose(0, 1), None


def _apart(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> Pages:
    """The same pages in caches without a common element.

    In transformers' cache pages of keys and of values take turns. Both tensors have all of them, those of
    values begin a page later, and the table names every other one at most.
    """
    if v.data_ptr() - k.data_ptr() == k.stride(0) * k.element_size():
        return Pages(k[::2], v[::2], table // 2)
    return Pages(k, v, table)
