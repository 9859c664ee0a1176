"""Helpers of the tests of fp8 attention: quantised inputs, references, the tolerance."""

from __future__ import annotations

import torch

import kernels_dsl
from kernels_dsl.config.attention import AttentionVariant, Extent, Sm90AttentionConfig, sm90_fp8_config
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig, sm80_config
from kernels_dsl.config.problem import DEVICES_BY_ARCH, H200, L40S
from lowering.function import emulated_arch
from reference import quantize as ref
from reference.attention import Masking, attention, attention_fp8_weights
from reference.attention_watched import Walk, attention_fp8_watched
from reference.buffers import check_output, poisoned
from reference.inputs import normal
from reference.tolerance import check, measure

LSE_TOLERANCE = 5e-3
"""Absolute: QGMMA keeps 13 bits below the leading one of its largest product."""


def quantised(shape: tuple[int, int, int, int], seed: int, device: str = "cpu"):
    """(fp8 values (B, S, H, D), scales (B, H), float64 values) of N(0, 1), a scale a head."""
    x = normal(shape, torch.bfloat16, seed=seed, device=device).transpose(1, 2)
    values, scale = ref.quantize(x, scaling="matrix")
    exact = ref.dequantize(values, scale, "matrix").transpose(1, 2)
    return values.transpose(1, 2), scale[..., 0, 0], exact


def quantised_blocks(shape: tuple[int, int, int, int], seed: int, device: str = "cpu"):
    """As `quantised`, with a scale for every 128 rows, (B, H, blocks), of data whose size changes from block
    to block, by up to 2^8."""
    x = normal(shape, torch.float32, seed=seed, device=device).transpose(1, 2)
    block = torch.arange(shape[1], device=device) // 128
    x = (x * 2.0 ** -(5 * block % 9)[:, None]).bfloat16()
    values, scale = ref.quantize(x, scaling="128x128")
    exact = ref.dequantize(values, scale, "128x128").transpose(1, 2)
    return values.transpose(1, 2), scale[..., 0], exact


def run(shapes: tuple, seed: int, masking: Masking, device: str = "cpu", **options) -> torch.Tensor:
    """Call `kernels_dsl.attention_fp8` with `options`, which must mean `masking`, and compare; the output.

    shapes: of q, k, v, (B, S, H, D). by_block: which of "kv" have a scale for every 128 keys. lse: whether
    it is asked for, which has all exponentials exact.
    """
    by_block, with_lse = options.pop("by_block", ()), options.pop("lse", True)
    parts = []
    for i, (name, shape) in enumerate(zip("qkv", shapes)):
        parts.append((quantised_blocks if name in by_block else quantised)(shape, seed + i, device))
    names = ("q_descale", "k_descale", "v_descale")
    found = kernels_dsl.attention_fp8(
        *(part[0] for part in parts),
        **dict(zip(names, (part[1] for part in parts))),
        return_lse=with_lse,
        **options,
    )
    out, lse = found if with_lse else (found, None)
    exact = [part[2] for part in parts]
    maxima = bool(by_block) or not options.keys().isdisjoint(("sinks", "blocks"))
    config = options.get("config") or chosen(shapes, masking, device)
    walk = None if maxima else walk_of(config, with_lse, causal=is_causal(masking))
    compare((out, lse), exact, masking, options.get("scale"), walk)
    return out


def chosen(shapes: tuple, masking: Masking, device: str):
    """The configuration that a call without one gets, where it has no factors of blocks, lists and sinks;
    None for the SM80-class kernel.

    shapes: of q, k, v, (B, S, H, D); of packed ones the length of the longest and of all.
    """
    variant = AttentionVariant(
        right=masking.right is not None, left=masking.left is not None, softcap=masking.softcap != 0.0
    )
    sms = H200.sm_count
    if device != "cpu":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    elif not DEVICES_BY_ARCH[emulated_arch() or "sm_90a"].has_wgmma:
        return None
    (batch, q_len, heads, dim), (_, k_len, _, _), (*_, dim_v) = shapes
    return sm90_fp8_config(dim, dim_v, variant, Extent(q_len, k_len, batch * heads, sms))


def sm80_tile(dim: int, dim_v: int, **variant: bool) -> Sm80AttentionConfig:
    """The tile of Ada, for a Hopper GPU that is to run the SM80-class kernel."""
    return sm80_config(dim, dim_v, AttentionVariant(**variant), L40S.smem_bytes, element_bytes=1)


def is_causal(masking: Masking) -> bool:
    """True for a mask with a right edge alone."""
    return masking.right is not None and masking.left is None


