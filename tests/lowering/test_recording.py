"""Recording: calls launch nothing, are kept, and what is kept compiles."""

from __future__ import annotations

import pytest
import torch

import lowering
from lowering import recording


def test_calls_are_kept_and_launch_nothing(cache_dir):
    jit = lowering.jit("user_kernels:affine")
    x, y, z = (torch.full((1000,), float("nan")) for _ in range(3))
    with recording.record("sm_90a") as outer:
        jit(x, y, (2.0, z), 1000)
        with recording.record("sm_89") as inner:
            jit(x, y, (2.0, z), 1000)
        jit(y, x, (3.0, None), 10)
    assert (len(outer), len(inner)) == (2, 1)
    assert torch.isnan(y).all()
    first = outer[0]
    assert (first.function, first.args[3], first.constants) == (jit, 1000, {})
    assert first.args[0] is x
    with pytest.raises(lowering.ArgumentTypeError, match="on the CPU"):
        jit(x, y, (2.0, z), 1000)


def test_what_is_recorded_is_what_a_call_looks_up(cache_dir):
    from kernels_dsl.aot.fp8 import iter_fp8

    names, keys = [], set()
    for name, function, args, constants in iter_fp8("sm_90a"):
        names.append(name)
        on_meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
        keys.add(repr(function.key_parts(on_meta, constants, "sm_90a")))
    assert len(set(names)) == len(names) == len(keys) > 40
    assert not list(iter_fp8("sm_80"))
