"""A process that runs cases: `python -m tests.fuzz.worker FAMILY SETTINGS SECONDS`, driven by `pool`.

Reads the numbers of cases from standard input, one a line, and writes `CASE number` when it starts one and a
line of JSON after `OUTCOME` when it is done. The stacks of a case that takes SECONDS go to standard error.
After an error that the GPU does not recover from it ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from reference import inputs
from tests.fuzz.case import Case, Mode, Outcome, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.families import module_of
from tests.fuzz.ritual import run_case

STARTED, DONE = "CASE ", "OUTCOME "
FEW_SMS = (1, 2, 3, 132)
"""SMs of the emulated GPU: with few of them persistent loops go round."""


def run_one(family: str, number: int, settings: Settings) -> Outcome:
    """Draw, run and check one case."""
    draw = Draw(family, number, settings)
    case: Case = module_of(family).generate(draw)
    return run_case(number, case, settings, _around(case, draw, settings))


def _around(case: Case, draw: Draw, settings: Settings) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a case's calls: the emulator where there is no GPU."""
    if settings.device == "cuda" or settings.plant is not None:
        return nullcontext
    from lowering import emulator

    sms, seed = draw.data.choice(FEW_SMS), draw.data.randrange(1 << 16)
    # Threads share an emulator's session, so that their findings would be mixed up: they get one each.
    if case.mode is Mode.THREADS:
        os.environ.update(KERNELS_DSL_EMULATE=draw.arch(), KERNELS_DSL_EMULATE_SEED=str(seed))
        return nullcontext
    os.environ.pop("KERNELS_DSL_EMULATE", None)
    return lambda: emulator.run(arch=draw.arch(), seed=seed, sms=sms)


def poison_new_memory() -> None:
    """Make every new CPU tensor start with NaN or large integers, as memory of a GPU may."""
    from tests.fuzz.memory import fill_with_poison

    for name in ("empty", "empty_strided", "empty_like"):
        setattr(torch, name, _poisoning(getattr(torch, name), fill_with_poison))


def _poisoning(make: Callable[..., torch.Tensor], fill: Callable[[torch.Tensor], None]) -> Callable[..., Any]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if type(made) is torch.Tensor and made.device.type == "cpu":
            fill(made)
        return made

    return poisoned


def main(arguments: list[str]) -> int:
    """`arguments`: the family, the settings as JSON, the seconds after which a case's stacks are written."""
    family, settings = arguments[0], Settings(**json.loads(arguments[1]))
    seconds = float(arguments[2])
    torch.set_num_threads(1)
    if settings.device == "cpu":
        poison_new_memory()
    else:
        inputs.make_on_device()  # filling matrices on one core would take most of the time
    for line in sys.stdin:
        number = int(line)
        print(f"{STARTED}{number}", flush=True)
        faulthandler.dump_traceback_later(seconds)
        outcome = run_one(family, number, settings)
        faulthandler.cancel_dump_traceback_later()
        print(DONE + json.dumps(outcome.as_dict()), flush=True)
        if outcome.fatal:
            os._exit(3)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
