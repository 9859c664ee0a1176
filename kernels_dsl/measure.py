"""Timing on the GPU: competitors take turns in one run, so that clocks and heat are the same for all.

An absolute number means little on a GPU whose clocks follow its power; the ratio of two calls that took turns
does. The autotuner, the demo and the benchmarks measure with this module.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# A timed thing: called with the number of the input set to use (always 0 where there is one set).
Call = Callable[[int], object]

SHORT_MS = 0.1  # below this an event pair also times the launch, so a CUDA graph of calls is timed
GRAPH_CALLS = 20
MORE_ROUNDS = 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median of `samples`, and the fastest and slowest of them.

    method: "events" (a pair of CUDA events around each call) or "graph" (a CUDA graph of several calls).
    """

    ms: float
    low_ms: float
    high_ms: float
    samples: int
    method: str


def interleaved(
    calls: Mapping[str, Call],
    *,
    sets: int = 1,
    warmups: int = 3,
    rounds: int = 20,
    graph: bool | None = None,
    seconds: float = 0.0,
) -> dict[str, Timing]:
    """Time `calls` in turns on the current device and stream; each round calls every one of them once.

    sets: how many input sets the calls can choose from; they rotate, so that with sets larger than the L2
    cache in sum every call finds it cold. graph: True or False forces the method, None takes a graph for all
    as soon as one of them was once shorter than 100 µs, so that all are measured alike. (Its median may be
    longer: on a busy host events time the launches.)
    A call that cannot be captured into a graph is timed with events.
    seconds: rounds are added until timing takes about as long, up to MORE_ROUNDS times as many. A burst of
    some milliseconds runs at clocks that the power limit does not allow for long.
    """
    import torch

    for call in calls.values():
        for i in range(warmups):
            call(i % sets)
    torch.cuda.synchronize()
    if seconds > 0.0:
        round_ms = sum(timing.ms for timing in _by_events(calls, sets, 3).values())
        rounds = max(rounds, min(int(seconds * 1e3 / round_ms), MORE_ROUNDS * rounds))
    by_events = _by_events(calls, sets, rounds)
    if graph is None:
        graph = any(timing.low_ms < SHORT_MS for timing in by_events.values())
    if not graph:
        return by_events
    graphs = {name: _captured(call, sets) for name, call in calls.items()}
    timed = {name: replay for name, replay in graphs.items() if replay is not None}
    by_graph = _by_events(timed, 1, rounds)
    return {name: _per_call(by_graph[name]) if name in by_graph else by_events[name] for name in calls}


def host_us(call: Callable[[], object], *, batches: int = 40, calls_per_batch: int = 50) -> float:
    """Host microseconds of one call that does not wait for the GPU: the median over batches.

    The GPU's queue is drained between batches, so `call` should be small enough for the GPU to keep up.
    """
    import torch

    for _ in range(calls_per_batch):
        call()
    samples = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls_per_batch):
            call()
        samples.append((time.perf_counter() - start) / calls_per_batch)
    torch.cuda.synchronize()
    return statistics.median(samples) * 1e6


def _by_events(calls: Mapping[str, Call], sets: int, rounds: int) -> dict[str, Timing]:
    import torch

    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    names = list(calls)
    shuffle = random.Random(0).shuffle
    for i in range(rounds):
        # In a new order each round: what ran just before decides about L2, heat and clocks, and whoever
        # always came after a competitor that needs little power would gain a few per cent by it.
        shuffle(names)
        for name in names:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            calls[name](i % sets)
            after.record()
            pairs[name].append((before, after))
    torch.cuda.synchronize()
    timings = {}
    for name, recorded in pairs.items():
        ms = [before.elapsed_time(after) for before, after in recorded]
        timings[name] = Timing(statistics.median(ms), min(ms), max(ms), len(ms), "events")
    return timings


def _captured(call: Call, sets: int) -> Call | None:
    """A replay of GRAPH_CALLS calls; None where the call cannot be captured (it synchronises, say)."""
    import torch

    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
            for i in range(GRAPH_CALLS):
                call(i % sets)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    captured.replay()
    torch.cuda.synchronize()
    return lambda _set: captured.replay()


def _per_call(timing: Timing) -> Timing:
    parts = (timing.ms, timing.low_ms, timing.high_ms)
    ms, low, high = (part / GRAPH_CALLS for part in parts)
    return Timing(ms, low, high, timing.samples, "graph")
