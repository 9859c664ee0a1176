"""Gradients of the SM80-class attention backward in the emulator, which also reports races."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.attention_backward import (
    Sm80BackwardConfig,
    sm80_backward_config,
)
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops.attention.backward import FINISH, FUNCTIONS, PREPARE
from lowering import emulator
from reference.attention import Masking, attention
from reference.inputs import normal
from reference.tolerance import check


class Inputs(NamedTuple):
    """Operands of the forward pass and the gradient of its output: (B, S, H, D), or packed (T, H, D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor


class Packed(NamedTuple):
    """Prefix sums and counted keys of packed sequences, int32."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    used_k: torch.Tensor


class Gradients(NamedTuple):
    """Gradients of q, k, v."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Expected(NamedTuple):
    """References for the kernels, and the forward results that they read."""

    gradients: Gradients
    out: torch.Tensor
    lse: torch.Tensor


def _inputs(
    shape: tuple[int, int, int], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, seed: int
) -> Inputs:
    """Inputs of (batch, queries, keys), (query heads, KV heads) and (D, Dv)."""
    batch, rows, keys = shape
    return Inputs(
        q=normal((batch, rows, heads[0], dims[0]), dtype, seed=seed),
        k=normal((batch, keys, heads[1], dims[0]), dtype, seed=seed + 1),
        v=normal((batch, keys, heads[1], dims[1]), dtype, seed=seed + 2),
        do=normal((batch, rows, heads[0], dims[1]), dtype, seed=seed + 3),
    )


def _expected(inputs: Inputs, masking: Masking, dtype: torch.dtype = torch.float64) -> Expected:
    """By autograd, in float64 or as PyTorch computes in `dtype`."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:3]]
    out, lse = attention(*leaves, masking, dtype=dtype)
    out.backward(inputs.do.to(dtype))
    return Expected(Gradients(*(x.grad for x in leaves)), out.detach(), lse.detach())


def _run(
    inputs: Inputs,
    forward: Expected,
    config: Sm80BackwardConfig,
    variant: AttentionVariant,
    window: tuple[int, int] = (0, 0),
    packed: Packed | None = None,
    longest: tuple[int, int] = (0, 0),
    arch: str = "sm_89",
) -> Gradients:
    """The three kernels. Workspaces and results begin as NaN, rows that none of them writes as 0."""
    q = inputs.q
    rows, heads = q.shape[-3], q.shape[-2]
    if packed is None:
        tiles = q.shape[0] * heads * -(-rows // config.tile_q)
    else:
        tiles = heads * (rows // config.tile_q + len(packed.cu_q) - 1)
    sizes = (tiles * config.tile_q, tiles * config.tile_q, tiles * config.tile_q * config.dim)
    sums = [torch.full((size,), math.nan) for size in sizes]
    turns = torch.full((4 * tiles,), 77, dtype=torch.int32) if config.deterministic else None
    dq, dk, dv = (torch.full_like(x, math.nan if packed is None else 0.0) for x in inputs[:3])
    scale = q.shape[-1] ** -0.5
    cu_q = None if packed is None else packed.cu_q
    common = {"layout": "bshd" if packed is None else "thd", "tile": (config.tile_q, config.dim)}
    out, lse = forward.out.to(q.dtype), forward.lse.float()
    with emulator.run(arch=arch):
        PREPARE(out, inputs.do, lse, None, *sums, turns, cu_q, longest[0], **common)
        numbers, rest = (scale, 0.0, *window), (packed and tuple(packed), longest[1], None, None, None, None)
        FUNCTIONS["sm80"](
            *inputs, dk, dv, *sums, turns, *numbers, *rest, layout=common["layout"], config=config,
            variant=variant,
        )  # fmt: skip
        FINISH(sums[2], None, dq, scale, cu_q, longest[0], order=config.sums, **common)
    return Gradients(dq, dk, dv)


def _check(actual: Gradients, expected: Gradients, peer: Gradients) -> None:
    for name, *values in zip(("dq", "dk", "dv"), actual, expected, peer):
        check(*(x.transpose(-3, -2).flatten(0, -3) for x in values), ulps=4.0, case=name)


def _dense(
    inputs: Inputs, config: Sm80BackwardConfig, variant: AttentionVariant, masking: Masking, **more
) -> Gradients:
    expected = _expected(inputs, masking)
    found = _run(inputs, expected, config, variant, **more)
    _check(found, expected.gradients, _expected(inputs, masking, inputs.q.dtype).gradients)
    return found


def test_grouped_heads_causal_in_order(seed):
    """Two query heads a KV head, two key tiles; more keys than queries. Equal bits in both runs."""
    inputs = _inputs((1, 40, 150), (2, 1), (64, 64), torch.bfloat16, seed)
    config, variant = sm80_backward_config(64, 64, True), AttentionVariant(right=True)
    masking = Masking(right=0)
    first = _dense(inputs, config, variant, masking)
    second = _run(inputs, _expected(inputs, masking), config, variant)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_head_dimensions_that_are_not_tiles(seed):
    """D 72 of 96, Dv 40 of 64, in any order, fp16, two sequences, ragged in both directions."""
    inputs = _inputs((2, 70, 90), (1, 1), (72, 40), torch.float16, seed)
    config = replace(sm80_backward_config(72, 40, False), tile_k=64, do_stages=1)
    _dense(inputs, config, AttentionVariant(), Masking())


def test_window_at_d_128(seed):
    """Two warps for the same keys; one buffer of dO; key tiles that not all queries see."""
    inputs = _inputs((1, 150, 130), (1, 1), (128, 128), torch.bfloat16, seed)
    variant = AttentionVariant(right=True, left=True)
    masking = Masking(left=40, right=10)
    _dense(inputs, sm80_backward_config(128, 128, True), variant, masking, window=(40, 10))


def test_queries_that_see_no_key(seed):
    """More queries than keys with causal alignment at the bottom: zeros. One buffer of everything."""
    inputs = _inputs((1, 200, 90), (1, 1), (32, 32), torch.bfloat16, seed)
    config = Sm80BackwardConfig(64, 32, 32, q_stages=1, do_stages=1, deterministic=False)
    found = _dense(inputs, config, AttentionVariant(right=True), Masking(right=0))
    assert not found.q[:, :110].any()


def test_keys_that_no_query_sees(seed):
    """Causal alignment at the top with more keys than queries; 32 keys a warp; sums added as vectors."""
    inputs = _inputs((1, 70, 200), (1, 1), (64, 64), torch.bfloat16, seed)
    config = Sm80BackwardConfig(128, 64, 64, warp_keys=32, deterministic=False, sums_vector=4)
    variant = AttentionVariant(right=True, top_left=True)
    found = _dense(inputs, config, variant, Masking(right=0, top_left=True), arch="sm_90a")
    assert not found.k[:, 70:].any() and not found.v[:, 70:].any()


def test_packed(seed):
    """Sequences without queries or keys, keys that do not count; NaN after all that counts."""
    lengths_q, lengths_k, used = (70, 0, 33, 20), (90, 20, 40, 0), (80, 5, 40, 0)
    heads, dim = (2, 1), 32
    ends_q, ends_k = ((0, *torch.tensor(x).cumsum(0).tolist()) for x in (lengths_q, lengths_k))
    shape = (1, ends_q[-1] + 9, ends_k[-1] + 9)
    inputs = Inputs(*(x[0] for x in _inputs(shape, heads, (dim, dim), torch.bfloat16, seed)))
    for x, end in zip(inputs, (ends_q[-1], ends_k[-1], ends_k[-1], ends_q[-1])):
        x[end:] = math.nan
    out, lse = torch.zeros(inputs.q.shape, dtype=torch.float64), torch.zeros(heads[0], len(inputs.q)).double()
    expected, peer = (
        Gradients(*(torch.zeros(x.shape, dtype=dtype) for x in inputs[:3]))
        for dtype in (torch.float64, torch.bfloat16)
    )
    for i, count in enumerate(used):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i] + count)
        for x in (inputs.k, inputs.v):
            x[ends_k[i] + count : ends_k[i + 1]] = math.nan
        part = Inputs(inputs.q[rows][None], inputs.k[keys][None], inputs.v[keys][None], inputs.do[rows][None])
        for total, dtype in ((expected, torch.float64), (peer, torch.bfloat16)):
            found = _expected(part, Masking(right=0), dtype)
            for target, place, value in zip(total, (rows, keys, keys), found.gradients):
                target[place] = value[0]
            if dtype == torch.float64:
                out[rows], lse[:, rows] = found.out[0], found.lse[0]
    packed = Packed(*(torch.tensor(x, dtype=torch.int32) for x in (ends_q, ends_k, used)))
    actual = _run(
        inputs, Expected(expected, out, lse), sm80_backward_config(dim, dim, True, packed=True),
        AttentionVariant(right=True), packed=packed, longest=(max(lengths_q), max(lengths_k)),
    )  # fmt: skip
    _check(actual, expected, peer)


@pytest.mark.parametrize(
    ("dim", "arch"),
    [(64, "sm_90a"), (64, "sm_89"), (96, "sm_80"), (128, "sm_90a"), (256, "sm_90a"), (256, "sm_80")],
)
def test_32_keys_a_warp(dim, arch, seed):
    """Two query heads a KV head, key tiles of which the last is cut, several steps each: causal in order,
    which has equal bits in both runs, and full in any order."""
    for deterministic, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        right = None if not deterministic else 0
        variant, masking = AttentionVariant(right=deterministic), Masking(right=right)
        config = sm80_backward_config(dim, dim, deterministic, DEVICES_BY_ARCH[arch].smem_bytes)
        assert config.warp_keys == 32
        keys = 2 * config.tile_k + 13 if dim == 64 else config.tile_k + 13
        inputs = _inputs((1, 150, keys), (2, 1), (dim, dim), dtype, seed)
        found = _dense(inputs, config, variant, masking, arch=arch)
        if deterministic:
            again = _run(inputs, _expected(inputs, masking), config, variant, arch=arch)
            assert all(torch.equal(a, b) for a, b in zip(found, again))


def test_32_keys_a_warp_in_a_window(seed):
    """Odd lengths, key tiles that not all queries see."""
    config = sm80_backward_config(64, 64, True, DEVICES_BY_ARCH["sm_90a"].smem_bytes)
    inputs = _inputs((1, 150, 130), (1, 1), (64, 64), torch.bfloat16, seed)
    variant = AttentionVariant(right=True, left=True)
    _dense(inputs, config, variant, Masking(left=40, right=10), window=(40, 10), arch="sm_90a")
