"""Exercise 11: a window with a sink.

Models that read endless text keep the first `sink` tokens in sight beside a window: row i sees the keys
j <= i for which j < sink or j > i - window. That is not one range a row but two, so that step 11's `ranges`
does not do. Say which blocks of n keys the tile of rows a to b (both included) has to visit, and whether
every row of the tile sees all keys of the block, so that it needs no mask:

    visit(a, b, n, window, sink) -> list of (block, whole)        in rising order, plain Python

Blocks count from 0; keys go on at least until b. Visit no block in vain: with window 2048 and sink 4 a tile
of 128 rows has 18 blocks of 128 keys at most, however long the text.
"""

import checker


def visit(a: int, b: int, n: int, window: int, sink: int) -> list[tuple[int, bool]]:
    """(number, whole) of each block that some row needs."""
    raise NotImplementedError


def sees(i: int, j: int, window: int, sink: int) -> bool:
    return j <= i and (j < sink or j > i - window)


def check(answers) -> None:
    """Against the mask, element by element."""
    for a, b, n, window, sink in (
        (0, 7, 4, 5, 2), (8, 15, 4, 5, 2), (40, 47, 4, 5, 2), (40, 47, 4, 5, 0), (40, 47, 4, 16, 8),
        (40, 47, 4, 1, 4), (12, 15, 8, 100, 3), (64, 71, 16, 24, 20), (7, 7, 4, 3, 6), (32, 35, 4, 8, 30),
    ):  # fmt: skip
        where = f"rows {a} to {b}, blocks of {n}, window {window}, sink {sink}"
        found = [(int(block), bool(whole)) for block, whole in answers.visit(a, b, n, window, sink)]
        numbers = [block for block, _ in found]
        checker.expect(numbers == sorted(set(numbers)), f"{where}: {numbers} is not rising")
        for block in range(max([b // n, *numbers]) + 1):
            seen = [
                sees(i, j, window, sink) for i in range(a, b + 1) for j in range(block * n, block * n + n)
            ]
            checker.expect(
                block in numbers or not any(seen), f"{where}: block {block} is needed, and not visited"
            )
            checker.expect(any(seen) or block not in numbers, f"{where}: block {block} is visited in vain")
            if block in numbers:
                whole = dict(found)[block]
                checker.expect(
                    all(seen) or not whole, f"{where}: block {block} needs a mask, and is called whole"
                )
                checker.expect(
                    whole or not all(seen), f"{where}: block {block} is whole, and would be masked"
                )
    long = len(answers.visit(1 << 20, (1 << 20) + 127, 128, 2048, 4))
    checker.expect(long <= 18, f"{long} blocks for the row 2^20 with a window of 2048, 18 are enough")


if __name__ == "__main__":
    checker.main(__file__)
