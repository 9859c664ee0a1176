"""Operations on a block-sparse matrix. Their plans are kept with it, or with its pattern."""

from __future__ import annotations

from typing import Any, TypeVar

from kernels_dsl.ops.bsr.arguments import MatrixArguments
from kernels_dsl.ops.operation import Operation

Call = TypeVar("Call", bound=MatrixArguments)
Made = TypeVar("Made")


class MatrixOperation(Operation[Call, Made]):
    """An operation whose plans are kept with a matrix."""

    most_plans = 256  # of one matrix

    def calls_of(self, call: Call) -> dict[Any, Any]:
        """The call cache of such calls."""
        return call.plans

    plans_of = calls_of
