"""Signatures: what two tensors must share to be served by one kernel, and that no claim is false."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from lowering import Address
from lowering.errors import ArgumentTypeError, ArgumentValueError
from lowering.function import _add_other
from lowering.signature import (
    NoneClass,
    Parameter,
    ScalarClass,
    TupleClass,
    classify,
    named_tensors,
    tensor_class,
)


def meta(shape, stride=None, dtype=torch.bfloat16, offset=0):
    if stride is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    storage = torch.empty(1 << 40, dtype=dtype, device="meta")
    return storage.as_strided(shape, stride, offset)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (meta((64, 128)), "bfloat16[s,1]a16"),
        (meta((64, 128)).t(), "bfloat16[1,s]a16"),
        (meta((64, 100)), "bfloat16[s,1]a8"),
        (meta((64, 101)), "bfloat16[s,1]a2"),
        (meta((64, 128), (128, 1), offset=1), "bfloat16[s,1]a2"),
        (meta((64, 128), (128, 1), offset=4), "bfloat16[s,1]a8"),
        (meta((4, 64, 128), (0, 128, 1)), "bfloat16[0,s,1]a16"),
        (meta((64, 128), (0, 1)), "bfloat16[0,1]a16"),
        (meta((64, 128), (1, 0)), "bfloat16[1,0]a16"),
        (meta((64, 128), (256, 2)), "bfloat16[s,s]a4"),
        (meta((64, 128), (1, 1)), "bfloat16[s,1]a2"),
        # Modes of size 1: their strides say nothing, whatever they are.
        (meta((1, 128), (7, 1)), "bfloat16[s,1]a16"),
        (meta((64, 1), (1, 1)), "bfloat16[1,s]a16"),
        (meta((64, 1), (8, 1)), "bfloat16[s,1]a16"),
        (meta((64, 1), (8, 3)), "bfloat16[s,s]a16"),
        (meta((1, 64, 128), (0, 128, 1)), "bfloat16[s,s,1]a16"),
        (meta((1, 1), (1, 1)), "bfloat16[s,1]a16"),
        (meta((128,), dtype=torch.float32), "float32[1]a16"),
        (meta((3, 5), (8, 1), torch.float8_e4m3fn), "float8_e4m3fn[s,1]a8"),
        # 2**31 elements or more: 64-bit strides; a mode that long: 64-bit shape too.
        (meta((1 << 15, 1 << 16)), "bfloat16[s,1]a16w"),
        (meta((2, 16), (1 << 31, 1)), "bfloat16[s,1]a16w"),
        (meta((1, 16), (1 << 40, 1)), "bfloat16[s,1]a16w"),  # which a 32-bit stride would be refused
        (meta((1, 16), ((1 << 31) - 8, 1)), "bfloat16[s,1]a16"),
        (meta((1 << 31,)), "bfloat16[1]a16ww"),
        (meta(((1 << 15), (1 << 16) - 8)), "bfloat16[s,1]a16"),
    ],
)
def test_class_of_a_tensor(tensor, text):
    assert str(tensor_class("x", tensor)) == text


def test_classes_hold_what_they_claim(seed):
    """For random strided views: every claim of the class is true of the tensor it came from."""
    generator = random.Random(seed)
    storage = torch.zeros(1 << 16, dtype=torch.float16)
    for _ in range(500):
        rank = generator.randint(1, 4)
        shape = [generator.choice([1, 2, 3, 8]) for _ in range(rank)]
        stride = [generator.choice([0, 1, 2, 3, 4, 8, 24, 160, 1001]) for _ in range(rank)]
        tensor = storage.as_strided(shape, stride, generator.randint(0, 64))
        found = tensor_class("x", tensor)
        case = f"{shape} {stride} offset {tensor.storage_offset()}: {found}"
        assert tensor.data_ptr() % found.align == 0, case
        assert list(found.strides).count(1) <= 1, case
        for size, actual, claimed in zip(shape, stride, found.strides):
            if size == 1:
                assert claimed in (None, 1), case
            elif claimed is None:
                assert actual % found.stride_divisibility == 0, case
            else:
                assert actual == claimed, case


def test_sizes_are_not_in_the_class(seed):
    generator = random.Random(seed)
    classes = {
        tensor_class("x", meta((generator.randint(2, 999), 8 * generator.randint(1, 99)))) for _ in range(50)
    }
    assert len(classes) == 1


def parameter(annotation="", name="x"):
    return Parameter(name, annotation, False)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, "", ScalarClass("Int32")),
        (3, "cutlass.Int64", ScalarClass("Int64")),
        (3, "Float32", ScalarClass("Float32")),
        (0.5, "", ScalarClass("Float32")),
        (True, "", ScalarClass("Boolean")),
        (None, "cute.Tensor", NoneClass()),
        (
            (1.0, (None, 2)),
            "",
            TupleClass((ScalarClass("Float32"), TupleClass((NoneClass(), ScalarClass("Int32"))))),
        ),
        ((), "", TupleClass(())),
    ],
)
def test_class_of_other_arguments(value, annotation, expected):
    assert classify([parameter(annotation)], [value]) == (expected,)


@pytest.mark.parametrize(
    ("value", "annotation", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.bool), "", ArgumentTypeError, "'x'.*bool.*uint8"),
        (torch.zeros(3, dtype=torch.complex64), "", ArgumentTypeError, "'x'.*complex64"),
        (torch.zeros(()), "", ArgumentValueError, "'x'.*0-d"),
        (torch.eye(3).to_sparse(), "", ArgumentTypeError, "'x'.*sparse"),
        (torch.zeros(3), "Int32", ArgumentTypeError, "'x'.*number.*Int32.*tensor"),
        (2**31, "Int32", ArgumentValueError, "'x'.*2147483648.*Int32"),
        (-1, "cutlass.Uint8", ArgumentValueError, "'x'.*-1.*Uint8"),
        (1.5, "Int64", ArgumentTypeError, "'x'.*integer.*1.5"),
        ("text", "", ArgumentTypeError, "'x'.*str"),
        ((1, object()), "", ArgumentTypeError, r"'x\[1\]'.*object"),
    ],
)
def test_wrong_arguments_are_named(value, annotation, error, message):
    with pytest.raises(error, match=message):
        classify([parameter(annotation)], [value])


def test_wrong_number_of_arguments():
    with pytest.raises(ArgumentTypeError, match=r"expected 2 runtime arguments \(a, b\), got 1"):
        classify([parameter(name="a"), parameter(name="b")], [1])


def test_misaligned_address():
    class Misaligned:
        """The looks of a tensor over somebody else's memory."""

        dtype, layout, shape, device = torch.float32, torch.strided, (4,), torch.device("cpu")

        def stride(self):
            return (1,)

        def data_ptr(self):
            return 0x1002

    with pytest.raises(ArgumentValueError, match=r"'x'.*0x1002.*4 bytes"):
        tensor_class("x", Misaligned())


