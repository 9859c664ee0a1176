"""Exercise 1: a thread-value layout in two dimensions.

A CTA of 256 threads copies a tile of 32 rows x 64 columns, out of a row-major matrix whose rows are PITCH
elements apart. Give the layout (thread, value) -> offset from the tile's first element such that

* the 8 values of a thread are neighbours in a row,
* neighbouring threads have neighbouring values, as far as the row of the tile goes; then comes the next row.

A mode of a layout may be a tuple: ((8, 32), 8) is 8 x 32 threads with 8 values each, thread t being at
(t % 8, t // 8). Answer with plain tuples, shape and stride of the same form.
"""

import checker

PITCH = 512


def tv_layout() -> tuple[tuple, tuple]:
    """(shape, stride), each of the form ((·, ·), ·)."""
    raise NotImplementedError


def check(answers) -> None:
    """Every element once, and in the right hands."""
    shape, stride = answers.tv_layout()
    (inner, outer), values = shape
    (step_in, step_out), step_value = stride
    checker.expect(inner * outer == 256, f"the thread mode has {inner} x {outer} threads, there are 256")
    checker.expect(values == 8, f"a thread has {values} values, it should have 8")
    seen: dict[int, tuple[int, int]] = {}
    for thread in range(256):
        for value in range(values):
            offset = thread % inner * step_in + thread // inner * step_out + value * step_value
            row, column = divmod(offset, PITCH)
            who = f"value {value} of thread {thread}"
            checker.expect(
                0 <= row < 32 and column < 64, f"{who} is at row {row}, column {column}: outside of the tile"
            )
            checker.expect(
                offset not in seen, f"{who} is the element that thread {seen.get(offset)} has already"
            )
            seen[offset] = (thread, value)
            expected = (thread // 8, thread % 8 * 8 + value)
            checker.expect(
                (row, column) == expected,
                f"{who} is at row {row}, column {column}, it should be at {expected}",
            )


if __name__ == "__main__":
    checker.main(__file__)
