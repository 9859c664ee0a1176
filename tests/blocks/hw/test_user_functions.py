"""Users' functions that no kernel can have: each is named, with its line, before anything is launched.

A function runs once, when a kernel is traced. Unchecked, an epilogue with a branch loses one of its two sides
without a word, and other mistakes come as errors of the compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import select_

import kernels_dsl
from kernels_dsl.config.gemm import Sm80GemmConfig
from lowering import emulator

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
UNTYPED = r"cannot be traced: it combines an untyped integer with a float, which would round 0.5 .*Int32"
BRANCHES = r"cannot be traced: it branches on a traced value .*cute\.where\(condition, x, y\)"


def _branch(acc):
    return acc if acc > 0 else acc * 0.01


def _statement(acc):
    if acc > 0:
        acc = acc * 0.01
    return acc


def _helper(acc):
    return _branch(acc) + 1.0


def _loop(acc):
    while acc < 0:
        acc = acc + 1.0
    return acc


@cute.jit
def _rewritten(acc):
    if acc > 0:
        acc = acc * 0.01
    return acc


EPILOGUES: dict[str, tuple[Callable[..., Any], str]] = {
    "if expression": (_branch, BRANCHES),
    "if statement": (_statement, BRANCHES),
    "in a helper": (_helper, BRANCHES),
    "while": (_loop, BRANCHES),
    "and": (lambda acc: acc and acc * 2.0, BRANCHES),
    "or": (lambda acc: acc or acc * 2.0, BRANCHES),
    "not": (lambda acc: acc * (not acc), BRANCHES),
    "max": (lambda acc: max(acc, 0.0), BRANCHES),
    "chained comparison": (lambda acc: cute.where(0.0 < acc < 1.0, acc, acc * 2.0), BRANCHES),
    "membership": (lambda acc: acc * float(acc in (1.0, 2.0)), BRANCHES),
    "a branch on an element": (lambda acc: acc if acc[0] > 0 else acc * 2.0, BRANCHES),
    "a branch that the DSL rewrites": (_rewritten, BRANCHES),
    "iteration": (lambda acc: sum(x for x in acc), "cannot be traced"),
    "int": (lambda acc: acc * int(acc), "cannot be traced: TypeError: int.*operators, cute.where"),
    "float": (lambda acc: acc * float(acc), "cannot be traced: TypeError: float"),
    "range": (lambda acc: next(acc for _ in range(acc)), "cannot be traced: TypeError"),
    "index": (lambda acc: acc * [1.0, 2.0][acc], "cannot be traced: TypeError: list indices"),
    "torch": (lambda acc: torch.relu(acc), r"cannot be traced: TypeError: relu\(\).*not by functions"),
    "torch's own function": (torch.relu, "cannot be traced"),
    "math": (lambda acc: acc * math.exp(acc), "cannot be traced: TypeError: must be real number"),
    "a tuple": (lambda acc: (acc, acc), "returns a tuple, must return a value for each element"),
    "None": (lambda acc: None, "returns None, must return a value for each element"),
    "a number": (lambda acc: 0.0, r"returns a float, must .*cute\.full_like"),
    "an element": (lambda acc: acc[0], "returns a Float32, must return a value for each element"),
    "text": (lambda acc: "x", "returns a str, must return a value for each element"),
}
_where = r" \(.*test_user_functions\.py:\d+\)"


@pytest.fixture
def ampere() -> Iterator[None]:
    with emulator.run(arch="sm_80"):
        yield


def _refused(call: Callable[[], Any], words: str) -> None:
    for _ in range(2):  # an error must not leave a kernel behind
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize("case", EPILOGUES)
def test_epilogues(ampere, case: str) -> None:
    function, words = EPILOGUES[case]
    a, b = torch.ones(16, 16, dtype=BF16), torch.ones(16, 16, dtype=BF16)
    _refused(lambda: kernels_dsl.gemm(a, b, epilogue=function), rf"epilogue \S+({_where})? {words}")


def test_the_line_of_the_branch_is_named(ampere) -> None:
    a = torch.ones(16, 16, dtype=BF16)
    line = _branch.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match=rf"epilogue _helper .* at .*test_user_functions\.py:{line}$"):
        kernels_dsl.gemm(a, a, epilogue=_helper)


def test_what_an_epilogue_takes_is_asked_before_it_is_traced(ampere) -> None:
    a = torch.ones(16, 16, dtype=BF16)
    few = r"epilogue is .*<lambda>\(acc\), must take 2 arguments: the accumulator and 1 of epilogue_args"
    with pytest.raises(TypeError, match=few):
        kernels_dsl.gemm(a, a, epilogue=lambda acc: acc, epilogue_args=(2.0,))
    kernels_dsl.register_epilogue("takes two", lambda acc, x: acc * x)
    with pytest.raises(TypeError, match=r"<lambda>\(acc, x\), must take 1 arguments"):
        kernels_dsl.gemm(a, a, epilogue="takes two")
    assert "must take 1 arguments" in str(kernels_dsl.supports(a, a, epilogue="takes two"))


def test_functions_that_a_kernel_can_have(ampere) -> None:
    a = torch.randn(16, 16).to(BF16)
    product = a.float() @ a.float()

    def valid(acc, x):
        bent = cute.where((acc > 0.0) & (acc < 4.0), acc, acc * 0.01)
        return cute.math.tanh(bent) + abs(x) if True else acc

    expected = torch.where((product > 0) & (product < 4), product, product * 0.01).tanh() + a.float().abs()
    found = kernels_dsl.gemm(a, a, epilogue=valid, epilogue_args=(a,), out_dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    assert not hasattr(cute.TensorSSA, "__bool__")  # the DSL's class is as it was


def _gemm(epilogue: Callable[..., Any], **options: Any) -> Any:
    a = torch.ones(16, 32, dtype=BF16)
    return kernels_dsl.gemm(a, a.mT, epilogue=epilogue, **options)


def _scaled_gemm(epilogue: Callable[..., Any]) -> Any:
    a, one = torch.ones(16, 32).to(E4M3), torch.ones(())
    return kernels_dsl.scaled_gemm(a, a.mT, one, one, epilogue=epilogue)


def _grouped_gemm(epilogue: Callable[..., Any]) -> Any:
    a, b = torch.ones(16, 32, dtype=BF16), torch.ones(2, 32, 16, dtype=BF16)
    return kernels_dsl.grouped_gemm(a, b, torch.tensor([8, 16], dtype=torch.int32), epilogue=epilogue)


def _scaled_grouped_gemm(epilogue: Callable[..., Any]) -> Any:
    a, b, one = torch.ones(16, 32).to(E4M3), torch.ones(2, 16, 32).to(E4M3).mT, torch.ones(())
    offs = torch.tensor([8, 16], dtype=torch.int32)
    return kernels_dsl.scaled_grouped_gemm(a, b, one, one, offs, epilogue=epilogue)


def _sparse(dtype: torch.dtype) -> Any:
    dense = torch.ones(64, 64, dtype=BF16)
    matrix = kernels_dsl.BsrTensor.from_dense(dense, torch.eye(2, dtype=torch.bool), (32, 32))
    return matrix.with_values(matrix.values.to(dtype))


def _bsr_gemm(epilogue: Callable[..., Any]) -> Any:
    return kernels_dsl.bsr_gemm(_sparse(BF16), torch.ones(64, 16, dtype=BF16), epilogue=epilogue)


def _bsr_scaled_gemm(epilogue: Callable[..., Any]) -> Any:
    dense = torch.ones(16, 64).to(E4M3).mT
    scales = torch.ones(2), torch.ones(())
    return kernels_dsl.bsr_scaled_gemm(_sparse(E4M3), dense, *scales, epilogue=epilogue)


PRODUCTS = [_gemm, _scaled_gemm, _grouped_gemm, _scaled_grouped_gemm, _bsr_gemm, _bsr_scaled_gemm]


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.__name__)
def test_all_products_refuse_a_branch(product: Callable[..., Any], arch: str) -> None:
    with emulator.run(arch=arch), pytest.raises(TypeError, match=rf"epilogue _branch{_where} {BRANCHES}"):
        product(_branch)


def test_split_k(ampere) -> None:
    config = Sm80GemmConfig(64, 64, 32, 3, 2, 2, split_k=2)
    a = torch.ones(16, 128, dtype=BF16)
    _refused(lambda: kernels_dsl.gemm(a, a.mT, epilogue=_branch, config=config), BRANCHES)


def _attend(arch: str, **options: Any) -> Any:
    x = torch.ones(1, 16, 1, 64, dtype=BF16)
    with emulator.run(arch=arch):
        return kernels_dsl.attention(x, x, x, **options)


SCORES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "if": ("score_mod", lambda s, b, h, i, j: s if i > j else s * 2.0, BRANCHES),
    "and": ("mask_mod", lambda b, h, i, j: i > j and j > 2, BRANCHES),
    "not": ("mask_mod", lambda b, h, i, j: not i > j, BRANCHES),
    "range": ("score_mod", lambda s, b, h, i, j: s + sum(range(j)), "cannot be traced"),
    "index": ("score_mod", lambda s, b, h, i, j: s + [1.0, 2.0][j], "cannot be traced"),
    "int": ("score_mod", lambda s, b, h, i, j: s + int(j), "cannot be traced"),
    "untyped product": ("score_mod", lambda s, b, h, i, j: s - 0.5 * select_(i > j, i, j), UNTYPED),
    "untyped comparison": ("mask_mod", lambda b, h, i, j: select_(i > j, i, j) > 0.5, UNTYPED),
    "torch": ("score_mod", lambda s, b, h, i, j: torch.tanh(s), r"cannot be traced: TypeError: tanh\(\)"),
    "math": ("score_mod", lambda s, b, h, i, j: math.exp(s), "cannot be traced"),
    "a tuple": ("score_mod", lambda s, b, h, i, j: (s, s), "returns a tuple, must return a number"),
    "None": ("mask_mod", lambda b, h, i, j: None, "returns None, must return true or false"),
    "text": ("mask_mod", lambda b, h, i, j: "yes", "returns a str, must return true or false"),
}


@pytest.mark.parametrize("case", SCORES)
def test_score_and_mask_functions(case: str) -> None:
    argument, function, words = SCORES[case]
    _refused(lambda: _attend("sm_80", **{argument: function}), rf"{argument} <lambda>{_where} {words}")


def test_choices_between_numbers_keep_their_type(seed: int) -> None:
    """cutlass.select_ returns untyped integers: times 0.1 they were 0, and a byte of 200 was -56."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 24, 1, 64, generator=generator).to(BF16) for _ in range(3))
    aux = torch.randint(256, (24,), generator=generator, dtype=torch.uint8)

    def function(score, b, h, i, j, aux):
        distance = cutlass.select_(i >= j, i - j, j - i)
        return cutlass.select_(
            i == j, score, score - 0.1 * distance - 0.01 * cutlass.select_(i > j, aux[i], aux[j])
        )

    with emulator.run(arch="sm_80"):
        found = kernels_dsl.attention(q, k, v, score_mod=function, aux=(aux,))
    i, j = torch.arange(24)[:, None], torch.arange(24)
    weight = torch.where(i > j, aux.double()[:, None], aux.double())
    bias = torch.where(i == j, 0.0, -0.1 * (i - j).abs() - 0.01 * weight)
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=bias)
    torch.testing.assert_close(found.double(), wanted.transpose(1, 2), atol=2e-2, rtol=0)
    assert cutlass.select_ is select_  # the DSL's function is as it was


@pytest.mark.parametrize("argument", ["score_mod", "mask_mod"])
def test_score_and_mask_functions_on_hopper(argument: str) -> None:
    _refused(lambda: _attend("sm_90a", **{argument: SCORES["if" if argument == "score_mod" else "and"][1]}),
             rf"{argument} <lambda>{_where} {BRANCHES}")  # fmt: skip


def test_what_score_and_mask_functions_take_is_asked_before_they_are_traced() -> None:
    words = r"mask_mod is .*\(i, j\), must take 4 arguments: b, h, i, j and 0 of aux"
    with pytest.raises(TypeError, match=words):
        _attend("sm_80", mask_mod=lambda i, j: i > j)
    words = r"score_mod is .*must take 6 arguments: score, b, h, i, j and 1 of aux"
    with pytest.raises(TypeError, match=words):
        _attend("sm_80", score_mod=lambda s, b, h, i, j: s, aux=(torch.ones(3),))
