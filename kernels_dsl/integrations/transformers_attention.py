"""This attention in Hugging Face transformers (the extra `hf`), by its `AttentionInterface`.

    name = kernels_dsl.register_transformers_attention()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=name)

Causal masks and sliding windows are no tensors here: only padding, packed sequences and other patterns make
transformers build a boolean mask, which costs memory that grows with the square of the length.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.checks.options import text
from kernels_dsl.ops.attention.attention import attention


def register_transformers_attention(name: str = "kernels_dsl") -> str:
    """Make `attn_implementation=name` known to transformers, and its masks. Returns `name`.

    ImportError where transformers 5 is not installed.
    """
    text("name", name)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("transformers is not installed, must be 5 or later: kernels-dsl[hf]") from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask_of)
    return name


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that a layer of a model calls. query (B, H, Sq, D), key and value (B, Hk, Sk, D); gives
    (B, Sq, H, D).

    attention_mask: None (causal to the bottom right where the layer is, with its window), or as
    `kernels_dsl.attention` takes it, everything included. sliding_window: keys that a query sees, itself
    included. s_aux: attention sinks, (H,). deterministic: as in `kernels_dsl.attention`. ValueError for
    dropout, a position bias or a paged cache.
    """
    if dropout:
        raise ValueError(f"dropout is {dropout}, must be 0: call model.eval(), or set attention_dropout to 0")
    for name in ("position_bias", "cache"):
        if others.get(name) is not None:
            raise ValueError(f"{name} is given, must be None")
    causal, window = False, None
    if attention_mask is None:
        causal = bool(module.is_causal if is_causal is None else is_causal)
        if sliding_window is not None:
            window = (sliding_window - 1, None if causal else sliding_window - 1)
    else:
        attention_mask = attention_mask[..., : key.shape[2]]
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal, window=window,
        mask=attention_mask, scale=scaling, softcap=softcap or 0.0, sinks=s_aux,
        deterministic=deterministic,
    )  # fmt: skip
    return out, None


def attention_mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """The mask of a forward pass: None where `attention_forward` needs none, else booleans (B, 1, Sq, Sk).

    Arguments as of transformers' own functions of this kind, which makes the tensor.
    """
    from transformers.masking_utils import sdpa_mask

    plain = _all_ones(attention_mask, kv_length, kv_offset)
    if plain and allow_is_bidirectional_skip and local_size is None:
        return None
    if plain and allow_is_causal_skip and _ends_at_last_query((q_offset, q_length), (kv_offset, kv_length)):
        config = others.get("config")
        window, chunk = (getattr(config, f, None) for f in ("sliding_window", "attention_chunk_size"))
        if local_size is None or kv_length < local_size or local_size == window != chunk:
            return None
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **others,
    )  # fmt: skip


def _all_ones(mask: torch.Tensor | None, kv_length: int, kv_offset: int) -> bool:
    """Nothing is padding. Reads the mask, as transformers does, but for traces by torch.compile."""
    if mask is None:
        return True
    if torch.compiler.is_compiling() or mask.shape[-1] < kv_offset + kv_length:
        return False
    return bool(mask[:, kv_offset : kv_offset + kv_length].all())


def _ends_at_last_query(queries: tuple[Any, int], keys: tuple[Any, int]) -> bool:
    """The last key is that of the last query; (offset, length) of each. Static caches have tensors."""
    if isinstance(queries[0], torch.Tensor) or isinstance(keys[0], torch.Tensor):
        return False
    return sum(queries) == sum(keys)
