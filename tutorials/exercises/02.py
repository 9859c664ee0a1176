"""Exercise 2: what TMA announces, and what it can read.

1. `expected_bytes`: how many bytes must be announced on the mbarrier for the load of one tile? The tile may
   reach beyond the tensor. Too few: the wait returns early, or the count goes wrong; too many: it hangs.
2. `tma_can_read`: TMA wants one mode of stride 1, and a base address and all other strides that are multiples
   of 16 bytes.
"""

import checker


def expected_bytes(
    tile: tuple[int, int], origin: tuple[int, int], extent: tuple[int, int], itemsize: int
) -> int:
    """Bytes to announce for the tile at `origin` of a tensor of `extent` elements."""
    raise NotImplementedError


def tma_can_read(address: int, strides: tuple[int, ...], itemsize: int) -> bool:
    """`strides` in elements, of modes that are all larger than 1."""
    raise NotImplementedError


def check(answers) -> None:
    """Inside and at the edge; aligned and not."""
    inside = answers.expected_bytes((32, 64), (0, 0), (100, 100), 4)
    checker.expect(inside == 8192, f"a 32 x 64 tile of 4-byte elements is 8192 bytes, not {inside}")
    edge = answers.expected_bytes((32, 64), (96, 64), (100, 100), 4)
    checker.expect(
        edge == 8192,
        f"at the edge you announce {edge} bytes: TMA writes the whole box, zeros included",
    )
    for address, strides, itemsize, right, why in (
        (0x1000, (512, 1), 2, True, "rows of 1024 bytes"),
        (0x1000, (1, 512), 2, True, "column-major is fine: any one mode may be the contiguous one"),
        (0x1000, (100, 1), 2, False, "rows of 200 bytes are no multiple of 16"),
        (0x1008, (512, 1), 2, False, "the address is no multiple of 16"),
        (0x1000, (512, 2), 2, False, "no mode has stride 1"),
        (0x1000, (8, 1), 1, False, "rows of 8 bytes are no multiple of 16"),
        (0x1000, (640, 20, 1), 4, True, "three modes, 20 x 4 = 80 bytes"),
    ):
        got = answers.tma_can_read(address, strides, itemsize)
        checker.expect(
            got == right,
            f"address {address:#x}, strides {strides}, {itemsize} bytes: you say {got}, but {why}",
        )


if __name__ == "__main__":
    checker.main(__file__)
