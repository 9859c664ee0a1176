"""Memory that a foreign program's kernels may touch: its arguments, and what pointers among them reach."""

from __future__ import annotations

import bisect
import dataclasses
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lowering.emulator.memory import extent
from lowering.emulator.views import View, view_of

_MOST_ADDRESSES = 1 << 16  # values of an int64 tensor that are looked at as addresses


class Extent(NamedTuple):
    """Bytes of the process's memory under a name."""

    name: str
    start: int
    size: int
    view: View | None = None


Allocations = Callable[[], Iterable[Extent]]


@dataclasses.dataclass
class _Found:
    """Memory that the arguments of a call tell of; ``opaque``: some hold it in ways of their own."""

    extents: list[Extent] = dataclasses.field(default_factory=list)
    addresses: list[int] = dataclasses.field(default_factory=list)
    opaque: bool = False


def reachable(
    signature: inspect.Signature | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    allocations: Allocations,
) -> list[Extent]:
    """The tensors among the arguments by parameter name, and allocations that hold an address found there."""
    names = list(signature.parameters) if signature is not None else []
    found = _Found()
    for i, value in enumerate(args):
        _collect(names[i] if i < len(names) else f"#{i}", value, found)
    for name, value in kwargs.items():
        _collect(name, value, found)
    if not found.addresses and not found.opaque:
        return found.extents
    addresses = sorted(found.addresses)
    known = {(e.start, e.size) for e in found.extents}
    for allocation in allocations():
        at = bisect.bisect_left(addresses, allocation.start)
        inside = at < len(addresses) and addresses[at] < allocation.start + allocation.size
        if (inside or found.opaque) and (allocation.start, allocation.size) not in known:
            found.extents.append(allocation)
    return found.extents


def _collect(name: str, value: Any, found: _Found) -> None:
    if value is None or isinstance(value, (bool, float, str, bytes, type)):
        return
    if isinstance(value, int):
        found.addresses.append(value)
    elif (extent := _torch_extent(name, value) or _cute_extent(name, value)) is not None:
        found.extents.append(extent)
        found.addresses += _addresses_in(value, extent)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(f"{name}[{key!r}]", item, found)
    elif isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            _collect(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", item, found)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _collect(f"{name}.{field.name}", getattr(value, field.name, None), found)
    elif (address := _address(value)) is not None:
        found.addresses.append(address)
    elif hasattr(value, "__c_pointers__"):
        found.opaque = True


def _address(value: Any) -> int | None:
    """The address that a pointer object or an integer of the DSL holds."""
    for attribute in ("_pointer", "value", "ptr"):
        inside = getattr(value, attribute, None)
        if isinstance(inside, int) and not isinstance(inside, bool):
            return inside
    return None


def _torch_extent(name: str, value: Any) -> Extent | None:
    if not hasattr(value, "untyped_storage"):
        return _array_extent(name, value)
    return Extent(f"argument {name!r}", *extent(value), view_of(f"argument {name!r}", value))


def _array_extent(name: str, value: Any) -> Extent | None:
    interface = getattr(value, "__array_interface__", None)
    if not isinstance(interface, dict):
        return None
    return Extent(f"argument {name!r}", interface["data"][0], int(value.nbytes))


def _cute_extent(name: str, value: Any) -> Extent | None:
    """The extent of a tensor of ``from_dlpack``."""
    if not hasattr(value, "load_dltensor"):
        return None
    shape, stride = tuple(value.shape), tuple(value.stride)
    if 0 in shape:
        return Extent(f"argument {name!r}", value.data_ptr, 0)
    last = sum((n - 1) * s for n, s in zip(shape, stride))
    width = value.element_type.width
    bits = 8 if width == 1 else width  # a Boolean takes a byte; narrow floats are packed
    size = -(-(last + 1) * bits // 8)
    view = View(f"argument {name!r}", value.data_ptr, shape, tuple(s * bits // 8 for s in stride), bits // 8)
    return Extent(f"argument {name!r}", value.data_ptr, size, view if bits >= 8 else None)


def _addresses_in(value: Any, extent: Extent) -> list[int]:
    """Values of a tensor of 64-bit integers, any of which may be an address."""
    width = getattr(getattr(value, "element_type", None), "width", None)
    element = width // 8 if width else value.element_size() if hasattr(value, "element_size") else 0
    floating = "loat" in str(getattr(value, "element_type", getattr(value, "dtype", "")))
    if element != 8 or floating or not 0 < extent.size <= 8 * _MOST_ADDRESSES:
        return []
    import ctypes

    return list((ctypes.c_uint64 * (extent.size // 8)).from_address(extent.start))


def live_tensors() -> Iterator[Extent]:
    """The storage of every PyTorch tensor of this process, and what the DSL's tensors hold."""
    import torch
    from cutlass.cute import runtime

    seen: set[int] = set()
    for item in gc.get_objects():
        if type(item) is runtime._Tensor:
            extent = _cute_extent("", item)
            if extent is not None and extent.start not in seen:
                yield extent._replace(name="a tensor of from_dlpack")
        if not issubclass(type(item), torch.Tensor) or item.layout is not torch.strided:
            continue
        try:
            storage = item.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor without memory
            continue
        if start and size and start not in seen:
            seen.add(start)
            yield Extent(f"a tensor of {tuple(item.shape)} {item.dtype}", start, size)
