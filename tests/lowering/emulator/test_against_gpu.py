"""Whole kernels against the real thing: the same kernel and inputs on the GPU and in the emulator.

Integer-valued inputs must agree bit for bit. On random ones the tensor cores' order of addition shows: D may
differ by one unit in the last place of its format for a small share of the elements.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernels_dsl  # noqa: E402
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig, Sm90GemmConfig  # noqa: E402
from lowering import emulator  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
CONFIGS = {
    "sm90": Sm90GemmConfig(128, 128),
    "sm90 ping-pong, cluster": Sm90GemmConfig(64, 128, cluster_m=2, schedule=Schedule.PINGPONG),
    "sm90 split K": Sm90GemmConfig(128, 64, split_k=2),
    "sm80": Sm80GemmConfig(64, 64, 32, 3, 2, 2),
}
SHAPES = [(256, 256, 128), (200, 136, 264)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _both(config: Any, a: Any, b: Any, out_dtype: Any) -> tuple[Any, Any]:
    gpu = kernels_dsl.gemm(a.cuda(), b.cuda(), config=config, out_dtype=out_dtype).cpu()
    with emulator.run(arch="sm_90a"):
        cpu = kernels_dsl.gemm(a, b, config=config, out_dtype=out_dtype)
    return gpu, cpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_integers_agree_bit_for_bit(name: str, shape: tuple[int, int, int], dtype: Any) -> None:
    m, n, k = shape
    a, b = torch.randint(-3, 4, (m, k)).to(dtype), torch.randint(-3, 4, (k, n)).to(dtype)
    gpu, cpu = _both(CONFIGS[name], a, b, dtype)
    assert torch.equal(gpu, cpu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_random_values_agree_to_the_rounding_of_the_sum(
    name: str, shape: tuple[int, int, int], dtype: Any
) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    gpu, cpu = _both(CONFIGS[name], a, b, torch.float32)
    # Each of the instructions' sums is rounded or truncated at 24 bits: an error of one unit of the largest
    # partial sum for each of them.
    steps = -(-k // 8)
    scale = (a.float().abs() @ b.float().abs()).cpu()
    difference = (gpu - cpu).abs()
    assert (difference <= scale * steps * 2.0**-23).all(), (difference / scale).max()
    print(f"{name} {shape} {dtype}: {(gpu == cpu).float().mean():.1%} equal, worst {difference.max():.2e}")
