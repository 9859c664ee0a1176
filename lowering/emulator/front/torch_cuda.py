"""``torch.cuda`` as with one GPU, streams in order, events without time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from lowering.emulator.capture import DeviceFacts
from lowering.emulator.reports import EmulatorError

from .driver import ELAPSED_MS, L2_BYTES, MEMORY_BYTES
from .patches import Patches

_streams = itertools.count(0x1000)


class Stream:
    """A stream: what is launched in it has run when the launch returns."""

    def __init__(
        self, device: Any = None, priority: int = 0, stream_ptr: int | None = None, **_: Any
    ) -> None:
        self.cuda_stream = next(_streams) if stream_ptr is None else stream_ptr
        self.device, self.priority = torch.device("cuda", 0), priority

    @property
    def stream_id(self) -> int:
        """The handle."""
        return self.cuda_stream

    @property
    def device_index(self) -> int:
        """The device's number."""
        return 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def query(self) -> bool:
        """All has run."""
        return True

    def synchronize(self) -> None:
        """All has run."""

    def wait_event(self, event: Any) -> None:
        """All has run."""

    def wait_stream(self, stream: Any) -> None:
        """All has run."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event if event is not None else Event()


class Event:
    """An event that has happened; between any two is a millisecond, since time is not modelled."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_event = next(_streams)

    def record(self, stream: Any = None) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """All has run."""

    def wait(self, stream: Any = None) -> None:
        """All has run."""

    def query(self) -> bool:
        """All has run."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """A number that a program can divide by."""
        return ELAPSED_MS


class _Graph:
    """CUDA graphs are not emulated."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise EmulatorError("CUDA graphs are not emulated: launch the kernels directly")


@contextmanager
def _context(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def answers(facts: DeviceFacts, name: str) -> dict[str, Any]:
    """The functions and classes of ``torch.cuda`` by name."""
    major, minor = facts.attribute(75), facts.attribute(76)
    default = Stream(stream_ptr=0)
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, total_memory=MEMORY_BYTES, multi_processor_count=facts.sms,
        L2_cache_size=L2_BYTES, warp_size=32, regs_per_multiprocessor=facts.attribute(82),
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=facts.attribute(97),
        shared_memory_per_multiprocessor=facts.attribute(81),
        max_threads_per_multi_processor=facts.attribute(39), is_integrated=0, is_multi_gpu_board=0,
        gcnArchName="", clock_rate=1_755_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
    )  # fmt: skip
    seed: Callable[[int], Any] = torch.default_generator.manual_seed
    made: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: (major, minor), "get_device_properties": lambda *_: properties,
        "current_stream": lambda *_: default, "default_stream": lambda *_: default,
        "Stream": Stream, "Event": Event, "ExternalStream": lambda pointer, *_: Stream(stream_ptr=pointer),
        "stream": _context, "device": _context, "device_of": _context, "set_stream": _nothing,
        "manual_seed": seed, "manual_seed_all": seed, "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "is_current_stream_capturing": lambda: False, "is_bf16_supported": lambda *_, **__: True,
        "memory_stats": lambda *_: {}, "can_device_access_peer": lambda *_: False,
        "CUDAGraph": _Graph, "graph": _Graph, "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "current_blas_handle": lambda: 0, "_lazy_init": _nothing, "_lazy_call": _nothing,
    }  # fmt: skip
    for quiet in (
        "init",
        "synchronize",
        "set_device",
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
    ):
        made[quiet] = _nothing
    for number in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        made[number] = lambda *_: 0
    return made


def install(patches: Patches, facts: DeviceFacts, name: str) -> None:
    """Replace the names of ``torch.cuda``, and let kernels that were registered for CUDA serve."""
    for key, value in answers(facts, name).items():
        if hasattr(torch.cuda, key):
            patches.set(torch.cuda, key, value)
    for key in ("range_push", "range_pop", "mark"):
        patches.set(torch.cuda.nvtx, key, _nothing)
    patches.set(torch.cuda.nvtx, "range", _context)
