"""Signatures: the parts of a call that decide which compiled kernel serves it.

A signature holds no sizes. A tensor is described by its dtype, its rank, what each mode's stride may be
taken for, and one alignment class, so that another problem size finds the same kernel:

* a stride is the static 0 of a broadcast view, the static 1 of the contiguous mode, or symbolic;
* the alignment class is the largest of 16, 8, 4, 2 and 1 bytes that divides the base address and every
  symbolic stride. A vector access must respect all of them, so one class per tensor says what a kernel
  can use, and keeps the number of kernels small;
* strides are 64-bit once the tensor spans 2**31 elements, or one of them, a mode of size 1's too, is as long.

A mode of size 1 has no stride worth the name (PyTorch leaves any value there), so it is symbolic and has
no say in the alignment class; but a launch with 32-bit strides refuses one that does not fit.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowering.address import Address
from lowering.errors import ArgumentTypeError, ArgumentValueError
from lowering.records import frozen

MAX_ALIGN = 16
WIDE_EXTENT = 1 << 31

# PyTorch's dtype name -> (the DSL's type name, bytes).
TENSOR_DTYPES = {
    "float64": ("Float64", 8),
    "float32": ("Float32", 4),
    "float16": ("Float16", 2),
    "bfloat16": ("BFloat16", 2),
    "float8_e4m3fn": ("Float8E4M3FN", 1),
    "float8_e5m2": ("Float8E5M2", 1),
    "float8_e8m0fnu": ("Float8E8M0FNU", 1),
    "int64": ("Int64", 8),
    "int32": ("Int32", 4),
    "int16": ("Int16", 2),
    "int8": ("Int8", 1),
    "uint64": ("Uint64", 8),
    "uint32": ("Uint32", 4),
    "uint16": ("Uint16", 2),
    "uint8": ("Uint8", 1),
}
SCALAR_TYPES = {
    "Boolean", "Int8", "Int16", "Int32", "Int64", "Uint8", "Uint16", "Uint32", "Uint64", "Float32", "Float64",
}  # fmt: skip


@frozen
class TensorClass:
    """A tensor argument, without its sizes. ``strides``: 0, 1 or None (symbolic) per mode."""

    dtype: str
    strides: tuple[int | None, ...]
    align: int
    wide_strides: bool
    wide_shape: bool

    @property
    def itemsize(self) -> int:
        return TENSOR_DTYPES[self.dtype][1]

    @property
    def stride_divisibility(self) -> int:
        """Elements that divide every symbolic stride."""
        return max(self.align // self.itemsize, 1)

    def __str__(self) -> str:
        strides = ",".join("s" if s is None else str(s) for s in self.strides)
        wide = "w" * (self.wide_strides + self.wide_shape)
        return f"{self.dtype}[{strides}]a{self.align}{wide}"


@frozen
class ScalarClass:
    """A number passed at run time, of the DSL's type ``type``."""

    type: str

    def __str__(self) -> str:
        return self.type


@frozen
class NoneClass:
    """An argument that is None: the kernel is traced without it."""

    def __str__(self) -> str:
        return "none"


@frozen
class TupleClass:
    """A tuple of arguments."""

    items: tuple[ArgumentClass, ...]

    def __str__(self) -> str:
        return "(" + ";".join(map(str, self.items)) + ")"


ArgumentClass = TensorClass | ScalarClass | NoneClass | TupleClass


@frozen
class Parameter:
    """One parameter of a host function. ``annotation`` is source text, '' if there is none."""

    name: str
    annotation: str
    has_default: bool

    @property
    def is_stream(self) -> bool:
        return self.name == "stream"

    @property
    def is_constexpr(self) -> bool:
        return "Constexpr" in self.annotation

    @property
    def is_runtime(self) -> bool:
        return not self.is_stream and not self.is_constexpr

    @property
    def scalar_type(self) -> str | None:
        last = self.annotation.rsplit(".", 1)[-1]
        return last if last in SCALAR_TYPES else None


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The parameters of a function, annotations as text.

    :raises ArgumentTypeError: for ``*args`` or ``**kwargs``, which a compiled function cannot have.
    """
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ArgumentTypeError(
                f"host function {function.__qualname__!r} has the parameter {str(parameter)!r}: "
                "every parameter must be named"
            )
        annotation: Any = parameter.annotation
        if annotation is parameter.empty:
            annotation = ""
        elif not isinstance(annotation, str):
            name = getattr(annotation, "__name__", str(annotation))
            annotation = str(annotation) if "Constexpr" in str(annotation) else name
        found.append(Parameter(parameter.name, annotation, parameter.default is not parameter.empty))
    return tuple(found)


def parameters_in_source(function: ast.FunctionDef) -> tuple[Parameter, ...]:
    """The parameters of a function that is known by its source alone."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [False] * (len(positional) - len(arguments.defaults)) + [True] * len(arguments.defaults)
    defaults += [default is not None for default in arguments.kw_defaults]
    return tuple(
        Parameter(a.arg, ast.unparse(a.annotation).strip("'\"") if a.annotation else "", has_default)
        for a, has_default in zip([*positional, *arguments.kwonlyargs], defaults)
    )


