"""Helpers of the attention tests: random calls, their reference, the tolerance."""

from __future__ import annotations

import random

import torch

import kernels_dsl
from kernels_dsl.sparse.attention_blocks import topk_blocks
from kernels_dsl.sparse.block_lists import BlockLists
from reference.attention import Masking, allowed_by_lists, attention
from reference.inputs import case_seed, normal
from reference.tolerance import check

LSE_TOLERANCE = 1e-3
"""Absolute, natural logarithms: scores are float32 sums, the exponentials the hardware's."""


def inputs(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dim_v: int,
    seed: int,
    dtype=torch.bfloat16,
    device="cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of `q_shape`, k of `k_shape`, v like k with another head dimension; (…, D)."""
    shapes = (q_shape, k_shape, (*k_shape[:-1], dim_v))
    q, k, v = (normal(shape, dtype, seed=seed + i, device=device) for i, shape in enumerate(shapes))
    return q, k, v


def check_close(
    found: tuple[torch.Tensor, torch.Tensor],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    masking: Masking,
    scale: float | None = None,
) -> None:
    """Output and log-sum-exp of `found` against float64; all (B, S, H, D)."""
    expected, lse = attention(*tensors, masking, scale=scale)
    peer, _ = attention(*tensors, masking, scale=scale, dtype=tensors[0].dtype)
    check(*(x.transpose(1, 2) for x in (found[0], expected, peer)), ulps=4.0)
    same = found[1].double() == lse  # -inf among them
    assert bool((same | ((found[1] - lse).abs() < LSE_TOLERANCE)).all())


def run(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], masking: Masking, **options) -> None:
    """Call `kernels_dsl.attention` with `options`, which must mean `masking`, and compare."""
    found = kernels_dsl.attention(*tensors, return_lse=True, **options)
    check_close(found, tensors, masking, options.get("scale"))


def packed_cases(count: int, lengths: tuple[int, ...]) -> list[dict]:
    """Calls of packed sequences drawn at random, all of it from one seed; `lengths` to choose from."""
    draw = random.Random(case_seed("packed attention"))
    cases = []
    for _ in range(count):
        hk, sequences = draw.choice([1, 2]), draw.randint(1, 6)
        k_lens = [draw.choice(lengths) for _ in range(sequences)]
        cases.append(
            {
                "heads": (hk * draw.choice([1, 2, 4]), hk),
                "q_lens": [draw.choice(lengths) for _ in range(sequences)],
                "k_lens": k_lens,
                "used": draw.choice([None, [draw.randint(0, n) for n in k_lens]]),
                "dims": (draw.choice([64, 128, 72]), draw.choice([64, 128, 40])),
                "window": (draw.choice([None, 0, 17, 300]), draw.choice([None, 0, 0, 5])),
                "alignment": draw.choice(["bottom_right", "top_left"]),
                "softcap": draw.choice([0.0, 0.0, 3.0]),
                "sinks": draw.random() < 0.3,
                "mask": draw.choice([None, None, "boolean", "additive"]),
                "lists": draw.random() < 0.3,
                "dtype": draw.choice([torch.bfloat16, torch.float16]),
            }
        )
    return cases


def run_packed(case: dict, seed: int, device: str, family: str) -> None:
    """One call on all sequences, NaN in the keys that do not count, against a reference a sequence."""
    generator = torch.Generator().manual_seed(seed)
    (h, hk), (dim, dim_v), block = case["heads"], case["dims"], (128, 128)
    q_lens, k_lens, counted = case["q_lens"], case["k_lens"], case["used"] or case["k_lens"]
    most_q, most_k = max(*q_lens, 1), max(*k_lens, 1)
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, k_lens)]
    q, k, v = inputs((sum(q_lens), h, dim), (sum(k_lens), hk, dim), dim_v, seed, case["dtype"], device)
    for n, count in enumerate(counted):
        for x in (k, v):
            x[int(starts[1][n]) + count : int(starts[1][n + 1])] = torch.nan
    mask = lists = None
    if case["mask"] is not None:
        mask = torch.randn((len(q_lens), 1, most_q, most_k), generator=generator).to(device)
        mask = mask < 1 if case["mask"] == "boolean" else mask
    if case["lists"]:
        scores = torch.randn(
            (1, h, *(-(-n // b) for n, b in zip((most_q, most_k), block))), generator=generator
        )
        lists = topk_blocks(scores, 2, causal=True, q_len=1 << 20, k_len=1 << 21)
    sinks = torch.randn(h, generator=generator).to(device) if case["sinks"] else None
    on_device = None if lists is None else BlockLists(lists.counts.to(device), lists.indices.to(device))
    out, lse = kernels_dsl.attention_varlen(
        q, k, v, *(s.to(device) for s in starts), most_q, most_k, window=case["window"],
        alignment=case["alignment"], softcap=case["softcap"], mask=mask, sinks=sinks, blocks=on_device,
        seqused_k=None if case["used"] is None else torch.tensor(case["used"]).int().to(device),
        return_lse=True, family=family,
    )  # fmt: skip
    for n, (q_len, count) in enumerate(zip(q_lens, counted)):
        if q_len == 0:
            continue
        rows = slice(int(starts[0][n]), int(starts[0][n]) + q_len)
        keys = slice(int(starts[1][n]), int(starts[1][n]) + count)
        allowed = bias = None
        if lists is not None:
            reach = (1, h, q_len, -(-most_k // block[1]) * block[1])
            allowed = allowed_by_lists(lists.tensors, block, reach)[..., :count].to(device)
        if mask is not None:
            part = mask[n : n + 1, :, :q_len, :count]
            if case["mask"] == "additive":
                bias = part
            else:
                allowed = part if allowed is None else allowed & part
        left, right = case["window"]
        masking = Masking(left, right, case["alignment"] == "top_left", case["softcap"], allowed, bias, sinks)
        tensors = (q[None, rows], k[None, keys], v[None, keys])
        check_close((out[None, rows], lse[None, :, rows]), tensors, masking)
