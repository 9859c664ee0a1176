"""An epilogue of your own: a product scaled by row and clipped, in the product's own kernel."""

from __future__ import annotations

import cutlass.cute as cute
import torch

import kernels_dsl
from examples.place import DEVICE, report, running, size


def clipped(acc, scale, limit):
    """Traced by the CuTe DSL: `acc` is the float32 accumulator, operands come as float32 too."""
    y = acc * scale
    y = cute.where(y > limit, cute.full_like(y, limit), y)
    return cute.where(y < -limit, cute.full_like(y, -limit), y)


def main() -> None:
    torch.manual_seed(0)
    m, n, k = size(4096, 96), size(4096, 80), size(4096, 64)
    a, b = (torch.randn(shape, device=DEVICE).bfloat16() for shape in ((m, k), (k, n)))
    scale = torch.rand(m, 1, device=DEVICE)  # one a row: it broadcasts to the result
    with running():
        d = kernels_dsl.gemm(a, b, epilogue=clipped, epilogue_args=(scale, 2.0))
    wanted = ((a.double() @ b.double()) * scale).clamp(-2, 2)
    report("custom epilogue", float((d - wanted).abs().max()), 2**-7)


if __name__ == "__main__":
    main()
