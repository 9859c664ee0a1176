"""The records that a family's cases, the checks and the workers exchange."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tests.fuzz.memory import Arena


class Mode(enum.Enum):
    """The way a case's call is made."""

    PLAIN = "plain"
    STREAM = "stream"
    """On a side stream."""
    THREADS = "threads"
    """By two threads at once, each on tensors and a stream of its own."""
    GRAPH = "graph"
    """Captured in a CUDA graph, replayed, and replayed again after the inputs changed in place."""


@dataclass(frozen=True)
class Settings:
    """The settings that all cases of a run share.

    device: "cuda", or "cpu" for the emulator. arch: the GPU's architecture; emulated cases draw one. small:
    sizes that the emulator can run in a second or so. plant: a fault of `planted`, for tests of the harness;
    "none" runs its operations without a fault; None runs the library's. graphs: whether calls may be
    captured. threads: whether two threads may call at once. values: whether results are compared with
    references.
    """

    seed: int = 0
    device: str = "cuda"
    arch: str = "sm_90a"
    small: bool = False
    plant: str | None = None
    graphs: bool = True
    threads: bool = True
    values: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The fields, for a worker's command line."""
        return dataclasses.asdict(self)


@dataclass
class Call:
    """A call on tensors of an arena.

    run: makes the call and returns its results, tensors in a fixed order. check: compares results of `run`
    with a reference that it computes from what the inputs hold now; raises AssertionError. arguments: the
    names that a refusal may mention. supports: the operation's own reason for a refusal, None for none; left
    out where there is no such function. must_refuse: the argument that an error must name; None where the
    call may be fine. may_refuse: a forced configuration, say, may not fit. chosen: what the operation chose
    for the call, for coverage. repeats: the same call gives the same bits.
    """

    run: Callable[[], tuple[torch.Tensor, ...]]
    check: Callable[[tuple[torch.Tensor, ...]], None]
    arguments: tuple[str, ...]
    supports: Callable[[], str | None] | None = None
    must_refuse: str | None = None
    may_refuse: bool = False
    chosen: tuple[str, ...] = ()
    repeats: bool = True


class Case(Protocol):
    """One drawn call. `str(case)` describes it in one line; `features` is what coverage counts."""

    mode: Mode
    features: tuple[str, ...]

    def build(self, arena: Arena, settings: Settings) -> Call:
        """Lay out the tensors in `arena` and return the call on them. The same tensors at every call."""


def described(case: Any) -> str:
    """The fields of a case in one line, but for the draw."""
    shown = (f"{f.name}={getattr(case, f.name)}" for f in dataclasses.fields(case) if f.name != "draw")
    return " ".join(shown).replace("torch.", "")


class Status(enum.Enum):
    """The outcome of a case."""

    PASSED = "passed"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """The end of one case. fatal: the process cannot go on (a CUDA error)."""

    number: int
    status: Status
    features: tuple[str, ...] = ()
    detail: str = ""
    seconds: float = 0.0
    fatal: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The fields, with the status by its name."""
        return {**dataclasses.asdict(self), "status": self.status.value}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Outcome:
        """The outcome of which `as_dict` made `data`."""
        return Outcome(**{**data, "status": Status(data["status"]), "features": tuple(data["features"])})
