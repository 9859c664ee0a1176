"""Exercise 5: who holds what after a WGMMA.

D is 64 x N, in the registers of 128 threads. Thread t has N / 2 values; step 5's picture says where they are.
`place(t, v)` is where value v of thread t is; `owner(row, column)` is its inverse.
"""

import checker


def place(thread: int, value: int) -> tuple[int, int]:
    """(row, column) in D."""
    raise NotImplementedError


def owner(row: int, column: int) -> tuple[int, int]:
    """(thread, value) that holds D[row, column]."""
    raise NotImplementedError


def check(answers) -> None:
    """Against what the emulator does to the registers, which is checked against CuTe's own layouts."""
    from lowering.emulator.semantics.wgmma import accumulator_coordinates

    rows, columns = accumulator_coordinates(64)
    for thread in range(128):
        for value in range(32):
            expected = int(rows[thread, value]), int(columns[thread, value])
            got = answers.place(thread, value)
            checker.expect(
                tuple(got) == expected,
                f"value {value} of thread {thread} (warp {thread // 32}, lane {thread % 32}) "
                f"is at {expected}, you say {got}",
            )
            back = answers.owner(*expected)
            checker.expect(
                tuple(back) == (thread, value),
                f"D{list(expected)} belongs to {(thread, value)}, you say {back}",
            )


if __name__ == "__main__":
    checker.main(__file__)
