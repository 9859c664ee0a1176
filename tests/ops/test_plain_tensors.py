"""No kernel gets a tensor that is not what lies in its memory: every tensor argument of every operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernels_dsl
from lowering import emulator, recording
from lowering.address import Address
from tests.ops.public_operations import (
    ELSEWHERE,
    NO_TENSORS,
    OPERATIONS,
    Operation,
    parameters,
    value_at,
    with_value,
)

ARCHES = ("sm_89", "sm_90a")
_TENSORS = ("Tensor", "Made", "BlockLists")


def _cases(*, outputs: bool) -> list[Any]:
    return [
        pytest.param(operation, path, id=f"{number}-{operation.name}-{path}")
        for number, operation in enumerate(OPERATIONS)
        for path in (operation.outputs if outputs else operation.inputs)
    ]


def test_every_tensor_argument_is_in_the_table() -> None:
    known: dict[str, set[str]] = {}
    for operation in OPERATIONS:
        names = {path.partition("[")[0].partition(".")[0] for path in operation.inputs + operation.outputs}
        known.setdefault(operation.name, set()).update(names)
    assert {*known, *NO_TENSORS, *ELSEWHERE} == {*kernels_dsl.__all__} - {"__version__"}
    for operation in OPERATIONS:
        tensors = {
            name
            for name, parameter in parameters(operation).items()
            if name in ("epilogue_args", "aux") or any(x in str(parameter.annotation) for x in _TENSORS)
        }
        if operation.name == "bsr_sddmm":
            tensors.remove("pattern")  # a matrix, which `BsrTensor` has the parts of
        assert tensors == known[operation.name], operation.name


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """A view that stands for the same elements, whose memory holds their negatives."""
    if tensor.dtype.itemsize == 1:
        memory = (tensor.view(torch.uint8) ^ 0x80).view(tensor.dtype)
    else:
        memory = -tensor
    view = torch._neg_view(memory)
    assert view.is_neg() and view.shape == tensor.shape
    return view


def _memory(value: Any) -> Iterator[tuple[int, int]]:
    """(first, last) address of each tensor and place that a kernel is given."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _memory(item)
    elif isinstance(value, torch.Tensor) and value.numel():
        assert not value.is_neg()
        yield value.data_ptr(), value.data_ptr() + value.untyped_storage().nbytes() - 1
    elif isinstance(value, Address):
        yield int(value), int(value)


def _check_apart(calls: list[recording.RecordedCall], tensor: torch.Tensor, path: str) -> None:
    """No kernel is given the tensor's memory."""
    first = tensor.untyped_storage().data_ptr()
    end = first + tensor.untyped_storage().nbytes()
    for call in calls:
        for low, high in _memory((*call.args, *call.constants.values())):
            assert high < first or low >= end, f"{path} goes to {call.function.name} as it lies in memory"


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("operation", "path"), _cases(outputs=False))
def test_negated_inputs_are_written_out(operation: Operation, path: str, arch: str) -> None:
    """Not even in a second call, which may be found by what was kept of the first."""
    arguments = operation.arguments()
    view = _negated(value_at(arguments, path))
    arguments = with_value(arguments, path, view)
    for _ in range(2):
        with torch.no_grad(), recording.record(arch) as calls:
            operation(**arguments)
        assert calls
        _check_apart(calls, view, path)


@pytest.mark.parametrize(("operation", "path"), _cases(outputs=True))
def test_negated_outputs_are_refused(operation: Operation, path: str) -> None:
    arguments = operation.arguments()
    arguments = with_value(arguments, path, _negated(value_at(arguments, path)))
    with torch.no_grad(), recording.record("sm_90a") as calls:
        with pytest.raises(ValueError, match=f"^{_pattern(path)} is a view that torch negates lazily"):
            operation(**arguments)
    assert not calls


def _pattern(path: str) -> str:
    return path.replace("[", r"\[").replace("]", r"\]").replace(".", r"\.")


def _others(tensor: torch.Tensor) -> dict[str, Any]:
    """Tensors that are not plain ones, by kind."""
    made: dict[str, Any] = {"a list": tensor.tolist() if tensor.dtype.itemsize > 1 else [1.0]}
    made["a string"] = "x"
    made["a sparse tensor"] = torch.ones(tensor.shape).to_sparse() if tensor.dim() else None
    if tensor.dim() > 1:
        made["a nested tensor"] = torch.nested.as_nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    made["a complex tensor"] = torch.ones(tensor.shape, dtype=torch.complex64).conj()
    made["elsewhere"] = tensor.to("meta")
    return {name: value for name, value in made.items() if value is not None}


@pytest.mark.parametrize(("operation", "path"), _cases(outputs=False) + _cases(outputs=True))
def test_what_is_no_plain_tensor_is_named(operation: Operation, path: str) -> None:
    usual = operation.arguments()
    for name, value in _others(value_at(usual, path)).items():
        arguments = with_value(operation.arguments(), path, value)
        with torch.no_grad(), recording.record("sm_90a") as calls:
            with pytest.raises((TypeError, ValueError)) as caught:
                operation(**arguments)
        assert not calls
        words = str(caught.value)
        # A first tensor that is elsewhere is the one that the others should be with.
        assert path in words or (name == "elsewhere" and "meta" in words), (name, words)


class Marked(torch.Tensor):
    """A class of the user's, which sees calls as operators."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"Marked has no {function}")


@pytest.mark.parametrize(("operation", "path"), _cases(outputs=False) + _cases(outputs=True))
def test_classes_of_tensors_are_not_read_past(operation: Operation, path: str) -> None:
    """They are seen as operators, or refused: what a class stands for is not what its memory holds."""
    usual = operation.arguments()
    value = torch.Tensor._make_subclass(Marked, value_at(usual, path))
    arguments = with_value(usual, path, value)
    with torch.no_grad(), recording.record("sm_90a") as calls:
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
            operation(**arguments)
    assert "Marked" in str(caught.value)
    _check_apart(calls, value, path)


def test_a_parameter_is_plain() -> None:
    x = torch.nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    with torch.no_grad(), recording.record("sm_90a") as calls:
        kernels_dsl.gemm(x, x)
    assert len(calls) == 1 and calls[0].args[0].data_ptr() == x.data_ptr()


def test_the_values_of_negated_views_of_fp8() -> None:
    from kernels_dsl.checks.eager_path import written_out

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        memory = torch.randn(64).to(dtype)
        made = written_out((torch._neg_view(memory),))
        assert made is not None and torch.equal(made[0].float(), -memory.float())


def test_supports_knows_the_layout_of_what_is_written_out():
    """A negated view of one row for all is written out in full, with rows of its own alignment."""
    a = torch.ones(16, 768)
    b = torch._neg_view(torch.ones(1, 514)).expand(768, 514)
    config = kernels_dsl.Sm80GemmConfig(
        128, 64, 16, 4, warps_m=2, warps_n=2, copy_bytes_a=16, copy_bytes_b=16
    )
    with emulator.run(arch="sm_90a"):
        reason = kernels_dsl.supports(a, b, config=config)
        assert reason is not None and "copy_bytes_b is 16" in reason
        with pytest.raises(ValueError, match="copy_bytes_b is 16"):
            kernels_dsl.gemm(a, b, config=config)
