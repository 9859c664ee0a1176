"""Plans, which are kept for later calls, hold no tensor of the first one: its memory is freed with it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels_dsl.aot.calls.call import Call
from kernels_dsl.ops.operation import Operation
from lowering import CompileRefused, cache, emulator
from tests.aot.small_calls import SMALL
from tests.aot.worker import Values


class Watched(Values):
    """Makes tensors and watches them."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.made: list[weakref.ref[torch.Tensor]] = []

    def values(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        made = super().values(*shape, dtype=dtype)
        self.made.append(weakref.ref(made))
        return made


@pytest.mark.parametrize("call", SMALL, ids=lambda call: call.label.strip().replace(" ", "-"))
def test_plans_of_refused_calls(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Nothing may be compiled, so that a call makes its plan and gets no further. Plans are kept here, as on a
    # GPU; the emulator's are not.
    monkeypatch.setattr(cache, "_chosen_dir", tmp_path)
    monkeypatch.setattr(cache, "_refuse", True)
    plans: list[Any] = []
    new_plan = Operation.new_plan

    def kept(self: Operation, call: Any) -> Any:
        plans.append(new_plan(self, call))
        return plans[-1]

    monkeypatch.setattr(Operation, "new_plan", kept)
    source = Watched()
    gc.collect()
    gc.disable()
    try:
        with emulator.run(arch="sm_90a"):
            with contextlib.suppress(CompileRefused):  # not where another test has loaded its kernels
                call.run(source)
        assert source.made and all(made() is None for made in source.made)
    finally:
        gc.enable()
