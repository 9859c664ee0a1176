"""Every option of every operation: what is of the wrong kind, or would have no effect, is refused by name.

Options of attention are in `test_attention_options`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_repeated_calls import launched as launches  # noqa: F401  (a fixture)

import kernels_dsl
from kernels_dsl import Sm80GemmConfig, Sm90AttentionConfig, Sm90GemmConfig
from kernels_dsl.config.bsr import Sm90BsrConfig
from kernels_dsl.ops.gemm import gemm as gemm_module
from lowering import emulator, recording
from tests.ops.public_operations import BF16, E4M3, OPERATIONS, Operation, parameters

_NUMBERS = ("x", None, [1.0], torch.ones(1), torch.ones(2), True, 1j, 10**400, 1e39)
_FLAGS = ("no", 0, None, [], torch.tensor(True))
_DTYPES = ("fp32", 16, float, [], {}, torch.int8)
BAD: dict[str, tuple[Any, ...]] = {
    "alpha": _NUMBERS,
    "beta": _NUMBERS,
    "bias_axis": ("k", 0, None, ["n"]),
    "activation": ("tanh", 0, ["relu"], {}, True),
    "epilogue": (3, "nobody", [], {}, [abs], (3, abs)),
    "epilogue_args": (5, "x", torch.ones(2), None, {1: 2}, {1}),
    "out_dtype": _DTYPES,
    "config": ("fast", 5, [], {}, Sm90AttentionConfig(128, 128, 64, 64), Sm90GemmConfig),
    "family": ("sm70", 90, [], {}, True),
    "use_fast_accum": _FLAGS,
    "batch_invariant": _FLAGS,
    "check": _FLAGS,
    "dtype": ("e4m3", None, [], BF16, torch.int8),
    "scaling": ("column", 5, None, ["row"], {}),
    "transpose": ("no", 1, None, [], {}),
    "rotate": _FLAGS,
    "recipe": ("rows", 5, None, ["row"]),
    "grad_dtype": ("e5m2", None, [], BF16),
    "shape": (5, (64,), (64.0, 64.0), None, (-64, 64), "ab"),
    "transposed": _FLAGS,
    "return_preact": _FLAGS,
    "reduce": ("mean", 1, None, ["sum"]),
    "dim": (0, 1, -3, -1.0, True, None, "n"),
}
"""Values that no operation takes, by the option."""
PRODUCTS = (
    "gemm", "scaled_gemm", "grouped_gemm", "scaled_grouped_gemm", "bsr_gemm", "bsr_scaled_gemm", "gemm_gated",
    "gemm_reduce",
)  # fmt: skip
OTHERS = ("bsr_sddmm", "BsrTensor", "quantize", "quantize_qkv", "scaled_linear")
FIRST = {operation.name: operation for operation in reversed(OPERATIONS)}
SUPPORTS = {
    "gemm": "supports", "gemm_gated": "gemm_gated_supports", "scaled_gemm": "scaled_gemm_supports",
    "gemm_reduce": "gemm_reduce_supports", "grouped_gemm": "grouped_gemm_supports",
    "scaled_grouped_gemm": "scaled_grouped_gemm_supports", "bsr_gemm": "bsr_supports",
    "bsr_scaled_gemm": "bsr_scaled_supports", "quantize": "quantize_supports",
}  # fmt: skip


def _options(operation: Operation) -> list[str]:
    """The parameters that are no tensors."""
    tensors = {path.partition("[")[0] for path in operation.inputs + operation.outputs}
    names = [name for name in parameters(operation) if name not in tensors | {"a", "b", "pattern", "out"}]
    return [name for name in names if not _is_tensor(operation, name)]


def _is_tensor(operation: Operation, name: str) -> bool:
    return "Tensor" in str(parameters(operation)[name].annotation)


CASES = [
    pytest.param(name, option, id=f"{name}-{option}")
    for name in (*PRODUCTS, *OTHERS)
    for option in _options(FIRST[name])
]


def test_every_option_is_tried() -> None:
    assert {case.values[1] for case in CASES} == {*BAD}


def _refusal(name: str, arguments: dict[str, Any]) -> str:
    with torch.no_grad(), recording.record("sm_90a") as calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            FIRST[name](**arguments)
    assert not calls
    return str(caught.value)


def _without_epilogue(arguments: dict[str, Any], option: str) -> dict[str, Any]:
    """Arguments beside which an epilogue of one's own may be given."""
    if option not in ("epilogue", "epilogue_args"):
        return arguments
    others = ("c", "bias", "residual", "activation", "alpha", "beta")
    return {name: value for name, value in arguments.items() if name not in others}


@pytest.mark.parametrize(("name", "option"), CASES)
def test_wrong_values_are_named(name: str, option: str) -> None:
    usual = _without_epilogue(FIRST[name].arguments(), option)
    for value in BAD[option]:
        for _ in range(2):  # an error must not leave a plan behind
            words = _refusal(name, {**usual, option: value})
            assert words.startswith(f"{option} "), (value, words)


