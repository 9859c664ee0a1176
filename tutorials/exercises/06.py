"""Exercise 6: tiles and budgets.

1. `reuse`: how many multiply-adds does a bM x bN tile do for each number that it loads?
2. `ctas_per_sm`: how many CTAs fit on one Hopper SM? It has 233472 bytes of shared memory, and each CTA takes
   1024 bytes more than it asks for; 65536 registers, given out to warps in units of 256 for all 32 threads
   (that is 8 a thread); and room for 2048 threads and 32 CTAs.
"""

import checker


def reuse(bm: int, bn: int) -> float:
    """Multiply-adds for each loaded number."""
    raise NotImplementedError


def ctas_per_sm(shared_bytes: int, threads: int, registers: int) -> int:
    """CTAs that run on an SM at one time; `registers` is for one thread."""
    raise NotImplementedError


def check(answers) -> None:
    """By counting."""
    for bm, bn in ((64, 64), (128, 128), (128, 256), (64, 256)):
        counted = bm * bn * 64 / ((bm + bn) * 64)  # a K tile of 64
        got = answers.reuse(bm, bn)
        checker.expect(
            abs(got - counted) < 1e-9, f"{bm} x {bn}: a K tile of 64 gives {counted:.2f}, you say {got}"
        )
    for shared, threads, registers, right, limit in (
        (32768, 128, 160, 3, "registers: 160 x 128 three times is 61440"),
        (32768, 128, 168, 3, "registers: 168 x 128 three times is 64512"),
        (32768, 128, 81, 5, "registers: 81 is rounded up to 88, and 88 x 128 five times is 56320"),
        (65536, 128, 64, 3, "shared memory: 66560 bytes three times is 199680"),
        (77824, 128, 64, 2, "shared memory: three of 77824 fit, but not with 1024 more for each"),
        (0, 256, 32, 8, "threads: 2048 / 256"),
        (0, 32, 16, 32, "the number of CTAs"),
        (197632, 384, 168, 1, "shared memory, and registers"),
    ):
        got = answers.ctas_per_sm(shared, threads, registers)
        checker.expect(
            got == right,
            f"{shared} bytes, {threads} threads of {registers} registers: {right} fit, you say {got}; "
            f"the limit is {limit}",
        )


if __name__ == "__main__":
    checker.main(__file__)
