"""A launch that is kept, under the emulator: refused where a GPU's would not fit its arguments."""

from __future__ import annotations

import pytest
import torch

from lowering.errors import ArgumentValueError
from lowering.kept import emulated_launch, serves
from lowering.signature import NoneClass, Parameter, ScalarClass, TensorClass, TupleClass, tensor_class

ROWS = TensorClass("bfloat16", (None, 1), 16, False, False)
LESS_ALIGNED = TensorClass("bfloat16", (None, 1), 8, False, False)
WIDE = TensorClass("bfloat16", (None, 1), 16, True, False)
ANY_STRIDES = TensorClass("bfloat16", (None, None), 16, False, False)


@pytest.mark.parametrize(
    ("wanted", "found", "taken"),
    [
        (ROWS, ROWS, True),
        (LESS_ALIGNED, ROWS, True),
        (ROWS, LESS_ALIGNED, False),
        (WIDE, ROWS, True),
        (ROWS, WIDE, False),
        (ANY_STRIDES, ROWS, True),
        (ROWS, ANY_STRIDES, False),
        (ROWS, TensorClass("float16", (None, 1), 16, False, False), False),
        (ROWS, TensorClass("bfloat16", (None, None, 1), 16, False, False), False),
        (TupleClass((LESS_ALIGNED,)), TupleClass((ROWS,)), True),
        (TupleClass((ROWS,)), TupleClass((LESS_ALIGNED,)), False),
        (TupleClass((ROWS,)), TupleClass((ROWS, ROWS)), False),
        (ScalarClass("Int32"), ScalarClass("Int32"), True),
        (ScalarClass("Int32"), ScalarClass("Float32"), False),
        (ROWS, NoneClass(), False),
    ],
)
def test_serves(wanted, found, taken):
    assert serves(wanted, found) is taken


def test_a_kept_launch_refuses_what_its_kernel_does_not_take():
    launched = []

    class Copy:
        """Stands for a function of the lowering layer: notes launches."""

        name = "copy"
        runtime_parameters = (Parameter("x", "cute.Tensor", False),)
        signature = staticmethod(lambda x: (tensor_class("x", x),))

        def __call__(self, x, width):
            launched.append((x.data_ptr(), width))

    memory = torch.zeros(64, dtype=torch.bfloat16)
    launch = emulated_launch(Copy(), (memory[8:24],), {"width": 8})
    launch(memory[16:32])
    with pytest.raises(ArgumentValueError, match=r"argument 'x' of 'copy' is bfloat16\[1\]a2.*\[1\]a16"):
        launch(memory[1:17])
    assert launched == [(memory.data_ptr() + 32, 8)]
