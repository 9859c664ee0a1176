"""PyTorch's own descriptions of masks, in the terms of `attention`: `BlockMask` and `CausalBias`."""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.sparse.block_lists import BlockLists, from_block_mask

MaskFunction = Callable[..., Any]
_FLEX = "torch.nn.attention.flex_attention"
_COMBINED = {
    "and_masks.<locals>.and_mask": operator.and_,
    "or_masks.<locals>.or_mask": operator.or_,
}
"""PyTorch's functions that make masks of masks: they make tensors, so no kernel can trace them."""
_TRACED: weakref.WeakKeyDictionary[MaskFunction, MaskFunction] = weakref.WeakKeyDictionary()


def of_block_mask(
    blocks: Any, mask_mod: MaskFunction | None, lengths: tuple[int, int] | None
) -> tuple[MaskFunction | None, BlockLists | None]:
    """(mask_mod, lists) where `blocks` may be torch's `BlockMask`.

    It must be made for `lengths` (Sq, Sk), where these are known. A `mask_mod` of the call takes the place of
    its own.
    """
    if blocks is None or isinstance(blocks, BlockLists):
        return mask_mod, blocks
    if not hasattr(blocks, "kv_num_blocks"):
        raise TypeError(f"blocks is a {type(blocks).__name__}, must be BlockLists or a torch BlockMask")
    made_for = getattr(blocks, "seq_lengths", None)
    if lengths is not None and made_for is not None and tuple(made_for) != lengths:
        raise ValueError(f"blocks is a BlockMask for (Sq, Sk) = {tuple(made_for)}, must be for {lengths}")
    if mask_mod is None:  # torch.compile cannot follow `traceable`, and knows functions by their names
        compiling = torch.compiler.is_compiling()
        mask_mod = blocks.mask_mod if compiling else traceable(blocks.mask_mod)
    return mask_mod, from_block_mask(blocks)


def traceable(mask_mod: MaskFunction | None) -> MaskFunction | None:
    """`mask_mod` in a form that kernels can trace: torch's `noop_mask` as None, what its `and_masks` and
    `or_masks` make written out, any other function as it is."""
    if mask_mod is None or getattr(mask_mod, "__module__", None) != _FLEX:
        return mask_mod
    if mask_mod.__qualname__ == "noop_mask":
        return None
    combine = _COMBINED.get(mask_mod.__qualname__)
    if combine is None:
        return mask_mod
    known = _TRACED.get(mask_mod)
    if known is None:
        parts = inspect.getclosurevars(mask_mod).nonlocals["mask_mods"]
        known = _combination(combine, tuple(map(traceable, parts)))
        _TRACED[mask_mod] = known
    return known


def _combination(combine: Callable[..., Any], parts: tuple[MaskFunction | None, ...]) -> MaskFunction:
    """A mask function that is `combine` (and, or) of those of `parts`; None is one that hides nothing."""

    def mask(b: Any, h: Any, i: Any, j: Any, *aux: Any) -> Any:
        everything = j >= 0
        return functools.reduce(
            combine, [everything if part is None else part(b, h, i, j, *aux) for part in parts]
        )

    return mask


def causal_alignment(mask: Any, lengths: tuple[int, int]) -> str | None:
    """The alignment of the causal mask that a torch `CausalBias` stands for; None where `mask` is none.

    ValueError where it was made for other lengths (Sq, Sk).
    """
    variant = getattr(mask, "variant", None)
    if variant is None or not hasattr(mask, "seq_len_kv"):
        return None
    made_for = (mask.seq_len_q, mask.seq_len_kv)
    if made_for != lengths:
        raise ValueError(f"attn_mask is a CausalBias for (L, S) = {made_for}, must be for {lengths}")
    return "bottom_right" if variant.name == "LOWER_RIGHT" else "top_left"
