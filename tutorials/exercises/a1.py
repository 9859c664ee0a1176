"""Exercise A1: how many cp.async groups may be under way?

The appendix commits a group in every iteration, even an empty one, and can wait for "at most stages - 2".
Say what to wait for if groups are committed only where there is something to copy: before tile k of `k_tiles`
is used, at most n groups may still be under way. (Groups complete in order. At that point the copies of tiles
0 ... k + stages - 2 have been committed, as far as there are so many tiles.)
"""

import checker


def under_way(k: int, k_tiles: int, stages: int) -> int:
    """The n of cp_async_wait_group(n) before tile k is used."""
    raise NotImplementedError


def check(answers) -> None:
    """Commits and waits as the kernel would."""
    for stages in (2, 3, 4):
        for k_tiles in range(1, 9):
            for k in range(k_tiles):
                committed = min(k + stages - 1, k_tiles)
                n = answers.under_way(k, k_tiles, stages)
                complete = committed - n  # groups known to be complete: tiles 0 ... complete - 1
                case = f"{stages} stages, tile {k} of {k_tiles}: at most {n} of {committed} groups under way"
                checker.expect(complete > k, f"{case} does not say that tile {k} is there")
                checker.expect(
                    complete <= k + 1, f"{case} waits for tile {complete - 1} too, which is not needed yet"
                )


if __name__ == "__main__":
    checker.main(__file__)
