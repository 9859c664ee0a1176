"""`gemm_reduce` as an operator of PyTorch."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels_dsl.ops.gemm.reduced_arguments import Reduced, ReducedArguments
from kernels_dsl.ops.gemm.reduced_plan import reduced_shape
from kernels_dsl.ops.operators import Operator, check_as_operator


class ReducedOperator(Operator):
    """`kernels_dsl::gemm_reduce`, with two results."""

    results = "(Tensor, Tensor)"

    def fake(self, call: ReducedArguments) -> Reduced:
        """Tensors like the call's results, not written."""
        described = self.operation.describe(call)
        reduced = call.a.new_empty(reduced_shape(described), dtype=torch.float32)
        return Reduced(super().fake(call), reduced)

    def __call__(self, call: ReducedArguments) -> Reduced:
        """As of `Operator`."""
        check_as_operator(self.operation.name, call)
        written = call.written()
        if not written:
            return Reduced(*super().__call__(call))
        both = Reduced(*(written.get(name, made) for name, made in zip(call.outputs, self.fake(call))))
        super().__call__(replace(call, out=both.out, reduced_out=both.reduced))
        return both