@pytest.mark.parametrize(("name", "option"), [case for case in CASES if case.values[0] in SUPPORTS])
def test_why_a_call_cannot_run_says_the_same(name: str, option: str) -> None:
    usual = _without_epilogue(FIRST[name].arguments(), option)
    usual.pop("scale", None)
    for value in BAD[option]:
        with torch.no_grad(), emulator.run(arch="sm_90a"):
            words = getattr(kernels_dsl, SUPPORTS[name])(**{**usual, option: value})
        assert words is not None and words.startswith(f"{option} "), (value, words)


def _resized(name: str, m: int, k: int) -> dict[str, Any]:
    """Arguments of a product with these extents, of the other ones as they are."""
    arguments = FIRST[name].arguments()
    kept = {key: arguments[key] for key in ("a", "b", "offs", "scale_a", "scale_b") if key in arguments}
    a = kept["a"]
    kept["a"] = torch.ones(m, k).to(a.dtype)
    if name == "gemm" or name == "scaled_gemm":
        kept["b"] = torch.ones(48, k).to(a.dtype).mT
    else:
        kept["b"] = torch.ones(2, 48, k).to(a.dtype).mT
    if "scale_a" in kept:
        kept["scale_a"], kept["scale_b"] = torch.ones(()), torch.ones(())
    return kept


@pytest.mark.parametrize(("m", "k"), [(0, 64), (32, 0), (0, 0)])
@pytest.mark.parametrize("name", PRODUCTS[:4])
@pytest.mark.parametrize("option", ["config", "family", "out_dtype", "alpha", "activation"])
def test_extents_of_zero_hide_no_option(name: str, m: int, k: int, option: str) -> None:
    for value in BAD[option]:
        words = _refusal(name, {**_resized(name, m, k), option: value})
        assert words.startswith(f"{option} "), (value, words)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_family_that_is_not_the_configurations(name: str, family: str) -> None:
    configs = {"sm80": Sm90GemmConfig(128, 128), "sm90": Sm80GemmConfig(64, 64, 32, 3, 2, 2)}
    if name.startswith("bsr"):
        configs["sm80"] = Sm90BsrConfig(64, 64, 64, 2)
    words = _refusal(name, {**FIRST[name].arguments(), "family": family, "config": configs[family]})
    assert words.startswith(f"family is '{family}', must be config's, ")


ALONE = [
    ({"beta": 0.5}, "beta is 0.5 and c is None, must be given together"),
    ({"beta": 0.0}, "beta is 0.0 and c is None"),
    ({"bias_axis": "m"}, "bias_axis is 'm' and bias is None, must be given together"),
    ({"epilogue_args": (2.0,)}, "epilogue_args has 1 entries, must be empty without epilogue"),
]


@pytest.mark.parametrize(("given", "words"), ALONE, ids=[next(iter(given)) for given, _ in ALONE])
@pytest.mark.parametrize("name", PRODUCTS)
def test_options_without_what_they_go_with(name: str, given: dict[str, Any], words: str) -> None:
    if next(iter(given)) not in parameters(FIRST[name]):
        pytest.skip("no such option")
    arguments = FIRST[name].arguments()
    for other in ("c", "bias", "beta", "bias_axis"):
        arguments.pop(other, None)
    assert _refusal(name, {**arguments, **given}).startswith(words)


@pytest.mark.parametrize("name", ["scaled_gemm", "scaled_grouped_gemm"])
def test_fast_sums_do_not_go_with_scales_of_blocks(name: str) -> None:
    arguments = FIRST[name].arguments()
    lead = (2,) if name == "scaled_grouped_gemm" else ()
    scales = {"scale_a": torch.ones(32, 2), "scale_b": torch.ones(*lead, 2, 48)}
    words = _refusal(name, {**arguments, **scales})
    assert words.startswith("use_fast_accum is True, must be False with scales of 128 elements of K")


