"""`gemm` through the dispatcher, on modelled kernels: fakes, gradients, torch.compile, opcheck, modes."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels_dsl.config.gemm import Sm90GemmConfig
from kernels_dsl.ops.epilogues import register_epilogue
from kernels_dsl.ops.gemm.gemm import gemm

BF16, FP32 = torch.bfloat16, torch.float32


def _randn(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


CASES = {
    "plain": {},
    "bias": {"bias": (20,), "activation": "gelu"},
    "row bias": {"bias": (12,), "bias_axis": "m", "activation": "silu"},
    "everything": {
        "c": (12, 20), "bias": (20,), "residual": (12, 20), "alpha": 0.5, "beta": 2.0,
        "activation": "gelu_tanh",
    },
    "broadcast": {"c": (20,), "residual": (12, 1), "activation": "relu"},
    "wider output": {"out_dtype": FP32},
}  # fmt: skip


def _arguments(case: str, grad: bool, dtype: torch.dtype = BF16) -> dict:
    return {
        name: _randn(*value, dtype=dtype, grad=grad) if isinstance(value, tuple) else value
        for name, value in CASES[case].items()
    }


def _torch_gemm(
    a,
    b,
    c=None,
    bias=None,
    residual=None,
    bias_axis="n",
    alpha=1.0,
    beta=1.0,
    activation=None,
    out_dtype=None,
):
    from reference.gemm import activation_function

    value = alpha * (a.float() @ b.float())
    if c is not None:
        value = value + beta * c.float()
    if bias is not None:
        value = value + (bias.float() if bias_axis == "n" else bias.float()[:, None])
    value = activation_function(activation)(value)
    if residual is not None:
        value = value + residual.float()
    return value.to(out_dtype or a.dtype)


@pytest.mark.parametrize("case", CASES)
def test_gradients_match_autograd(model_kernels, case: str) -> None:
    a, b = _randn(12, 16, grad=True), _randn(16, 20, grad=True)
    options = _arguments(case, grad=True)
    inputs = [a, b, *(x for x in options.values() if isinstance(x, torch.Tensor))]
    ours = gemm(a, b, **options)
    weight = torch.randn(12, 20).to(ours.dtype)
    got = torch.autograd.grad(ours, inputs, weight)
    expected = torch.autograd.grad(_torch_gemm(a, b, **options), inputs, weight)
    for mine, theirs in zip(got, expected):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((3, 12, 16), (16, 20)), ((12, 16), (3, 16, 20)), ((1, 12, 16), (3, 16, 20))]
)
def test_gradients_of_broadcast_batches(model_kernels, a_shape, b_shape) -> None:
    a, b = _randn(*a_shape, grad=True), _randn(*b_shape, grad=True)
    bias = _randn(20, grad=True)
    got = torch.autograd.grad(gemm(a, b, bias=bias, alpha=0.5).sum(), [a, b, bias])
    expected = torch.autograd.grad((0.5 * (a.float() @ b.float()) + bias.float()).sum(), [a, b, bias])
    for mine, theirs in zip(got, expected):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=4e-2, rtol=4e-2)


def test_only_the_gradients_asked_for_are_computed(model_kernels) -> None:
    a, b = _randn(12, 16, grad=True), _randn(16, 20)
    gemm(a, b).sum().backward()
    assert len(model_kernels.launches) == 2 and b.grad is None


def test_fakes_have_the_shape_dtype_and_strides_of_the_result(model_kernels) -> None:
    for case in CASES:
        for lead in ((), (3,)):
            options = _arguments(case, grad=False)
            real = gemm(_randn(*lead, 12, 16), _randn(16, 20), **options)
            with FakeTensorMode() as mode:
                fake_options = {
                    name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                    for name, x in options.items()
                }
                fake = gemm(
                    torch.empty((*lead, 12, 16), dtype=BF16),
                    torch.empty((16, 20), dtype=BF16),
                    **fake_options,
                )
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
    with FakeTensorMode(), pytest.raises(ValueError, match="b has shape"):
        gemm(torch.empty((12, 16), dtype=BF16), torch.empty((17, 20), dtype=BF16))


@pytest.mark.parametrize("case", ["plain", "everything", "broadcast"])
def test_opcheck(model_kernels, case: str) -> None:
    from kernels_dsl.ops.gemm import register as gemm_register  # noqa: F401

    options = _arguments(case, grad=True)
    arguments = (_randn(12, 16, grad=True), _randn(16, 20, grad=True))
    keywords = {"bias_axis": "n", **options}
    torch.library.opcheck(torch.ops.kernels_dsl.gemm.default, arguments, keywords)
    plain = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
    out = torch.empty(12, 20, dtype=BF16)
    torch.library.opcheck(
        torch.ops.kernels_dsl.gemm_out.default, tuple(x.detach() for x in arguments), {**plain, "out": out}
    )


@pytest.mark.parametrize("grad", [False, True])
def test_compile_with_dynamic_shapes(model_kernels, grad: bool) -> None:
    torch._dynamo.reset()

    def layer(x, weight, bias, residual):
        return gemm(x, weight.t(), bias=bias, residual=residual, activation="gelu") * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    weight, bias = _randn(20, 16, grad=grad), _randn(20, grad=grad)
    for m in (12, 13, 40):
        x, residual = _randn(m, 16, grad=grad), _randn(m, 20)
        with torch.compiler.set_stance("default" if m == 12 else "fail_on_recompile"):
            got = compiled(x, weight, bias, residual)
        expected = layer(x, weight, bias, residual)
        assert torch.equal(got, expected)
        if grad:
            mine = torch.autograd.grad(got.sum(), [x, weight, bias])
            theirs = torch.autograd.grad(expected.sum(), [x, weight, bias])
            for one, other in zip(mine, theirs):
                torch.testing.assert_close(one, other)


def test_compile_with_out_config_and_named_epilogue(model_kernels) -> None:
    torch._dynamo.reset()
    config = Sm90GemmConfig(64, 64, split_k=2)
    register_epilogue("test_scaled", _scaled)

    def step(a, b, scale, out):
        gemm(a, b, out=out, config=config)
        return gemm(a, b, epilogue="test_scaled", epilogue_args=(scale,)) + out

    a, b, scale = _randn(12, 128), _randn(128, 24), _randn(24)
    out, other = torch.empty(12, 24, dtype=BF16), torch.empty(12, 24, dtype=BF16)
    expected = step(a, b, scale, out)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b, scale, other)
    assert torch.equal(got, expected) and torch.equal(out, other)
    assert sum(name == "splitk_reduce" for name, _ in model_kernels.launches) == 2


def _scaled(acc, x):
    return acc * x


def test_a_custom_epilogue_has_no_gradient(model_kernels) -> None:
    a, b = _randn(12, 16, grad=True), _randn(16, 20)
    with pytest.raises(ValueError, match="epilogue is given and an input requires grad"):
        gemm(a, b, epilogue=lambda acc: acc)
    with torch.no_grad():
        assert gemm(a, b, epilogue=lambda acc: acc).shape == (12, 20)


def test_out_has_no_gradient(model_kernels) -> None:
    a, b = _randn(12, 16, grad=True), _randn(16, 20)
    with pytest.raises(ValueError, match="out is given and a tensor requires grad"):
        gemm(a, b, out=torch.empty(12, 20, dtype=BF16))
    with pytest.raises(ValueError, match="out is given and a tensor requires grad"):
        gemm(a.detach(), b, out=torch.empty(12, 20, dtype=BF16, requires_grad=True))


def test_vmap_loops_over_the_batch(model_kernels) -> None:
    a, b = _randn(3, 12, 16), _randn(16, 20)
    assert torch.equal(torch.vmap(gemm, in_dims=(0, None))(a, b), gemm(a, b))


def test_forward_mode_is_refused(model_kernels) -> None:
    a, b = _randn(12, 16), _randn(16, 20)
    expected = gemm(a, b)
    with pytest.raises(NotImplementedError, match="gemm has no forward-mode derivative"):
        torch.func.jvp(lambda x: gemm(x, b), (a,), (a,))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(gemm(a, b), expected)  # no tangent is asked for
        for tensors in ((torch.autograd.forward_ad.make_dual(a, a), b, None), (a, b, expected)):
            c = tensors[2]
            c = None if c is None else torch.autograd.forward_ad.make_dual(c, c)
            with pytest.raises(NotImplementedError, match="gemm has no forward-mode derivative"):
                gemm(*tensors[:2], c=c)


def test_a_second_derivative(model_kernels) -> None:
    a, b, weight = _randn(12, 16, grad=True), _randn(16, 20), _randn(12, 16)
    found, expected = (
        torch.autograd.grad((torch.autograd.grad(y.float().sum(), a, create_graph=True)[0] * weight).sum(), a)
        for y in (gemm(a, b, activation="gelu"), torch.nn.functional.gelu(a.float() @ b.float()))
    )
    torch.testing.assert_close(found[0], expected[0], atol=0.1, rtol=0.05)


def test_a_dispatch_mode_sees_the_operator(model_kernels) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Record() as record:
        gemm(_randn(12, 16), _randn(16, 20))
    assert "kernels_dsl.gemm.default" in record.seen


def test_negated_views_are_resolved(model_kernels) -> None:
    value = torch.randn(12, 16, dtype=torch.complex64)
    a, b = value.conj().imag, torch.randn(16, 20)
    assert a.is_neg()
    torch.testing.assert_close(gemm(a, b), -value.imag @ b, atol=2e-2, rtol=2e-2)


def test_the_operator_keeps_its_plans(model_kernels) -> None:
    a, b = _randn(12, 16, grad=True), _randn(16, 20)
    for _ in range(3):
        gemm(a, b).sum().backward()
    assert len(model_kernels.compiled) == 2 and len(model_kernels.launches) == 6
