"""PyTorch tensors on a "cuda" device that is this CPU.

Every storage remembers whether the program put it on the GPU: factories and copies with a CUDA device mark
it, and a dispatch mode marks the results of operations on marked tensors. ``device`` and ``is_cuda``
answer from the marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.trace_rules
import torch.utils._device
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .memory import Extent
from .patches import Patches

_PRUNE = 4096
_TENSOR_FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided")
_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_BUILT_IN = ("aten", "prim", "prims", "profiler")
_REAL_DEVICE = torch._C.TensorBase.device.__get__


def is_cuda(device: Any) -> bool:
    """True if a device argument means a GPU: ``"cuda:0"``, ``torch.device("cuda")`` or an index."""
    if isinstance(device, bool):
        return False
    if isinstance(device, (str, torch.device)):
        return str(device).split(":")[0] == "cuda"
    return isinstance(device, int)


def _host(device: Any) -> Any:
    return "cpu" if is_cuda(device) else device


class Placement(TorchDispatchMode):
    """Storages on the pretended GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, StorageWeakRef] = {}

    def on_gpu(self, tensor: Any) -> bool:
        """True if the program sees this tensor on a GPU."""
        storage = _storage(tensor)
        found = self._marked.get(storage._cdata) if storage is not None else None
        return found is not None and not found.expired()

    def mark(self, tensor: Any) -> Any:
        """Put a tensor's storage on the GPU."""
        storage = _storage(tensor)
        if storage is not None and storage._cdata not in self._marked:
            if len(self._marked) >= _PRUNE:
                self._marked = {k: v for k, v in self._marked.items() if not v.expired()}
            self._marked[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def unmark(self, tensor: Any) -> Any:
        """Put a tensor's storage on the host."""
        storage = _storage(tensor)
        if storage is not None:
            self._marked.pop(storage._cdata, None)
        return tensor

    def allocations(self) -> Iterator[Extent]:
        """The storages on the pretended GPU that something still holds."""
        for reference in list(self._marked.values()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes():
                yield Extent(f"a tensor of {storage.nbytes()} bytes", storage.data_ptr(), storage.nbytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _BUILT_IN:
            result = func(*args, **kwargs)
        else:
            # An operator of the program: its CUDA kernel, whose own operations are seen here again.
            with self:
                result = func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        if any(isinstance(t, torch.Tensor) and self.on_gpu(t) for t in tree_leaves((args, kwargs))):
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor):
                    self.mark(t)
        return result

    def install(self, patches: Patches) -> None:
        """Replace what takes or tells a device."""
        # A dispatch mode brings dynamo in, which wants to see PyTorch as it is.
        torch._dynamo.trace_rules.get_torch_obj_rule_map()
        for constructor in torch.utils._device._device_constructors():
            name = constructor.__name__
            if getattr(torch, name, None) is constructor:
                patches.set(torch, name, self._factory(constructor))
        for name in _LIKE:
            patches.set(torch, name + "_like", self._factory(vars(torch)[name + "_like"]))
        for name in _TENSOR_FACTORIES:
            patches.set(torch.Tensor, name, self._factory(getattr(torch.Tensor, name)))
        self._moves(patches)
        self._properties(patches)
        self._settings(patches)

    def _factory(self, original: Any) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is None:
                return original(*args, **kwargs)
            kwargs["device"] = _host(device)
            kwargs.pop("pin_memory", None)
            made = original(*args, **kwargs)
            shared = _shared(made, args[0] if args else None)  # as_tensor, asarray
            if shared and is_cuda(device) == self.on_gpu(made):
                return made
            made = made.clone() if shared else made
            return self.mark(made) if is_cuda(device) else self.unmark(made)

        return make

    def _moves(self, patches: Patches) -> None:
        move = torch.Tensor.to

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = _wanted_device(args, kwargs)
            if wanted is None:
                return move(tensor, *args, **kwargs)
            if isinstance(wanted, torch.Tensor):
                on_gpu = self.on_gpu(wanted)
            else:
                on_gpu = is_cuda(wanted)
                kwargs = {k: _host(v) if k == "device" else v for k, v in kwargs.items()}
                args = (_host(args[0]), *args[1:]) if args else args
            moved = move(tensor, *args, **kwargs)
            if moved.device.type not in ("cpu", "cuda") or on_gpu == self.on_gpu(moved):
                return moved
            moved = moved.clone() if _shared(moved, tensor) else moved
            return self.mark(moved) if on_gpu else self.unmark(moved)

        def cuda(tensor: Any, device: Any = None, non_blocking: bool = False, **_: Any) -> Any:
            return to(tensor, "cuda")

        def cpu(tensor: Any, **_: Any) -> Any:
            return to(tensor, "cpu")

        patches.set(torch.Tensor, "to", to)
        patches.set(torch.Tensor, "cuda", cuda)
        patches.set(torch.Tensor, "cpu", cpu)
        patches.set(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
        patches.set(torch.Tensor, "record_stream", lambda tensor, stream: None)

    def _properties(self, patches: Patches) -> None:
        gpu = torch.device("cuda", 0)

        def device(tensor: Any) -> torch.device:
            return gpu if self.on_gpu(tensor) else _REAL_DEVICE(tensor)

        patches.set(torch.Tensor, "device", property(device))
        patches.set(torch.Tensor, "is_cuda", property(self.on_gpu))
        patches.set(torch.Tensor, "is_cpu", property(lambda tensor: device(tensor).type == "cpu"))
        patches.set(torch.Tensor, "get_device", lambda tensor: 0 if self.on_gpu(tensor) else -1)
        for name in ("__dlpack__", "__dlpack_device__", "numpy"):
            patches.set(torch.Tensor, name, self._on_host(getattr(torch.Tensor, name)))

    def _on_host(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method that sees the tensor where it really is."""

        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.on_gpu(tensor):
                return original(tensor, *args, **kwargs)
            if original.__name__ == "numpy":
                raise TypeError("can't convert a cuda tensor to numpy: use Tensor.cpu() first")
            if kwargs.get("stream") is not None:
                kwargs["stream"] = -1
            self.unmark(tensor)
            try:
                return original(tensor, *args, **kwargs)
            finally:
                self.mark(tensor)

        return call

    def _settings(self, patches: Patches) -> None:
        generator, context = torch.Generator, torch.utils._device.DeviceContext

        class Generator(generator):  # type: ignore[misc,valid-type]
            def __new__(cls, device: Any = "cpu") -> Any:
                return super().__new__(cls, device=_host(device))

        initialise, handle = context.__init__, context.__torch_function__
        constructors = torch.utils._device._device_constructors()

        def enter(made: Any, device: Any) -> None:
            initialise(made, torch.device(_host(device)))
            made.on_gpu = is_cuda(device)

        def factory(made: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = handle(made, func, types, args, kwargs)
            chosen = func in constructors and not (kwargs or {}).get("device")
            return self.mark(result) if chosen and getattr(made, "on_gpu", False) else result

        patches.set(torch, "Generator", Generator)
        patches.set(context, "__init__", enter)
        patches.set(context, "__torch_function__", factory)


def _storage(tensor: Any) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, AttributeError):  # without memory
        return None


def _shared(made: Any, source: Any) -> bool:
    if not isinstance(source, torch.Tensor):
        return False
    one, other = _storage(made), _storage(source)
    return one is not None and other is not None and one._cdata == other._cdata


def _wanted_device(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The device or tensor that a call of ``Tensor.to`` names, or None."""
    first = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    return None if isinstance(first, (torch.dtype, type(None))) else first
