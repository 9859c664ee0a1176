"""The way of an argument from `attention` to the launch of its kernel: q passes few files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.ops import launch, operation
from kernels_dsl.ops.attention.operation import ATTENTION
from kernels_dsl.ops.target import Target

PACKAGE = Path(kernels_dsl.__file__).parent
MOST_FILES = 9
CONTAINERS = (tuple, list, dict)


class Launched(Exception):
    """The kernel would run now."""


def _holds(value: Any, wanted: torch.Tensor, depth: int = 4) -> bool:
    """True if `wanted` is the value or within it: containers, and records of this library."""
    if value is wanted:
        return True
    if depth == 0:
        return False
    if isinstance(value, CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
        return any(_holds(part, wanted, depth - 1) for part in parts)
    if type(value).__module__.startswith("kernels_dsl.") and not isinstance(value, type):
        return any(_holds(part, wanted, depth - 1) for part in getattr(value, "__dict__", {}).values())
    return False


class Seen:
    """A profiler that notes the library's files of which a frame has the tensor as it is entered or left."""

    def __init__(self, wanted: torch.Tensor) -> None:
        self.wanted, self.files = wanted, dict[str, None]()
        self._known: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Looks at the frame's variables."""
        code = frame.f_code
        if event not in ("call", "return") or code in self._known:
            return
        name = Path(code.co_filename)
        if name.is_relative_to(PACKAGE) and _holds(dict(frame.f_locals), self.wanted):
            self._known.add(code)
            self.files[name.relative_to(PACKAGE).as_posix()] = None


@pytest.fixture
def qkv(monkeypatch):
    """Tensors that pass for those of an H200, where a launch ends the call."""
    target = Target(DEVICES_BY_ARCH["sm_90a"], -1)
    monkeypatch.setattr(operation, "target_of", lambda *_: target)
    monkeypatch.setattr(ATTENTION, "calls", {})
    monkeypatch.setattr(ATTENTION, "plans", {})

    def compile_and_launch(*_):
        raise Launched

    monkeypatch.setattr(launch, "launcher_of", compile_and_launch)
    return [torch.empty(1, 256, 2, 64, dtype=torch.bfloat16) for _ in range(3)]


def test_q_passes_few_files_on_its_way_to_the_launch(qkv):
    seen = Seen(qkv[0])
    sys.setprofile(seen)
    try:
        with pytest.raises(Launched):
            kernels_dsl.attention(*qkv, causal=True)
    finally:
        sys.setprofile(None)
    files = list(seen.files)
    assert files[0] == "ops/attention/attention.py"
    assert "ops/launch.py" in files
    assert len(files) <= MOST_FILES, files
