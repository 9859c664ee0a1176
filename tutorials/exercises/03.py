"""Exercise 3: phases. Which phase does each side of a ring wait for?

Write the two waits of a ring whose producer and consumer are apart (as in step 4): tile number k goes to
stage k % stages. A wait for phase p of a barrier returns once the phase with that bit is complete; on a fresh
barrier, a wait for phase 1 returns at once ("the one before the first").
"""

import checker


def full_phase(k: int, stages: int) -> int:
    """The phase that the consumer waits for on full[k % stages] before it reads tile k."""
    raise NotImplementedError


def empty_phase(k: int, stages: int) -> int:
    """The phase that the producer waits for on empty[k % stages] before it loads tile k."""
    raise NotImplementedError


class Barrier:
    """An mbarrier of one arrival: counts how many phases are complete."""

    def __init__(self) -> None:
        self.complete = 0

    def passes(self, phase: int) -> bool:
        """True where wait(phase) returns now: the current phase has the other bit."""
        return self.complete & 1 != phase


def check(answers) -> None:
    """Runs rings in which the producer goes as far ahead as it can, and ones in which it hardly does."""
    run(answers, 1, 1, False)  # an eager consumer
    for stages in (1, 2, 3, 4):
        for producer_first in (True, False):
            run(answers, stages, 4 * stages + 1, producer_first)


def run(answers, stages: int, tiles: int, producer_first: bool) -> None:
    """One interleaving: the side that goes first goes on until it has to wait."""
    full, empty = [Barrier() for _ in range(stages)], [Barrier() for _ in range(stages)]
    content: list[int | None] = [None] * stages
    loaded = read = 0

    def producer() -> bool:
        nonlocal loaded
        stage = loaded % stages
        if loaded == tiles or not empty[stage].passes(answers.empty_phase(loaded, stages)):
            return False
        old = content[stage]
        checker.expect(
            old is None or old < read,
            f"{stages} stages: tile {loaded} overwrites tile {old} in stage {stage}, which is unread",
        )
        content[stage] = loaded
        full[stage].complete += 1
        loaded += 1
        return True

    def consumer() -> bool:
        nonlocal read
        stage = read % stages
        if read == tiles or not full[stage].passes(answers.full_phase(read, stages)):
            return False
        checker.expect(
            content[stage] == read,
            f"{stages} stages: the consumer wants tile {read} and finds {content[stage]} in stage {stage}: "
            f"full_phase({read}, {stages}) did not wait for it",
        )
        empty[stage].complete += 1
        read += 1
        return True

    first, second = (producer, consumer) if producer_first else (consumer, producer)
    while read < tiles:
        moved = False
        while first():
            moved = True
        moved = second() or moved
        checker.expect(
            moved,
            f"{stages} stages: a hang. {loaded} tiles loaded, {read} read: the producer waits for phase "
            f"{answers.empty_phase(loaded, stages)}, the consumer for {answers.full_phase(read, stages)}",
        )


if __name__ == "__main__":
    checker.main(__file__)
