"""Memory that calls of a thread on a stream share."""

from __future__ import annotations

import threading

import pytest
import torch

from kernels_dsl.nn import scratch
from kernels_dsl.nn.scratch import Scratch, is_dense

FP8 = torch.float8_e4m3fn


def _like() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(3, 48, dtype=FP8), torch.empty(5, 3).mT


@pytest.fixture
def streams(monkeypatch):
    """The current stream, None in a capture, of a device 0 that is the CPU."""
    current = [7]
    monkeypatch.setattr(scratch, "serial_stream", lambda index: current[0])
    monkeypatch.setattr(scratch, "_of_thread", threading.local())
    return current


def test_tensors_are_like_those_they_stand_for(streams):
    held = Scratch(_like(), 0)()
    assert [(x.shape, x.stride(), x.dtype) for x in held] == [(x.shape, x.stride(), x.dtype) for x in _like()]
    first, second = (x.data_ptr() for x in held)
    assert second - first == 256
    others = Scratch(_like(), 0, part=1)()
    assert not {x.untyped_storage().data_ptr() for x in others} & {held[0].untyped_storage().data_ptr()}


def test_each_thread_and_stream_has_its_own(streams):
    kept, found = Scratch(_like(), 0), []
    first = kept()
    assert kept() is first
    threading.Thread(target=lambda: found.append(kept())).run()
    other = threading.Thread(target=lambda: found.append(kept()))
    other.start()
    other.join()
    streams[0] = 8
    assert found[0] is first
    assert len({x[0].data_ptr() for x in (first, found[1], kept())}) == 3


def test_captures_and_large_tensors_get_none(streams):
    kept = Scratch(_like(), 0)
    streams[0] = None
    assert kept() is None
    streams[0] = 7
    assert kept() is not None
    assert Scratch((torch.empty(scratch.MOST + 1, dtype=torch.uint8, device="meta"),), 0)() is None


def test_views_with_gaps_are_not_dense():
    assert is_dense(torch.empty(3, 4)) and not is_dense(torch.empty(3, 4)[:, :2])
