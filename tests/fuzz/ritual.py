"""One case: make the call, compare with the reference, compare every byte, repeat it, compare the bits."""

from __future__ import annotations

import fcntl
import gc
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.case import Call, Case, Mode, Outcome, Settings, Status
from tests.fuzz.memory import Arena, same_bits

REFUSALS = (TypeError, ValueError, NotImplementedError)
"""Errors by which an operation refuses a call, before any launch."""
_STALE_BYTES = (1 << 10, 1 << 16, 1 << 21, 1 << 24)
Results = tuple[torch.Tensor, ...]


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process on this machine is in here; leave the GPU no memory of garbage."""

    def release() -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    release()
    with (Path(tempfile.gettempdir()) / "kernels_dsl_fuzz.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        release()


class RefusalFault(AssertionError):
    """A refusal of a call that must run, none where one is due, or one that names no argument."""


def run_case(
    number: int,
    case: Case,
    settings: Settings,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Outcome:
    """Run and check one case. around: a context that each call is made in (the emulator's).

    A case of huge tensors waits until no other process runs one, and so does the second try of one that got
    no memory: processes that share a GPU are no fault of the operation.
    """
    huge = settings.device == "cuda" and any("beyond 2^31" in feature for feature in case.features)
    with alone() if huge else nullcontext():
        outcome = _attempt(number, case, settings, around)
    if torch.OutOfMemoryError.__name__ in outcome.detail and not outcome.fatal:
        with alone():
            outcome = _attempt(number, case, settings, around)
    return outcome


def _attempt(
    number: int, case: Case, settings: Settings, around: Callable[[], AbstractContextManager[Any]]
) -> Outcome:
    start, features = time.perf_counter(), case.features
    try:
        with around():
            arena = Arena(settings.device)
            call = case.build(arena, settings)
            features += call.chosen
            refusal = _run(case, call, arena, settings)
        status, detail = (Status.PASSED, "") if refusal is None else (Status.REFUSED, refusal)
    except Exception as error:
        status = Status.FAILED
        detail = f"{case}\n{''.join(traceback.format_exception(error))}"
    return Outcome(
        number, status, features, detail, time.perf_counter() - start, fatal=_context_is_lost(settings)
    )


def _run(case: Case, call: Call, arena: Arena, settings: Settings) -> str | None:
    """The text of a rightful refusal; None where the case ran and is right."""
    arena.freeze()
    _leave_stale_memory(settings)
    reason = call.supports() if call.supports is not None else None
    try:
        if case.mode is Mode.THREADS:
            first = _in_two_threads(case, call, arena, settings)
        else:
            first = _on_stream(call.run, side=case.mode is Mode.STREAM)
    except REFUSALS as error:
        arena.check_untouched()
        return _judge(call, error, reason)
    _require_run(call, reason)
    arena.check()
    if settings.values:
        call.check(first)
    if case.mode is Mode.GRAPH:
        _replay(call, arena)
    elif call.repeats:
        first = tuple(x.clone() for x in first)
        arena.poison_outputs()
        _leave_stale_memory(settings)
        _compare_bits(first, _on_stream(call.run))
        arena.check()
    return None


def _require_run(call: Call, reason: str | None) -> None:
    if call.must_refuse is not None:
        raise RefusalFault(f"the call ran; an error that names {call.must_refuse} was due")
    if reason is not None:
        raise RefusalFault(f"the call ran, though supports() says: {reason}")


def _judge(call: Call, error: Exception, reason: str | None) -> str:
    """The refusal's text; RefusalFault where the call should have run or the text says too little."""
    text = str(error)
    if call.must_refuse is None and not call.may_refuse:
        raise RefusalFault("a plain call was refused") from error
    if call.supports is not None and reason is None:
        raise RefusalFault("the call was refused, though supports() gives no reason") from error
    due = (call.must_refuse,) if call.must_refuse is not None else call.arguments
    if not any(re.search(rf"\b{re.escape(name)}\b", text) for name in due):
        raise RefusalFault(f"the refusal names none of {', '.join(due)}") from error
    return text


def _on_stream(run: Callable[[], Results], side: bool = False) -> Results:
    """The call's results, waited for."""
    if not torch.cuda.is_available():
        return run()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) if side else nullcontext():
        results = run()
    torch.cuda.synchronize()
    return results


def _in_two_threads(case: Case, call: Call, arena: Arena, settings: Settings) -> Results:
    """The call's results, while another thread makes the same call on tensors of its own."""
    other_arena = Arena(settings.device)
    other = case.build(other_arena, settings)
    other_arena.freeze()
    found: list[Results | Exception | None] = [None, None]
    start = threading.Barrier(2)

    def work(index: int, run: Callable[[], Results]) -> None:
        try:
            start.wait(60)
            found[index] = _on_stream(run, side=index == 1)
        except Exception as error:
            found[index] = error

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((call.run, other.run))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    first, second = found
    assert isinstance(first, tuple) and isinstance(second, tuple)
    other_arena.check()
    if settings.values:
        other.check(second)
    return first


def _replay(call: Call, arena: Arena) -> None:
    """Capture the call, which was made once, replay it, change the inputs in place, replay it again."""
    graph = torch.cuda.CUDAGraph()
    arena.poison_outputs()
    with torch.cuda.graph(graph):
        results = call.run()
    for generation in (0, 1):
        if generation:
            arena.refill(generation)
        arena.poison_outputs()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        arena.check()
        call.check(results)
        if call.repeats:
            first = tuple(x.clone() for x in results)
            graph.replay()
            torch.cuda.synchronize()
            _compare_bits(first, results)


def _compare_bits(first: Results, second: Results) -> None:
    for index, (x, y) in enumerate(zip(first, second)):
        if not same_bits(x, y):
            differing = int((x.contiguous() != y.contiguous()).sum())
            raise AssertionError(
                f"the same call gave other bits the second time: {differing} elements of result {index}"
            )


def _leave_stale_memory(settings: Settings) -> None:
    """Leave NaN in the memory that the allocator hands out next, for temporaries and results of the call."""
    if settings.device == "cuda":
        stale = [
            torch.full((size // 4,), float("nan"), device="cuda") for size in _STALE_BYTES for _ in range(3)
        ]
        del stale


def _context_is_lost(settings: Settings) -> bool:
    """True if the GPU takes no more calls: after an illegal access, say."""
    if settings.device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False
