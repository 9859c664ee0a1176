"""Exercise 4: arrive counts. How many arrivals complete a phase of an empty barrier?

Given how the consumers are organised:

* `warpgroups`: consumer warpgroups of the CTA, 4 warps or 128 threads each;
* `share`: True if all of them read each stage (each a part of the tile), False if they take turns and each
  stage is read by one of them;
* `elect`: who arrives: "thread" (every thread), "warp" (one of each warp), "warpgroup" (one of each).
"""

import itertools

import checker


def empty_arrivals(warpgroups: int, share: bool, elect: str) -> int:
    """The count to initialise empty[s] with."""
    raise NotImplementedError


def check(answers) -> None:
    """Lets them arrive, and sees what the barrier does."""
    for warpgroups, share, elect in itertools.product(
        (1, 2, 3), (True, False), ("thread", "warp", "warpgroup")
    ):
        count = answers.empty_arrivals(warpgroups, share, elect)
        readers = [
            (group, warp, lane)
            for group in range(warpgroups if share else 1)
            for warp in range(4)
            for lane in range(32)
        ]
        arriving = [
            reader
            for reader in readers
            if elect == "thread" or (elect == "warp" and reader[2] == 0) or reader[1:] == (0, 0)
        ]
        how = f"{warpgroups} warpgroups, {'shared stages' if share else 'in turns'}, one arrival a {elect}"
        checker.expect(
            count <= len(arriving),
            f"{how}: a hang. The barrier expects {count} arrivals and {len(arriving)} come",
        )
        last = arriving[count] if count < len(arriving) else None
        checker.expect(
            last is None,
            f"{how}: after {count} arrivals the producer overwrites the stage; warp {last and last[1]} of "
            f"warpgroup {last and last[0]} may still be reading",
        )


if __name__ == "__main__":
    checker.main(__file__)
