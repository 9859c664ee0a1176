"""The attention backward with masks and score functions as compiled, without a GPU: no spills.

A choice of the variants; TEST_ALL_KERNELS=1 takes all of them.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_backward import sm80_backward_config, sm90_backward_config
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.attention.backward import FUNCTIONS


def _same_document(b, h, i, j, documents):
    return documents[i] == documents[j]


def _alibi(score, b, h, i, j, slopes):
    return score + (i - j) * slopes[h]


def _unchanged(gradient, score, b, h, i, j, slopes):
    return gradient


WINDOW = AttentionVariant(right=True, left=True)
FUNCTION = replace(WINDOW, score_mod=_alibi, score_mod_bwd=_unchanged)
VARIANTS = {
    "softcap": replace(WINDOW, softcap=True),
    "boolean": replace(WINDOW, mask="boolean"),
    "additive": replace(WINDOW, mask="additive"),
    "mask_mod": replace(WINDOW, mask_mod=_same_document),
    "score_mod": FUNCTION,
    "all": replace(FUNCTION, softcap=True, mask="additive"),
    "lists": replace(WINDOW, lists=(1, 1)),
    "lists_function": replace(WINDOW, mask_mod=_same_document, lists=(1, 2)),
    "lists_all": replace(FUNCTION, softcap=True, mask="additive", lists=(1, 1)),
}
FEW = [
    ("sm_90a", (128, 128), "additive"),
    ("sm_90a", (128, 128), "all"),
    ("sm_90a", (128, 64), "softcap"),
    ("sm_80", (128, 128), "additive"),
    ("sm_86", (128, 128), "all"),
    ("sm_86", (64, 64), "mask_mod"),
    ("sm_90a", (128, 128), "lists_function"),
    ("sm_86", (128, 128), "lists"),
    ("sm_90a", (256, 256), "lists_all"),
    ("sm_89", (192, 128), "boolean"),
    ("sm_89", (256, 256), "lists_all"),
]
CASES = (
    [
        (arch, dims, name)
        for arch in ("sm_80", "sm_86", "sm_89", "sm_90a")
        for dims in ((32, 32), (64, 64), (96, 96), (128, 128), (128, 64), (64, 128), (192, 128), (256, 256))
        for name in VARIANTS
    ]
    if os.environ.get("TEST_ALL_KERNELS") == "1"
    else FEW
)

# With roles of the warpgroups the one that has dP lacks P where scores are bent.
WITH_GRADIENT = [
    (arch, dims, name)
    for arch, dims, name in CASES
    if VARIANTS[name].mask == "additive"
    and not (arch == "sm_90a" and max(dims) > 64 and VARIANTS[name].bends_scores)
]
if CASES is FEW:
    WITH_GRADIENT = [
        ("sm_90a", (128, 128), "additive"),
        ("sm_90a", (64, 64), "lists_all"),
        ("sm_89", (64, 64), "all"),
        ("sm_86", (128, 128), "additive"),
    ]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("arch", "dims", "name"), CASES)
def test_no_spills(arch, dims, name):
    for many_tiles in _walks(arch, dims):
        _check(arch, dims, VARIANTS[name], False, many_tiles)


@pytest.mark.parametrize(("arch", "dims", "name"), WITH_GRADIENT)
def test_no_spills_with_the_gradient_of_the_mask(arch, dims, name):
    for many_tiles in _walks(arch, dims):
        _check(arch, dims, VARIANTS[name], True, many_tiles)


def _walks(arch: str, dims: tuple[int, int]) -> list[bool]:
    """Values of `many_tiles` that are compiled."""
    return [True, False] if arch == "sm_90a" and max(dims) <= 128 else [False]


def _check(
    arch: str, dims: tuple[int, int], variant: AttentionVariant, gradient: bool, many_tiles: bool
) -> None:
    """Compiles packed and in order, which take the most registers."""
    family = "sm90" if arch == "sm_90a" else "sm80"
    if family == "sm90":
        config = sm90_backward_config(*dims, True, d_mask=gradient, computes_scores=variant.computes_scores)
        config = replace(config, many_tiles=many_tiles)
    else:
        config = sm80_backward_config(*dims, True, DEVICES_BY_ARCH[arch].smem_bytes, True, d_mask=gradient)
    heads = ((4, dims[0]), (2, dims[0]), (2, dims[1]), (4, dims[1]), (2, dims[0]), (2, dims[1]))
    tensors = [_empty(512, *shape, dtype=torch.bfloat16) for shape in heads]
    sums = (_empty(4096), _empty(4096), _empty(4096 * config.dim), _empty(64, dtype=torch.int32))
    seqlens = (_empty(3, dtype=torch.int32), _empty(3, dtype=torch.int32), None)
    mask = None
    if variant.mask is not None:
        mask = _empty(2, 4, 256, 256, dtype=torch.uint8 if variant.mask == "boolean" else torch.float32)
    aux = None
    if variant.mask_mod is not None or variant.score_mod is not None:
        aux = (_empty(300),)
    lists = None
    if variant.lists is not None:
        lists = (_empty(2, 2, 5, dtype=torch.int32), _empty(2, 2, 64, 4, dtype=torch.int32))
    rest = (seqlens, 256, mask, aux, lists, mask if gradient else None)
    if family == "sm90":
        rest += (_empty(1, dtype=torch.int32) if many_tiles else None, 132, None)
    kernel = FUNCTIONS[family].compile(
        *tensors, *sums, *(1.0, 1.0, 0, 0), *rest, arch=arch, layout="thd", config=config, variant=variant,
    )  # fmt: skip
    (found,) = kernel.resources()
    if arch == "sm_90a" and dims == (256, 256) and variant == VARIANTS["softcap"]:
        # One number, read again once in a step of 64 queries: cheaper than a division of each score.
        assert found.spill_loads == found.spill_stores == 1
    else:
        assert found.stack_bytes == found.spill_loads == found.spill_stores == 0
    products = sum(n for kind, n in found.instructions.items() if kind.startswith("HGMMA"))
    # A compiler that cannot keep products in flight puts an arrive and a wait around each of them.
    assert family == "sm80" or found.instructions["WARPGROUP.ARRIVE"] < products / 2
