"""The launch that a caller keeps for later calls, under the emulator: refused where a GPU would refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowering.errors import ArgumentValueError
from lowering.function import JitFunction
from lowering.signature import ArgumentClass, TensorClass, TupleClass


def emulated_launch(
    function: JitFunction, args: Sequence[Any], constants: dict[str, Any]
) -> Callable[..., Any]:
    """Launches `function` in the emulator, on arguments that the kernel for `args` serves.

    A GPU's bare launch goes past the look-up: it runs the kernel of the first call. Calling the function
    again would find another kernel for another signature, and hide that the first one does not fit.
    """
    first = function.signature(*args)

    def launch(*values: Any) -> Any:
        classes = function.signature(*values)
        for parameter, wanted, found in zip(function.runtime_parameters, first, classes):
            if not serves(wanted, found):
                raise ArgumentValueError(
                    f"argument {parameter.name!r} of {function.name!r} is {found}, and the kernel that is "
                    f"kept for this launch was made for {wanted}"
                )
        return function(*values, **constants)

    return launch


def serves(wanted: ArgumentClass, found: ArgumentClass) -> bool:
    """Says whether a kernel made for an argument of the class `wanted` takes one of the class `found`."""
    if isinstance(wanted, TensorClass) and isinstance(found, TensorClass):
        return (
            wanted.dtype == found.dtype
            and len(wanted.strides) == len(found.strides)
            and all(a is None or a == b for a, b in zip(wanted.strides, found.strides))
            and found.align % wanted.align == 0
            and wanted.wide_strides >= found.wide_strides
            and wanted.wide_shape >= found.wide_shape
        )
    if isinstance(wanted, TupleClass) and isinstance(found, TupleClass):
        return len(wanted.items) == len(found.items) and all(map(serves, wanted.items, found.items))
    return wanted == found
