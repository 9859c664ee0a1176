"""Block-sparse products of fp8 factors through the real kernel, in the emulator; and their errors."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops.bsr import register  # noqa: F401  registers the operator
from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.ops.bsr.scaled import bsr_scaled_gemm, bsr_scaled_supports
from kernels_dsl.sparse.tensor import BsrTensor
from lowering import emulator
from reference.bsr import Bsr, to_dense
from reference.inputs import normal
from reference.quantize import signal_to_noise
from tests.ops.bsr.bsr_scaled_cases import CASES, E4M3, E5M2, Case, run


@pytest.mark.parametrize("case", CASES[:5] + CASES[6:10] + CASES[11:12], ids=str)
def test_against_float64(case: Case) -> None:
    with emulator.run(arch="sm_90a") as session:
        run(case, "cpu")
    assert not session.reports


SM80 = [case for case in CASES if case.block_k % 32 == 0]


@pytest.mark.parametrize("case", SM80[:3] + SM80[4:6] + SM80[7:9], ids=str)
def test_against_float64_on_ada(case: Case) -> None:
    """The SM80-class kernel: K tiles within a block, and several blocks a tile."""
    with emulator.run(arch="sm_89") as session:
        run(case, "cpu")
    assert not session.reports


def _sparse(dtype: torch.dtype = E4M3) -> BsrTensor:
    """(32, 48) of blocks of ones, of which the diagonal and one more are kept."""
    crow, col = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    return BsrTensor(crow, col, torch.ones(3, 16, 16).to(dtype), (32, 48))


W, X, ONE, SCALES = _sparse(), torch.ones(8, 48).to(E4M3), torch.ones(()), torch.ones(3)


def test_what_quantize_makes_goes_in() -> None:
    """Values and scales of `quantize(values, scaling="matrix")`, whose scales have two modes of size 1.

    Of N(0, 1), in blocks of different size, 28 dB are left.
    """
    values = torch.arange(3.0).add(1)[:, None, None].expand(3, 16, 16).contiguous()
    noise = normal((3, 16, 16), torch.float32, seed=1) * torch.tensor([1.0, 2.0**-9, 300.0])[:, None, None]
    x = normal((8, 48), torch.float32, seed=2)
    exact = x.double() @ to_dense(Bsr(W.crow_indices, W.col_indices, noise.double(), W.shape)).mT
    with emulator.run(arch="sm_90a"):
        quantised, scales = kernels_dsl.quantize(values, scaling="matrix")
        found = bsr_scaled_gemm(X, W.with_values(quantised).t(), ONE, scales)
        quantised, of_noise = kernels_dsl.quantize(noise, scaling="matrix")
        x8, of_x = kernels_dsl.quantize(x)
        near = bsr_scaled_gemm(x8, W.with_values(quantised).t(), of_x, of_noise)
    expected = torch.tensor([16.0, 80.0]).repeat_interleave(16).expand(8, 32)
    assert scales.shape == (3, 1, 1) and torch.equal(found, expected.bfloat16())
    assert all(27 < signal_to_noise(near[:, n : n + 16], exact[:, n : n + 16]) < 33 for n in (0, 16))


def test_nan_in_a_scale_stays_in_its_block_row() -> None:
    scales = torch.tensor([float("nan"), 2.0, 0.0])
    with emulator.run(arch="sm_90a"):
        found = bsr_scaled_gemm(X, W.t(), ONE, scales)
    assert bool(found[:, :16].isnan().all()) and bool((found[:, 16:] == 32.0).all())


def test_the_operator() -> None:
    """The operator as torch.compile sees it: the fake has the shape and dtype of the result, out= is
    mutated."""
    tensors = (W.crow_indices, W.col_indices, W.values, X, SCALES, ONE)
    keywords = {"shape": [32, 48], "transposed": True, "dense_left": True}
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        fake = torch.ops.kernels_dsl.bsr_scaled_gemm(*fakes, **keywords, out_dtype=torch.float16)
    assert fake.shape == (8, 32) and fake.dtype == torch.float16
    compiled = torch.compile(
        lambda x: bsr_scaled_gemm(x, W.t(), ONE, SCALES) * 2, backend="eager", fullgraph=True
    )
    expected = torch.tensor([16.0, 32.0]).repeat_interleave(16).expand(8, 32)
    with emulator.run(arch="sm_90a"):
        assert torch.equal(compiled(X), 2 * expected.bfloat16())
        out = torch.zeros(8, 32)
        torch.ops.kernels_dsl.bsr_scaled_gemm_out(*tensors, **keywords, out=out)
        assert torch.equal(out, expected)
        operators = torch.ops.kernels_dsl
        utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(operators.bsr_scaled_gemm.default, tensors, keywords, test_utils=utils)
        keywords["out"] = out
        torch.library.opcheck(operators.bsr_scaled_gemm_out.default, tensors, keywords, test_utils=utils)
        bias = torch.zeros(32, requires_grad=True)
        with pytest.raises(RuntimeError, match="bsr_scaled_gemm has no gradient"):
            bsr_scaled_gemm(X, W.t(), ONE, SCALES, bias=bias).sum().backward()


ERRORS = [
    (lambda: bsr_scaled_gemm(X, X, ONE, ONE), TypeError, "one must be a BsrTensor"),
    (
        lambda: bsr_scaled_gemm(X.bfloat16(), W.t(), ONE, SCALES),
        TypeError,
        "a has dtype torch.bfloat16, must be one of torch.float8_e4m3fn",
    ),
    (
        lambda: bsr_scaled_gemm(X, _sparse(torch.bfloat16).t(), ONE, SCALES),
        TypeError,
        "the sparse matrix has dtype torch.bfloat16, must be one of torch.float8_e4m3fn",
    ),
    (lambda: bsr_gemm(X, W.t()), TypeError, "the sparse matrix has dtype .* must be 16 bits: see bsr_scaled"),
    (lambda: W.to_dense(), TypeError, "values has dtype torch.float8_e4m3fn, must be torch.bfloat16"),
    (
        lambda: bsr_scaled_gemm(X, W.t(), ONE, torch.ones(4)),
        ValueError,
        r"scale_b has shape \(4,\), must be \(3,\) or \(3, 1, 1\): one of each kept block",
    ),
    (
        lambda: bsr_scaled_gemm(X, W.t(), torch.ones(48, 1), SCALES),
        ValueError,
        r"scale_a has shape \(48, 1\), must be one element or \(8, 1\), a scale a row",
    ),
    (
        lambda: bsr_scaled_gemm(X, W.t(), ONE, SCALES.half()),
        TypeError,
        "scale_b has dtype torch.float16, must be one of torch.float32",
    ),
    (
        lambda: bsr_scaled_gemm(X, W.t(), ONE, SCALES, out_dtype=E5M2),
        TypeError,
        "out_dtype has dtype torch.float8_e5m2, must be one of",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(call, error, message) -> None:
    with emulator.run(arch="sm_90a"), pytest.raises(error, match=message):
        call()


def test_supports() -> None:
    with emulator.run(arch="sm_90a"):
        assert bsr_scaled_supports(X, W.t(), ONE, SCALES) is None
        assert "one of each kept block" in bsr_scaled_supports(X, W.t(), ONE, ONE)
        out = torch.zeros(32).expand(8, 32)
        assert "must not overlap itself" in (bsr_scaled_supports(X, W.t(), ONE, SCALES, out=out) or "")
    with emulator.run(arch="sm_89"):
        reason = bsr_scaled_supports(X, W.t(), ONE, SCALES)
    assert reason is not None and "16 along the summed mode, must be a multiple of 32 for fp8" in reason
    with emulator.run(arch="sm_86"):
        reason = bsr_scaled_supports(X, W.t(), ONE, SCALES)
    assert reason is not None and "must be 16 bits on A40 of compute capability 8.6: fp8 matrix" in reason
