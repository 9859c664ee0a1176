"""Counters and workspaces: one for each stream, others for captured launches, on a model of a GPU."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from kernels_dsl.ops import tile_counter as module


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its current stream and whether that is captured; its memory is the CPU's, of 8 counters a slab."""
    state = SimpleNamespace(stream=0, capturing=False)
    for name in ("_slabs", "_taken", "_by_stream", "_with_workspace"):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(module, "SLOTS", 8)
    monkeypatch.setattr(module, "LEAST", 16)
    monkeypatch.setattr(module, "_raw_stream", lambda device: state.stream)
    monkeypatch.setattr(module, "_is_capturing", lambda: state.capturing)
    here = SimpleNamespace(
        zeros=lambda *shape, device, **options: torch.zeros(*shape, **options),
        empty=lambda *shape, device: torch.empty(*shape),
        int32=torch.int32,
        cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(synchronize=lambda: None)),
    )
    monkeypatch.setattr(module, "torch", here)
    return state


def test_streams_and_captures_have_their_own(gpu: SimpleNamespace) -> None:
    first, (counters, workspace) = module.tile_counter(0), module.counter_and_workspace(0, 20, 6)
    assert module.tile_counter(0) is first and counters.shape == (6,) and workspace.shape == (20,)
    assert module.counter_and_workspace(0, 10, 2)[1] is workspace
    assert module.counter_and_workspace(0, 21, 6)[0] is counters  # only the workspace had to grow
    places = module.addresses(0, 21)
    assert module.addresses(0, 10) is places  # kept, too, and of the same memory
    assert [a.tensor.data_ptr() for a in places] == list(places) and places[1].tensor is counters
    gpu.stream = 7
    second = module.tile_counter(0)
    gpu.capturing = True
    captured = [module.tile_counter(0), module.tile_counter(0), *module.counter_and_workspace(0, 20, 6)]
    captured += [address.tensor for address in module.addresses(0, 20)]
    gpu.capturing = False
    assert module.tile_counter(0) is second
    places = [x.data_ptr() for x in (first, counters, second, workspace, *captured)]
    assert len(set(places)) == len(places) and not any(place % 16 for place in places)


def test_counters_of_captured_launches_stay(gpu: SimpleNamespace) -> None:
    """Nobody else gets their memory, not even when new slabs are made."""
    module.tile_counter(0)
    gpu.stream, gpu.capturing = 7, True
    captured = module.counter_and_workspace(0, 16, 24)[0].data_ptr()  # the rest of the slab but one
    gpu.capturing = False
    later = []
    for stream in range(8, 40):
        gpu.stream = stream
        later.append(module.tile_counter(0))
    assert len(module._slabs[0]) > 3
    assert any(x.data_ptr() <= captured < x.data_ptr() + 4 * x.numel() for x in module._slabs[0])
    assert not any(captured <= x.data_ptr() < captured + 4 * 24 for x in later)


def test_more_counters_than_a_slab_has(gpu: SimpleNamespace) -> None:
    """All of them, with memory of their own, and the next ones too."""
    many, _ = module.counter_and_workspace(0, 1, 8 * module.SPACING + 5)
    assert many.shape == (8 * module.SPACING + 5,) and not many.any()
    after = module.tile_counter(0)
    assert not many.data_ptr() <= after.data_ptr() < many.data_ptr() + 4 * many.numel()


class _SlowDict(dict):
    """An answer that comes late, so that another thread asks meanwhile."""

    def get(self, *arguments):
        found = super().get(*arguments)
        time.sleep(0.01)
        return found


def test_threads_get_counters_of_their_own(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOTS", 1 << 12)
    module.tile_counter(0)
    monkeypatch.setattr(module, "_taken", _SlowDict(module._taken))
    places: list[int] = []
    threads = [
        threading.Thread(target=lambda: places.extend([module._fresh(0).data_ptr() for _ in range(5)]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(places)) == len(places) == 20