def test_an_address_is_a_number_that_keeps_its_memory():
    tensor = torch.zeros(8)
    address = Address(tensor[4:])
    assert address == tensor.data_ptr() + 16 and address.tensor.data_ptr() == address
    parameters = [Parameter("x", "cute.Tensor", False), Parameter("memory", "Int64", False)]
    assert classify(parameters, [tensor, address]) == classify(parameters, [tensor, 1 << 40])


def test_a_number_that_int32_does_not_hold_is_wide():
    """Nothing says its type; in the memo of a jit function, too."""
    unknown = [Parameter("numbers", "tuple", False)]
    found = [
        classify(unknown, [(n,)])[0] for n in (2, -(1 << 31), 1 << 31, Address(torch.zeros(1)), True, 2.5)
    ]
    types = [item.type for each in found for item in each.items]
    assert types == ["Int32", "Int32", "Int64", "Int64", "Boolean", "Float32"]
    tokens = []
    for number in (2, 3, 1 << 40):
        token = []
        _add_other(token, (number,))
        tokens.append(token)
    assert tokens[0] == tokens[1] != tokens[2]


def test_the_tensors_of_a_call_are_freed_with_it():
    """No cycle keeps them: on a GPU each first call of a shape would hold its tensors until a collection."""
    tensors = [torch.empty(2) for _ in range(3)]
    seen = [weakref.ref(tensor) for tensor in tensors]
    args = (tensors[0], (tensors[1], 1.0, None), Address(tensors[2]))
    parameters = [Parameter(name, "", False) for name in ("a", "rest")]
    gc.disable()
    try:
        named = named_tensors(parameters, args, by_address=True)
        assert [name for name, _ in named] == ["a", "rest[0]", "#2"]
        assert [name for name, _ in named_tensors(parameters, args)] == ["a", "rest[0]"]
        del tensors, args, named
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()
