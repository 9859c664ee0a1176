"""`gemm` on the CPU with modelled kernels: what the op does around a launch."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.ops.gemm.gemm import gemm, plan_for, supports
from reference import gemm as reference
from reference.buffers import check_output, poisoned
from reference.inputs import integers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _matrix(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, major: str = "row", pad: int = 0
) -> torch.Tensor:
    """Small integers, in a layout with `pad` elements behind each row (or column)."""
    values = integers(shape, dtype, seed=seed)
    if major == "none":
        wide = torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    inner = shape[-1] if major == "row" else shape[-2]
    outer = shape[-2] if major == "row" else shape[-1]
    buffer = torch.zeros((*shape[:-2], outer, inner + pad), dtype=dtype)[..., :inner]
    view = buffer if major == "row" else buffer.mT
    view.copy_(values)
    return view


def _check(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **options) -> None:
    expected = reference.gemm(a, b, **options)
    assert result.shape == expected.shape
    assert torch.equal(result.double(), expected), "integers must match bit for bit"


MAJORS = ("row", "column", "none")


@pytest.mark.parametrize(("a_major", "b_major"), list(itertools.product(MAJORS, MAJORS)))
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("pad", [0, 8, 1])
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_majors_and_alignments(
    model_kernels, a_major: str, b_major: str, dtype, pad: int, family: str
) -> None:
    for m, n, k in ((64, 48, 32), (17, 33, 19), (1, 40, 24), (40, 1, 24), (24, 40, 1), (1, 1, 1)):
        a = _matrix((m, k), dtype, 1, a_major, pad)
        b = _matrix((k, n), dtype, 2, b_major, pad)
        _check(gemm(a, b, family=family, out_dtype=FP32), a, b)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((3, 16, 24), (3, 24, 8)),
        ((3, 16, 24), (24, 8)),
        ((16, 24), (3, 24, 8)),
        ((1, 16, 24), (3, 24, 8)),
        ((3, 16, 24), (1, 24, 8)),
        ((1, 16, 24), (24, 8)),
        ((3, 17, 23), (1, 23, 9)),
        ((1, 1, 1), (64, 1, 1)),
    ],
)
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_batches(model_kernels, a_shape, b_shape, family: str) -> None:
    a, b = _matrix(a_shape, BF16, 1), _matrix(b_shape, BF16, 2)
    _check(gemm(a, b, family=family), a, b)
    if len(a_shape) == 3:
        expanded = _matrix(a_shape[1:], BF16, 3).expand(b_shape[0] if len(b_shape) == 3 else 3, -1, -1)
        if len(b_shape) == 2 or b_shape[0] in (1, expanded.shape[0]):
            _check(gemm(expanded, b, family=family), expanded, b)


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("layout", ["row", "column", "padded", "odd", "none"])
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("batch", [None, 2])
def test_out_layouts(model_kernels, layout: str, split_k: int, family: str, batch: int | None) -> None:
    shape = (24, 40) if batch is None else (batch, 24, 40)
    a, b = _matrix((*shape[:-1], 192), BF16, 1), _matrix((192, 40), BF16, 2)
    bias, residual = integers((40,), FP32, seed=3), integers(shape, BF16, seed=4)
    if family == "sm90":
        config = Sm90GemmConfig(64, 64, split_k=split_k)
    else:
        config = Sm80GemmConfig(64, 64, 64, 3, 2, 2, split_k=split_k)
    if layout == "none":
        out = torch.full((*shape[:-1], 80), float("nan"), dtype=FP32)[..., ::2]
        guard = None
    else:
        guard = poisoned(
            shape,
            FP32,
            contiguous=-2 if layout == "column" else -1,
            pad=8 if layout == "padded" else 0,
            offset=1 if layout == "odd" else 0,
        )
        out = guard.tensor
    result = gemm(a, b, bias=bias, residual=residual, alpha=2.0, activation="relu", out=out, config=config)
    assert result is out
    _check(out, a, b, bias=bias, residual=residual, alpha=2.0, activation="relu")
    if guard is not None:
        check_output(guard)
    kernels = [name for name, _ in model_kernels.launches]
    assert kernels == [family] + ["splitk_reduce"] * (split_k > 1)


@pytest.mark.parametrize("batch", [None, 2])
def test_epilogue_operands(model_kernels, batch: int | None) -> None:
    shape = (12, 20) if batch is None else (batch, 12, 20)
    a, b = _matrix((*shape[:-1], 16), BF16, 1), _matrix((16, 20), BF16, 2)
    for c_shape in (shape, (12, 20), (1, 20), (12, 1), (20,), (1,), ()):
        c = integers(c_shape, BF16, seed=3, zeros=0.0)
        _check(gemm(a, b, c=c, beta=2.0, alpha=3, out_dtype=FP32), a, b, c=c, beta=2.0, alpha=3.0)
        _check(gemm(a, b, residual=c, out_dtype=FP32), a, b, residual=c)
    bias = integers((12,), FP32, seed=4)
    _check(gemm(a, b, bias=bias, bias_axis="m"), a, b, bias=bias[:, None])
    nans = torch.full(shape, float("nan"), dtype=BF16)
    _check(gemm(a, b, c=nans, beta=0.0), a, b)


def test_custom_epilogue(model_kernels) -> None:
    a, b = _matrix((12, 16), BF16, 1), _matrix((16, 20), BF16, 2)
    scale = integers((20,), FP16, seed=3, zeros=0.0)
    result = gemm(
        a, b, epilogue=lambda acc, x, shift: acc * x + shift, epilogue_args=(scale, 3), out_dtype=FP32
    )
    assert torch.equal(result.double(), a.double() @ b.double() * scale.double() + 3)


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)])
@pytest.mark.parametrize("batch", [None, 0, 2])
def test_empty(model_kernels, shape: tuple[int, int, int], batch: int | None) -> None:
    m, n, k = shape
    lead = () if batch is None else (batch,)
    a, b = torch.ones((*lead, m, k), dtype=BF16), torch.ones((k, n), dtype=BF16)
    bias = torch.arange(n, dtype=BF16)
    expected = torch.zeros((*lead, m, n), dtype=BF16) + bias
    assert torch.equal(gemm(a, b, bias=bias), expected)
    out = torch.full((*lead, m, n), float("nan"), dtype=BF16)
    assert torch.equal(gemm(a, b, bias=bias, out=out), expected)
    if expected.numel() == 0:
        assert not model_kernels.launches


def test_a_second_call_makes_no_plan_and_compiles_nothing(model_kernels) -> None:
    a, b = _matrix((64, 64), BF16, 1), _matrix((64, 64), BF16, 2)
    bias = torch.ones(64, dtype=BF16)
    for _ in range(3):
        gemm(a, b)
        gemm(a, b, bias=bias, alpha=0.5)
        gemm(a, b, out=torch.empty(64, 64, dtype=BF16))
    assert len(model_kernels.compiled) == 3
    gemm(a, b, bias=bias, alpha=0.25)  # another value is no other kernel
    assert len(model_kernels.compiled) == 3


def test_a_plan_is_not_used_for_other_layouts(model_kernels) -> None:
    b = _matrix((64, 64), BF16, 2)
    wide = _matrix((64, 128), BF16, 1)
    for a in (
        wide[:, :64],
        wide[:, 1:65],
        wide[:, 8:72],
        wide[:, :64].contiguous().t(),
        wide[:32, :64].repeat(2, 1),
    ):
        _check(gemm(a, b), a, b)
        _check(gemm(a, b, bias=b[0]), a, b, bias=b[0])
        _check(gemm(a, b, bias=b[:, 0]), a, b, bias=b[:, 0])


def test_unaligned_operands_are_copied_only_where_it_pays(model_kernels) -> None:
    def decision(m: int, n: int, k: int):
        a = torch.empty((m, k + 1), dtype=BF16)[:, :k]
        return plan_for(a, torch.empty((k, n), dtype=BF16)).decision

    assert decision(4096, 4096, 4096).family == "sm90"
    assert decision(4096, 4096, 4096).copy_a == "row"
    assert decision(4096, 4096, 4096).copy_b is None
    assert decision(16, 64, 64).family == "sm80"
    assert decision(16, 64, 64).copy_a is None


def test_tf32_copies_operands_whose_k_is_not_contiguous(model_kernels) -> None:
    a, b = torch.empty((4096, 4096)), torch.empty((4096, 4096))
    decision = plan_for(a, b).decision
    assert (decision.family, decision.copy_a, decision.copy_b) == ("sm90", None, "column")
    assert plan_for(a, b.t()).decision.copy_b is None


def test_a_device_without_wgmma_gets_the_other_family(model_kernels_sm89) -> None:
    a, b = _matrix((64, 64), BF16, 1), _matrix((64, 64), BF16, 2)
    _check(gemm(a, b), a, b)
    assert [name for name, _ in model_kernels_sm89.launches] == ["sm80"]
    with pytest.raises(ValueError, match="family is 'sm90', must be one of"):
        gemm(a, b, family="sm90")


def test_supports_gives_the_reason_that_gemm_raises(model_kernels) -> None:
    a, b = torch.ones((8, 8), dtype=BF16), torch.ones((8, 8), dtype=BF16)
    assert supports(a, b) is None
    assert supports(a, b, family="sm90", bias=torch.ones(8)) is None
    reason = supports(a, b, config=Sm90GemmConfig(256, 256))
    assert reason is not None and "accumulator registers" in reason
    with pytest.raises(ValueError, match="accumulator registers"):
        gemm(a, b, config=Sm90GemmConfig(256, 256))
    asking, scale = a.clone().requires_grad_(), torch.ones(8)
    for call, options in (
        ((a, b), {"out": b}),
        ((asking, b), {"out": torch.empty_like(a)}),
        ((asking, b), {"epilogue": lambda acc: acc}),
        ((a, b), {"epilogue": lambda acc: acc * scale}),
        ((a, b), {"bias": torch.ones(7)}),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            gemm(*call, **options)
        assert supports(*call, **options) == str(error.value)
    with torch.no_grad():
        assert supports(asking, b, out=torch.empty_like(a)) is None