@pytest.fixture
def launched(launches, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:  # noqa: F811
    """The arguments of each launch, as if there were an H200."""
    gemm_module.clear_plans()
    yield launches
    gemm_module.clear_plans()


@pytest.mark.parametrize(
    "option", ["alpha", "beta", "activation", "epilogue", "config", "family", "out_dtype"]
)
def test_a_call_that_was_right_opens_no_way_for_a_wrong_one(launched, option: str) -> None:
    """Repeated calls are found by a key, which tells all of these apart."""
    t = {"a": torch.ones(32, 64, dtype=BF16), "b": torch.ones(64, 48, dtype=BF16)}
    sparse = FIRST["bsr_gemm"].arguments()["a"]
    fp8 = {"a": torch.ones(32, 64).to(E4M3), "b": torch.ones(48, 64).to(E4M3).mT}
    one = torch.ones(())
    calls = [
        lambda **given: kernels_dsl.gemm(t["a"], t["b"], **given),
        lambda **given: kernels_dsl.scaled_gemm(fp8["a"], fp8["b"], one, one, **given),
        lambda **given: kernels_dsl.bsr_gemm(sparse, t["b"], **given),
    ]
    for call in calls:
        for alpha in (1.0, 2.0, 1, 2):
            for _ in range(2):
                call(alpha=alpha)
        before = len(launched)
        for value in BAD[option] + ((0.5,) if option == "beta" else ()):
            if value is True and call is calls[1]:
                continue  # is 1
            with pytest.raises((TypeError, ValueError), match=f"^{option} "):
                call(**{option: value})
        assert len(launched) == before


def test_whole_numbers_are_numbers(launched) -> None:
    """1 and 2 are kept apart: the kernel of the first takes no alpha."""
    a = torch.ones(32, 32, dtype=BF16)
    for alpha in (1, 2, 1, 2):
        kernels_dsl.gemm(a, a, alpha=alpha)
    # (a, b, D, the epilogue's operands, CTAs)
    assert [call[3] for call in launched[-4:]] == [None, (2.0,), None, (2.0,)]


def _linear() -> torch.nn.Linear:
    return torch.nn.Linear(32, 32)


MATRIX = FIRST["bsr_gemm"].arguments()["a"]
A = torch.ones(32, 32, dtype=BF16)
AROUND: dict[str, Any] = {
    "name is 3, must be a str": lambda: kernels_dsl.register_epilogue(3, abs),
    "name is '', must not be empty": lambda: kernels_dsl.register_epilogue("", abs),
    "function is 3, must be callable": lambda: kernels_dsl.register_epilogue("three", 3),
    "function is .*, must be callable": lambda: kernels_dsl.kernel_function(5),
    "enabled is 'no', must be True or False": lambda: kernels_dsl.checked("no").__enter__(),
    "rounds is 0, must be at least 1": lambda: kernels_dsl.autotune_gemm(A, A, rounds=0),
    "rounds is '5', must be an int": lambda: kernels_dsl.autotune_gemm(A, A, rounds="5"),
    "record is 'no', must be True or False": lambda: kernels_dsl.autotune_gemm(A, A, record="no"),
    "configs is 'fast', must be list": lambda: kernels_dsl.autotune_gemm(A, A, configs="fast"),
    r"configs\[0\] is 'fast', must be Sm90Ge": lambda: kernels_dsl.autotune_gemm(A, A, configs=["fast"]),
    "config is given, must not": lambda: kernels_dsl.autotune_gemm(A, A, config=Sm90GemmConfig(128, 128)),
    "bogus is given, must not: gemm has no such": lambda: kernels_dsl.autotune_gemm(A, A, bogus=1),
    "a is on cpu, must be on a CUDA device: the": lambda: kernels_dsl.autotune_gemm(A, A),
    "activation is 'tanh', must be None": lambda: kernels_dsl.BsrLinear(MATRIX, activation="tanh"),
    "bias is a list, must be a torch.Tensor": lambda: kernels_dsl.BsrLinear(MATRIX, [1.0]),
    "linear is a list, must be Linear": lambda: kernels_dsl.BsrLinear.from_linear([], (32, 32), density=0.5),
    "density is '0.5', must be a Python number": lambda: kernels_dsl.BsrLinear.from_linear(
        _linear(), (32, 32), density="0.5"
    ),
    "recipe is 'rows', must be": lambda: kernels_dsl.ScaledLinear(32, 32, recipe="rows"),
    "use_fast_accum is 1, must be True or False": lambda: kernels_dsl.ScaledLinear(32, 32, use_fast_accum=1),
    "linear is a int, must be Linear|linear is 5, must be": lambda: kernels_dsl.ScaledLinear.from_linear(5),
    "where is 5, must be a function or None": lambda: kernels_dsl.ScaledLinear.replace(_linear(), 5),
    "model is 5, must be Module": lambda: kernels_dsl.ScaledLinear.replace(5),
    "k is True, must be an int": lambda: kernels_dsl.BsrTensor.top_k(A, (16, 16), True),
    r"block is \(16.0, 16\)": lambda: kernels_dsl.BsrTensor.top_k(A, (16.0, 16), 1),
    "out is a tuple, must be a torch.Tensor": lambda: kernels_dsl.gemm(A, A, out=(A, A)),
    "out is a list, must be a torch.Tensor": lambda: kernels_dsl.grouped_gemm(
        A, A[None], torch.tensor([32], dtype=torch.int32), out=[A]
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", AROUND)
def test_what_is_around_the_operations(words: str) -> None:
    with emulator.run(arch="sm_90a"), pytest.raises((TypeError, ValueError), match=f"^({words})"):
        AROUND[words]()


@pytest.mark.parametrize("name", SUPPORTS)
def test_unknown_arguments_are_named(name: str) -> None:
    arguments = FIRST[name].arguments()
    arguments.pop("scale", None)
    if name == "quantize":
        return
    with emulator.run(arch="sm_90a"):
        words = getattr(kernels_dsl, SUPPORTS[name])(**arguments, bogus=1)
    assert str(words).startswith("bogus is given, must not")