def walk_of(config, exact: bool, rising: bool = True, causal: bool = False) -> Walk | None:
    """The order in which a configuration visits keys where it watches sums; None where it keeps maxima.

    `causal`: the mask of a dense batch has a right edge and no left one; some tiles visit that edge last.
    """
    if not isinstance(config, Sm90AttentionConfig) or not config.watch_sums:
        return None
    last = causal and config.tile_m == 192 and config.dim_v == 128
    return Walk(config.tile_m, config.tile_n, 0 if exact else config.linear_exps, rising, last)


def packed(lengths: tuple[int, ...], gap: int, heads: int, dim: int, seed: int, device: str) -> tuple:
    """(fp8 values (T, H, D), scales (sequences, H), float64 values of each sequence, prefix sums): `gap` rows
    of NaN lie behind each sequence."""
    ends = torch.tensor([0, *(n + gap for n in lengths)]).cumsum(0)
    values = torch.full((int(ends[-1]), heads, dim), torch.nan, device=device).to(torch.float8_e4m3fn)
    scales, exact = torch.ones(len(lengths), heads, device=device), []
    for n, length in enumerate(lengths):
        exact.append(torch.zeros(1, 0, heads, dim, dtype=torch.float64, device=device))
        if length:
            part, scale, exact[n] = quantised((1, length, heads, dim), seed + n, device)
            values.view(torch.uint8)[int(ends[n]) : int(ends[n]) + length] = part[0].view(torch.uint8)
            scales[n] = scale[0]
    return values, scales, exact, ends.int().to(device)


def run_packed(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...], gap: int, seed: int, device: str = "cpu", **options
) -> None:
    """Call `kernels_dsl.attention_fp8_varlen` and compare each sequence; memory around the output stays.

    options: heads, dim, causal; the others are passed on, with `maskings`, what they mean for each sequence.
    """
    heads, dim, causal = options.pop("heads", (2, 1)), options.pop("dim", 64), options.pop("causal", False)
    maskings = options.pop("maskings", [Masking(right=0 if causal else None)] * len(q_lens))
    q = packed(q_lens, 0, heads[0], dim, seed, device)
    k, v = (packed(k_lens, gap, heads[1], dim, seed + 50 * i, device) for i in (1, 2))
    written = poisoned((sum(q_lens), heads[0], dim), torch.bfloat16, device=device, pad=8)
    out, lse = kernels_dsl.attention_fp8_varlen(
        q[0], k[0], v[0], q[3], k[3], max(q_lens), causal=causal, return_lse=True, q_descale=q[1],
        k_descale=k[1], v_descale=v[1], seqused_k=torch.tensor(k_lens).int().to(device) if gap else None,
        out=written.tensor, **options,
    )  # fmt: skip
    assert out is written.tensor
    check_output(written)
    batch, keys = len(q_lens), (len(q_lens), len(k[0]), heads[1], dim)
    config = options.get("config")
    config = config or chosen(((batch, max(q_lens), heads[0], dim), keys, keys), maskings[0], device)
    maxima = not options.keys().isdisjoint(("sinks", "blocks"))
    walk = None if maxima else walk_of(config, True, rising=False)
    for n, length in enumerate(q_lens):
        if length:
            rows = slice(int(q[3][n]), int(q[3][n]) + length)
            found = out[None, rows], lse[None, :, rows]
            compare(found, [x[2][n] for x in (q, k, v)], maskings[n], walk=walk)


def compare(
    found: tuple[torch.Tensor, torch.Tensor | None],
    exact: list,
    masking: Masking,
    scale: float | None = None,
    walk: Walk | None = None,
) -> None:
    """Output and log-sum-exp against float64 on `exact`: the q, k, v (B, S, H, D) that fp8 values are.

    The root mean square of the error is at most twice that of weights rounded once, against the row's
    maximum, which is then exact. The largest of a tile is held to as much, or where there is a `walk`, to
    twice that of weights that are rounded as a kernel without maxima must.
    """
    out, lse = found
    expected, expected_lse = attention(*exact, masking, scale=scale)
    once = attention_fp8_weights(*exact, masking, scale=scale).bfloat16()
    peer = once
    if walk is not None:
        peer = attention_fp8_watched(*exact, masking, walk, scale=scale).bfloat16()
    assert out.dtype == torch.bfloat16
    check(*(x.transpose(1, 2) for x in (out, expected, peer)), ulps=4.0)
    report = measure(*(x.transpose(1, 2) for x in (out, expected, once)), ulps=4.0)
    assert report.rms <= report.rms_bound, report
    if lse is None:
        return
    same = lse.double() == expected_lse  # -inf among them
    assert bool((same | ((lse - expected_lse).abs() < LSE_TOLERANCE)).all())
