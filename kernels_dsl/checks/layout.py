"""The layout of a matrix in memory and the needs of a kernel family: the one place for these rules.

A kernel reads a matrix of (rows, columns), possibly with a batch mode before them, along its contiguous mode.
- SM90 (TMA): base address and strides are multiples of 16 bytes; tf32 needs K to be the contiguous mode.
- SM80 (cp.async): any alignment; the narrower it is, the narrower the loads.
- Both: one of the two modes has stride 1, the other does not have stride 0.
What does not fit is copied once, into memory whose rows start at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowering.records import frozen

TMA_ALIGN = 16


@frozen
class MatrixLayout:
    """Layout of a matrix argument, with sizes (rows, columns) and maybe a batch mode first.

    `contiguous`: "row" where elements of a row are neighbours (row-major), "column" where those of a column
    are, None where neither. `align`: bytes, up to 16, that divide the address of each row (or column).
    `strides`: strides to pass to the kernel in place of the tensor's where modes of size 1 have unsuitable
    ones, else None.
    """

    contiguous: str | None
    align: int
    strides: tuple[int, ...] | None


def round_up(value: int, step: int) -> int:
    """`value`, or the next multiple of `step`."""
    return -(-value // step) * step


def layout_of(shape: Sequence[int], strides: Sequence[int], address: int, element_bytes: int) -> MatrixLayout:
    """Describe a tensor of rank 2 or 3 that starts at `address`; strides in elements.

    The contiguous mode is found as the compiler's signature finds it: of the modes with stride 1 one whose
    size is more than 1, else the last.
    """
    rank = len(shape)
    ones = [mode for mode in (rank - 2, rank - 1) if strides[mode] == 1]
    contiguous = max(ones, key=lambda mode: (shape[mode] > 1, mode), default=None)
    if contiguous is None and min(shape[-2:]) <= 1:
        # A vector with a stride: along its mode of size 1 it is "contiguous" as well as any matrix.
        contiguous = rank - 1 if shape[rank - 1] == 1 else rank - 2
    if any(strides[mode] == 0 and shape[mode] > 1 for mode in (rank - 2, rank - 1)):
        contiguous = None
    if rank == 3 and strides[0] == 1 < shape[0] and (contiguous is None or shape[contiguous] == 1):
        contiguous = None  # the signature would take the batch mode for the contiguous one
    divides = address | TMA_ALIGN
    fixed = list(strides)
    for mode in range(rank):
        if mode == contiguous:
            fixed[mode] = 1
        elif shape[mode] > 1:
            divides |= strides[mode] * element_bytes
        else:
            extent = 1 if contiguous is None else shape[contiguous]
            fixed[mode] = round_up(max(extent, 2), TMA_ALIGN)
    major = {rank - 1: "row", rank - 2: "column", None: None}[contiguous]
    # A mode of size 1 keeps its stride where that does no harm, so that common tensors need no new view.
    harmless = contiguous is None or all(
        strides[mode] == fixed[mode]
        or (mode != contiguous and strides[mode] > 1 and strides[mode] * element_bytes % TMA_ALIGN == 0)
        for mode in range(rank)
    )
    return MatrixLayout(major, divides & -divides, None if harmless else tuple(fixed))


def padded_strides(shape: Sequence[int], contiguous: str, element_bytes: int) -> tuple[int, ...]:
    """Strides of a fresh buffer for a matrix whose rows (or columns) start at multiples of 16 bytes."""
    step = TMA_ALIGN // element_bytes
    rows, columns = shape[-2], shape[-1]
    if contiguous == "row":
        pitch = round_up(max(columns, 1), step)
        matrix, size = (pitch, 1), rows * pitch
    else:
        pitch = round_up(max(rows, 1), step)
        matrix, size = (1, pitch), columns * pitch
    return matrix if len(shape) == 2 else (size, *matrix)
