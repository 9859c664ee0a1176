"""`gemm_gated` on a GPU: chosen and forced tiles, gradients, CUDA graphs, repeated bits."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.blocks.epilogue.gates import GATES
from reference import gated as reference
from reference import tolerance
from reference.inputs import normal
from tests.ops.gemm import gated_cases
from tests.ops.gemm.gated_cases import Case, Place
from tests.ops.gemm.test_gated_emulated import CONFIGS, WIDE

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = (
    Case(4096, 8192, 2048, Place(), linear=True),
    Case(4095, 2050, 1031, Place(offset=1), Place(-2)),
    Case(1, 11008, 4096),
    Case(64, 28672, 4096, Place(), dtype=FP16, out_dtype=FP16),
    Case(300, 520, 8192, Place(), out_dtype=FP32, activation="geglu"),
    Case(1000, 1008, 512, Place(), dtype=FP32, out_dtype=FP32),
    Case(257, 384, 512, Place(), batch=5, activation="swiglu_oai"),
)


@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_tiles(case: Case, family: str) -> None:
    if family == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the family sm90 needs compute capability 9.0")
    gated_cases.run(case, "cuda", family=family)


@pytest.mark.parametrize(("config", "case"), [*CONFIGS, *WIDE], ids=str)
def test_forced_tiles(config, case: Case) -> None:
    if config.family == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the family sm90 needs compute capability 9.0")
    gated_cases.run(case, "cuda", config=config)


@pytest.mark.parametrize("name", list(GATES))
def test_gradients(name: str) -> None:
    a, b = (normal(shape, BF16, seed=i, device="cuda") for i, shape in enumerate(((512, 256), (256, 768))))
    leaves = a.requires_grad_(), b.requires_grad_()
    seed = normal((512, 384), BF16, seed=3, device="cuda")
    found = torch.autograd.grad(kernels_dsl.gemm_gated(a, b, activation=name), leaves, seed)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    peer = [x.detach().clone().requires_grad_() for x in leaves]
    expected, same = (
        torch.autograd.grad(GATES[name].of_pairs(x @ y), (x, y), g)
        for (x, y), g in ((exact, seed.double()), (peer, seed))
    )
    for got, want, other in zip(found, expected, same):
        tolerance.check(got, want, other, case=name)


def test_a_captured_call_and_its_bits() -> None:
    a, b = (normal(shape, BF16, seed=i, device="cuda") for i, shape in enumerate(((700, 512), (512, 1024))))
    first = kernels_dsl.gemm_gated(a, b, return_preact=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = kernels_dsl.gemm_gated(a, b, return_preact=True)
    graph.replay()
    assert torch.equal(first.out, again.out) and torch.equal(first.preact, again.preact)
    want = reference.gemm_gated(a, b)
    torch.testing.assert_close(first.out.double(), want.out, atol=2e-1, rtol=2e-2)
