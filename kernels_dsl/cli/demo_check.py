"""The demo's own check against float64, in PyTorch alone: an installed package brings no test code along.

The rule is that of the tests, over the whole output: at most twice the error of PyTorch in the same dtype,
plus one unit in the last place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels_dsl.cli.errors import CheckFailed

if TYPE_CHECKING:
    import torch

_FACTOR = 2.0


def integers(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers from -2 to 2 on the CPU: products and sums of a few hundred are exact in any dtype."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    """Values of N(0, 1)."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def product(
    a: torch.Tensor, b: torch.Tensor, bias: Any = None, activation: str | None = None
) -> torch.Tensor:
    """activation(a @ b + bias) by PyTorch, in the dtype of `a`."""
    import torch

    d = torch.nn.functional.linear(a, b.t(), bias)
    return d if activation is None else getattr(torch.nn.functional, activation)(d)


def exact(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, case: str) -> None:
    """Compare a product of integers bit for bit. CheckFailed: how many elements differ."""
    wrong = int((d.double() != product(a.double(), b.double()).to(d.dtype).double()).sum())
    if wrong:
        raise CheckFailed(f"{case}: {wrong} of {d.numel()} elements differ from the float64 result")


def close(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, epilogue: dict[str, Any], case: str) -> str:
    """Compare with float64; says how far off we are, and PyTorch. CheckFailed where it is too far, or NaN."""
    import torch

    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in epilogue.items()}
    expected = product(a.double(), b.double(), **wide)
    ours, peers = ((x.double() - expected).abs() for x in (d, product(a, b, **epilogue)))
    ulp = float(torch.finfo(d.dtype).eps * expected.abs().max())
    bound = _FACTOR * float(peers.max()) + ulp
    wrong = int((~(ours <= bound)).sum())  # NaN is wrong
    rms, peer_rms = (float(x.square().mean().sqrt()) for x in (ours, peers))
    rms_bound = _FACTOR * peer_rms + ulp
    if wrong or not rms <= rms_bound:
        raise CheckFailed(
            f"{case}: {wrong} of {d.numel()} elements are off by more than {bound:.3g}, "
            f"rms error {rms:.3g} (at most {rms_bound:.3g})"
        )
    return f"rms error {rms:.3g} against float64 (PyTorch's {peer_rms:.3g})"