def classify(parameters: Sequence[Parameter], args: Sequence[Any]) -> tuple[ArgumentClass, ...]:
    """The signature of a call.

    :param parameters: the runtime parameters of the host function, in order.
    :param args: the caller's runtime arguments: torch tensors, numbers, None, tuples of those.
    :raises ArgumentTypeError, ArgumentValueError: naming the argument, what it was and what it must be.
    """
    if len(args) != len(parameters):
        names = ", ".join(p.name for p in parameters)
        raise ArgumentTypeError(
            f"expected {len(parameters)} runtime arguments ({names}), got {len(args)}; "
            "configuration is passed by keyword"
        )
    return tuple(_classify_one(p.name, arg, p.scalar_type) for p, arg in zip(parameters, args))


def _classify_one(name: str, arg: Any, scalar_type: str | None) -> ArgumentClass:
    if arg is None:
        return NoneClass()
    if isinstance(arg, (tuple, list)):
        return TupleClass(tuple(_classify_one(f"{name}[{i}]", item, None) for i, item in enumerate(arg)))
    if isinstance(arg, (bool, int, float)):
        return _classify_scalar(name, arg, scalar_type)
    if hasattr(arg, "data_ptr") and hasattr(arg, "stride"):
        if scalar_type is not None:
            raise ArgumentTypeError(f"argument {name!r}: expected a number ({scalar_type}), got a tensor")
        return tensor_class(name, arg)
    raise ArgumentTypeError(
        f"argument {name!r}: expected a torch tensor, a number, None or a tuple of those, "
        f"got {type(arg).__name__}"
    )


def is_wide(number: Any) -> bool:
    """True if a number without an annotation is an Int64: an `Address`, or what Int32 does not hold."""
    if type(number) is int:  # most are
        return not -WIDE_EXTENT <= number < WIDE_EXTENT
    return isinstance(number, Address) or (
        isinstance(number, int) and not -WIDE_EXTENT <= number < WIDE_EXTENT
    )


def _classify_scalar(name: str, arg: bool | int | float, scalar_type: str | None) -> ScalarClass:
    if scalar_type is None:
        integer = "Int64" if is_wide(arg) else "Int32"
        scalar_type = "Boolean" if isinstance(arg, bool) else integer if isinstance(arg, int) else "Float32"
    if isinstance(arg, float) and not scalar_type.startswith("Float"):
        raise ArgumentTypeError(
            f"argument {name!r}: expected an integer ({scalar_type}), got the float {arg!r}"
        )
    if scalar_type.startswith(("Int", "Uint")):
        bits, unsigned = int(scalar_type.lstrip("UIint")), scalar_type.startswith("U")
        low, high = (0, 1 << bits) if unsigned else (-(1 << bits - 1), 1 << bits - 1)
        if not low <= arg < high:
            raise ArgumentValueError(f"argument {name!r}: {arg} is outside the range of {scalar_type}")
    return ScalarClass(scalar_type)


def tensor_class(name: str, tensor: Any) -> TensorClass:
    """The class of one torch tensor (CUDA, CPU or meta). ``name`` is for the errors."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in TENSOR_DTYPES:
        hint = "; view it as torch.uint8" if dtype == "bool" else ""
        raise ArgumentTypeError(
            f"argument {name!r}: dtype {dtype} is not supported by compiled kernels{hint}"
        )
    if str(tensor.layout) != "torch.strided":
        raise ArgumentTypeError(f"argument {name!r}: expected a strided tensor, got layout {tensor.layout}")
    itemsize = TENSOR_DTYPES[dtype][1]
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if not shape:
        raise ArgumentValueError(
            f"argument {name!r}: expected a tensor with at least one mode, got a 0-d tensor"
        )
    ones = [i for i, s in enumerate(strides) if s == 1]
    contiguous = max(ones, key=lambda i: (shape[i] > 1, i), default=-1)
    classes: list[int | None] = []
    address = tensor.storage_offset() * itemsize if tensor.device.type == "meta" else tensor.data_ptr()
    divides = address | MAX_ALIGN
    for i, (size, stride) in enumerate(zip(shape, strides)):
        if i == contiguous:
            classes.append(1)
        elif stride == 0 and size > 1:
            classes.append(0)
        else:
            classes.append(None)
            if size != 1:
                divides |= stride * itemsize
    align = divides & -divides
    if address % itemsize:
        raise ArgumentValueError(
            f"argument {name!r}: address {address:#x} is not a multiple of its element size, {itemsize} bytes"
        )
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if 0 not in shape else 0
    wide_shape = max(shape) >= WIDE_EXTENT
    wide_strides = wide_shape or max(extent, *strides) >= WIDE_EXTENT
    return TensorClass(dtype, tuple(classes), align, wide_strides, wide_shape)


def named_tensors(
    parameters: Sequence[Parameter], args: Sequence[Any], by_address: bool = False
) -> list[tuple[str, Any]]:
    """The tensors of a call; `by_address`: and those behind an `Address`."""
    found: list[tuple[str, Any]] = []
    for i, arg in enumerate(args):
        found += _tensors_in(parameters[i].name if i < len(parameters) else f"#{i}", arg, by_address)
    return found


def _tensors_in(name: str, arg: Any, by_address: bool) -> Iterator[tuple[str, Any]]:
    # Not a closure that calls itself: such a one keeps what it has found until the cycles are collected, on a
    # GPU all tensors of a first call.
    if isinstance(arg, (tuple, list)):
        for i, item in enumerate(arg):
            yield from _tensors_in(f"{name}[{i}]", item, by_address)
    elif hasattr(arg, "data_ptr"):
        yield name, arg
    elif by_address and isinstance(arg, Address):
        yield name, arg.tensor


def key_of(parts: dict[str, Any]) -> str:
    """The key of a kernel: the SHA-256 of its parts as canonical JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
