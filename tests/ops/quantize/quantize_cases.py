"""Helpers of the tests of `quantize`: calls against the reference, bit for bit."""

from __future__ import annotations

import torch

import kernels_dsl
from reference import quantize as ref


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal shapes, dtypes and bits."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    if found.element_size() == 4:
        assert torch.equal(found.cpu(), expected.cpu()), what
        return
    bits, wanted = (t.contiguous().cpu().view(torch.uint8) for t in (found, expected))
    wrong = (bits != wanted).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise AssertionError(f"{what}: {len(wrong)} wrong, first {first}: {bits[first]} not {wanted[first]}")


def check(x: torch.Tensor, dtype=torch.float8_e4m3fn, *, scaling: str, transpose=False, scale=None) -> None:
    """`kernels_dsl.quantize` against the definition, and what is promised about layouts."""
    found = kernels_dsl.quantize(x, dtype, scaling=scaling, transpose=transpose, scale=scale)
    inputs = [x] * (transpose is not True) + ([x.mT] if transpose else [])
    assert len(found) == 2 * len(inputs)
    for n, source in enumerate(inputs):
        values, scales = found[2 * n : 2 * n + 2]
        expected = ref.quantize(source, dtype, scaling=scaling, scale=scale)
        what = f"{tuple(x.shape)} {scaling} transpose={transpose} output {n}"
        assert_same(scales, expected[1], what + ", scales")
        assert_same(values, expected[0], what + ", values")
        assert values.stride(-1) == 1 or values.shape[-1] <= 1
        if values.dim() > 1:
            assert values.numel() == 0 or values.stride(-2) % 16 == 0
        if scaling == "1x128" and scales.dim() > 1 and scales.numel():
            assert scales.stride(-2) == 1 and scales.stride(-1) == scales.shape[-2]


def check_into(x: torch.Tensor, dtype=torch.float8_e4m3fn, **arguments) -> tuple[torch.Tensor, ...]:
    """`out=`: poisoned results are written with the same bits and returned. The results."""
    expected = kernels_dsl.quantize(x, dtype, **arguments)
    out = tuple(t if t is arguments.get("scale") else _poisoned(t) for t in expected)
    if arguments.get("scaling", "tensor") == "tensor" and len(out) == 4:
        out = (*out[:3], out[1])
    found = kernels_dsl.quantize(x, dtype, **arguments, out=out)
    assert found is out
    for n, (a, b) in enumerate(zip(out, expected)):
        assert_same(a, b, f"{tuple(x.shape)} {arguments} out[{n}]")
    return out


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout, rows of padding too, of NaN."""
    rows = like.stride(-2) if like.dim() > 1 and like.element_size() == 1 else 0
    size = max(like.untyped_storage().nbytes() // like.element_size(), rows)
    base = torch.full((size,), torch.nan, dtype=torch.float32, device=like.device).to(like.dtype)
    return base.as_strided(like.shape, like.stride())


def awkward(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values with outliers, zeros, a group of zeros, infinities, NaN and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32)
    draw = torch.rand(shape, generator=generator)
    x[draw < 0.02] *= 1e4
    for n, value in enumerate((torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, -1e-30)):
        x[(draw > 0.5 + n / 200) & (draw < 0.5 + (n + 1) / 200)] = value
    x[..., :1, :] = 0.0
    x[..., 128:256] = 1e-43 if dtype != torch.float16 else 0.0
    return x.to(dtype)
