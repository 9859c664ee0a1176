"""Runs the cases on the GPU of this process and in the emulator, and compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import cases
from .cases import Case
from .compare import Outcome, compare

ARCH = "sm_90a"


def run_case(case: Case, device: str) -> np.ndarray:
    """Launch a case on "cuda", or on "cpu" in the emulator; the compared argument as uint32 words."""
    import torch

    import lowering
    import lowering.emulator

    arguments = [_tensors(a, device) for a in case.inputs()]
    function = _function(case.function)
    context: Any = contextlib.nullcontext() if device == "cuda" else lowering.emulator.run(arch=ARCH)
    with context:
        function(*arguments, **case.constants)
    if device == "cuda":
        torch.cuda.synchronize()
    return arguments[case.result].cpu().contiguous().numpy().reshape(-1).view(np.uint32)


_FUNCTIONS: dict[str, Any] = {}


def _function(target: str) -> Any:
    from lowering import jit

    if target not in _FUNCTIONS:
        _FUNCTIONS[target] = jit(target)
    return _FUNCTIONS[target]


def _tensors(argument: Any, device: str) -> Any:
    import torch

    if isinstance(argument, tuple):
        return tuple(_tensors(a, device) for a in argument)
    return torch.from_numpy(argument.copy()).to(device)


def split(case: Case) -> Iterator[Case]:
    """The cases of a group's single instructions, for when one of them does not work."""
    for group, members in cases.elementwise_groups():
        if case.name == f"elementwise/{group}":
            for op in members:
                yield cases.elementwise_case(group, (op,))


def evaluate(case: Case, theirs: np.ndarray, emulate: Callable[[Case], np.ndarray]) -> list[Outcome]:
    """Outcomes of each row of a case, given the GPU's results and what runs the emulator."""
    try:
        ours = emulate(case)
    except Exception as error:
        return _evaluate_singly(case, theirs, emulate, error)
    return [compare(name, rule, ours[part], theirs[part]) for name, rule, part in case.rows]


def _evaluate_singly(
    case: Case, theirs: np.ndarray, emulate: Callable[[Case], np.ndarray], error: Exception
) -> list[Outcome]:
    """Outcomes of a case that failed: its instructions one at a time, if it has several, or its error."""
    single = list(split(case)) if len(case.rows) > 1 else []
    if not single:
        text = f"{type(error).__name__}: {error}"[:500]
        return [Outcome(name, rule, 0, 0, error=text) for name, rule, _ in case.rows]
    outcomes = []
    for one, (_, _, part) in zip(single, case.rows, strict=True):
        # The inputs follow from the group's name and are the same for each of its members.
        outcomes += evaluate(one, theirs[part], emulate)
    return outcomes
