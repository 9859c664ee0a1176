"""Says on stderr how far a long launch is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowering.emulator.machine import Machine
    from lowering.emulator.state import Launch

FIRST_SECONDS = 3.0
NEXT_SECONDS = 10.0


class Progress:
    """A line for each launch that takes longer than a few seconds, repeated while it runs."""

    def __init__(self, program: str = "emulator") -> None:
        self.program = program

    @contextmanager
    def launch(self, number: int, launch: Launch, seed: int) -> Iterator[Callable[[Machine], None]]:
        """Watch one launch from another thread; gives what the engine calls with its machine."""
        ended = threading.Event()
        machines: list[Machine] = []
        watcher = threading.Thread(
            target=self._watch, args=(number, launch, seed, machines, ended), daemon=True
        )
        watcher.start()
        try:
            yield machines.append
        finally:
            ended.set()

    def _watch(
        self, number: int, launch: Launch, seed: int, machines: list[Machine], ended: threading.Event
    ) -> None:
        begun = time.perf_counter()
        total = launch.grid[0] * launch.grid[1] * launch.grid[2]
        each = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        wait = FIRST_SECONDS
        while not ended.wait(wait):
            wait = NEXT_SECONDS
            if not machines:
                continue
            machine = machines[0]
            running = list(machine.clusters)
            # Clusters start in order, so all but the running ones below the newest have ended.
            done = max((c.domain.number for c in running), default=0)
            done = max(0, min(total, (done + 1 - len(running)) * each))
            print(
                f"{self.program}: launch {number}, {launch.kernel}, seed {seed}: "
                f"{done} of {total} CTAs done, "
                f"{machine.step - machine.started:,} steps, {time.perf_counter() - begun:.0f} s",
                file=sys.stderr,
                flush=True,
            )
