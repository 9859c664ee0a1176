"""Options of the quantisation kernels, which convert a tensor to fp8."""

from __future__ import annotations

from dataclasses import replace

from lowering.records import frozen

FORMATS = {"e4m3": 448.0, "e5m2": 57344.0}
"""fp8 format -> its largest finite value."""
SMALLEST_SCALE = 2.0**-126
"""Scales are normal float32 numbers, so that their reciprocals are finite."""
TILE = 128
"""Rows and columns of a CTA's tile, and elements of a group."""
VECTOR = 8
"""Elements of a thread's access: 16 bytes of a 16-bit input, 8 bytes of fp8."""
PITCH = 16
"""Rows of fp8 outputs start at multiples of this many bytes, as TMA and tensor cores need."""
THREADS = 256
CTAS_PER_SM = {1: 4, 2: 4, 4: 2}
"""CTAs that an SM's registers are divided among, by the bytes of an element of x. All hold a whole tile."""
MANY_PARTS = 4096
"""More maxima than this become fewer before every CTA reads all of them."""
FEW_PARTS = 256
CLUSTERS = (1, 2, 4, 8)
"""Tiles that the CTAs of one cluster can take, each one."""
WARPS = THREADS // 32
RESERVED = 1024
"""Bytes of shared memory that the driver takes of each CTA."""
MAXIMA_ALIGN = 4
"""Elements of 16 bytes: rows of maxima start at multiples of them."""
Kinds = tuple["str | None", "str | None"]
"""Sources of the scales of x and of its transpose."""


@frozen
class OneLaunch:
    """The CTAs of `quantize_grid`, which all run at the same time: `per_sm` on an SM. Each keeps its first
    `kept` tiles in shared memory from the first pass to the second. `rounds`: there are more matrices than
    CTAs."""

    per_sm: int
    kept: int
    rounds: bool
    cluster: bool = False
    """All CTAs are one cluster and meet at its barrier; otherwise they meet at a counter."""


@frozen
class TileQuantization:
    """One pass over tiles of 128 x 128. `plain` and `turned` say where the scales of x and of its transpose
    come from: None (there is no such output), "one" (all 1), "given" (a scale of all, which is there),
    "whole", "matrix" and "lines" (of all, of each matrix or of each row of the output, made from maxima of
    parts), "group" (of each row's 128 elements in the tile) or "block" (of the tile).
    """

    format: str
    plain: str | None
    turned: str | None
    key_order: bool = False
    """The columns of the transpose are permuted within every 16, for the second product of fp8 attention: the
    pairs 0 … 7 stand in the order 0, 4, 1, 5, 2, 6, 3, 7."""
    early: bool = False
    """Programmatic dependent launch: it begins beside the tail of the kernel before, and lets the next."""
    lets_start: bool = False
    """The next kernel, which must wait for this one, may start beside it; this one waits for those before."""

    grid: OneLaunch | None = None
    """Maxima and conversion in one launch, by `quantize_grid`."""

    @property
    def of_parts(self) -> bool:
        """True where maxima come from a kernel before this one, which read x too."""
        return bool({"whole", "matrix", "lines"} & {self.plain, self.turned})


@frozen
class RowQuantization:
    """One pass over rows, each held in registers by `threads` threads of `cluster` CTAs, `vectors` in each
    thread; with `vectors` 0 rows are too long for that and are read twice."""

    format: str
    threads: int
    vectors: int
    cluster: int = 1
    early: bool = False
    """As in `TileQuantization`."""
    whole: bool = False
    """All of x, which is contiguous, is one row."""

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return THREADS // self.threads


@frozen
class LineQuantization:
    """Scales of rows of both outputs in two passes. The first takes rows, `rows` at a time, `vectors` of each
    in each of a CTA's threads, the second tiles."""

    format: str
    threads: int
    vectors: int
    rows: int
    ahead: bool
    """The next rows are loaded before the work on these."""
    early: bool = False
    """As in `TileQuantization`."""

    @property
    def per_sm(self) -> int:
        """CTAs of an SM."""
        return 3 if self.ahead else 4 * THREADS // self.threads

    @property
    def turned(self) -> TileQuantization:
        """The second pass."""
        return TileQuantization(self.format, None, "lines", early=self.early)


LEAST_TILES = (2, 8)
"""Tiles of an SM up to which matrices are not read once: of tiles that columns do not fill, and of others."""


@frozen
class MatrixQuantization:
    """Scales of matrices of 16 bits in one read. An item is `vectors` in each thread of a CTA, of which
    `per_sm` fit an SM; it is fetched `ahead` items before its maximum is taken, and converted `lag` later."""

    format: str
    vectors: int = 8
    ahead: int = 1
    lag: int = 2
    per_sm: int = 2
    early: bool = False
    """As in `TileQuantization`."""

    @property
    def elements(self) -> int:
        """Of an item."""
        return self.vectors * THREADS * VECTOR

    def items(self, rows: int, columns: int) -> int:
        """Of a matrix."""
        return -(-rows * columns // self.elements)


def matrix_quantization(
    format: str,
    shape: tuple[int, int, int],
    device: tuple[int, int, bool],
    bytes_each: int,
    least: tuple[int, int] = LEAST_TILES,
) -> tuple[MatrixQuantization, int] | None:
    """The mode of `quantize_matrices` for x of shape (matrices, rows, columns), and its CTAs. None where
    others take x: a matrix is more than all CTAs keep, or L2 keeps so much of x that a second read is cheap.

    device: its SMs, the bytes of shared memory that a CTA can have, and whether early launches can be had.
    least: as LEAST_TILES, which were measured.
    """
    matrices, rows, columns = shape
    sms, smem_bytes, early = device
    spec = MatrixQuantization(format, early=early)
    if 2 * rows * columns <= spec.elements:  # a matrix that fills half an item
        spec = replace(spec, vectors=spec.vectors // 2, per_sm=2 * spec.per_sm)
    ctas, tiles, items = spec.per_sm * sms, -(-columns // TILE), spec.items(rows, columns)
    in_whole_matrices = ctas // items * items if items else 0
    if 8 * in_whole_matrices >= 7 * ctas:
        ctas = in_whole_matrices  # so that nobody waits for items of a step later than its own
    if bytes_each > 2 or columns % VECTOR or items > ctas * (spec.lag - 1):
        return None
    if matrices * -(-rows // TILE) * tiles <= least[4 * columns > 3 * tiles * TILE] * sms:
        return None
    own = (spec.ahead + spec.lag) * spec.elements * bytes_each + 16 * WARPS + RESERVED
    return (spec, min(ctas, matrices * items)) if own * spec.per_sm <= smem_bytes + RESERVED else None


def line_quantization(
    format: str, shape: tuple[int, int, int], device: tuple[int, bool], bytes_each: int
) -> tuple[LineQuantization, int] | None:
    """The mode of `quantize_lines` for x of shape (matrices, rows, columns), and a CTA's rows. None where
    `quantize_grid` takes x: the chip keeps much of it, or its rows fill less of a CTA's vectors.

    device: its SMs, and whether early launches can be had. All CTAs run at the same time: the more rows each
    has, the fewer maxima it adds to those of all.
    """
    matrices, rows, columns = shape
    sms, early = device
    threads = THREADS if columns <= 4 * THREADS * VECTOR else 2 * THREADS
    vectors = -(-columns // (threads * VECTOR))
    small = matrices * -(-rows // TILE) * -(-columns // TILE) <= 24 * sms
    if small or bytes_each > 2 or vectors > 4 or 10 * columns < 7 * vectors * threads * VECTOR:
        return None
    ahead = threads == THREADS and vectors != 3  # registers
    spec = LineQuantization(format, threads, vectors, max(1, 4 // vectors), ahead, early)
    each = -(-rows // max(1, spec.per_sm * sms // matrices))
    return spec, -(-each // spec.rows) * spec.rows


def row_quantization(format: str, columns: int, hopper: bool, bytes_each: int = 4) -> RowQuantization:
    """The division of rows of `columns` elements of that many bytes among threads; `hopper`: clusters can be
    had, early launches too."""
    for threads, most in ((32, 4), (THREADS, 8)):
        for vectors in (1, 2, 4, 8):
            if vectors <= most and columns <= threads * vectors * VECTOR:
                return RowQuantization(format, threads, vectors, 1, hopper)
    if not hopper:
        return RowQuantization(format, THREADS, 0)
    for cluster, vectors in ((2, 8), (4, 8), (8, 8), (8, 16)):
        if columns <= THREADS * vectors * cluster * VECTOR and vectors * bytes_each <= 32:
            return RowQuantization(format, THREADS, vectors, cluster, True)
    return RowQuantization(format, THREADS, 0, 8, True)


def _padded(size: int) -> int:
    return -(-size // MAXIMA_ALIGN) * MAXIMA_ALIGN


def maxima_elements(matrices: int, columns: int, parts: int, kinds: Kinds) -> int:
    """Elements of the workspace of `quantize_by_maxima`. `kinds`: the spec's (plain, turned)."""
    if "lines" in kinds:
        return matrices * parts * _padded(columns)
    return matrices * _padded(parts) + FEW_PARTS


def grid_elements(matrices: int, rows: int, columns: int, kinds: Kinds) -> int:
    """Elements of the workspace of `quantize_grid`. `kinds`: the spec's (plain, turned)."""
    if "lines" not in kinds:
        return 1 if "whole" in kinds else matrices
    return matrices * (_padded(columns) + (_padded(rows) if kinds[0] == "lines" else 0))


def line_elements(matrices: int, columns: int) -> int:
    """Elements of the workspace of `quantize_lines`."""
    return matrices * _padded(columns)


def division_of(matrices: int, tiles: tuple[int, int], resident: int) -> tuple[int, int, int]:
    """(CTAs, along M, along K): how `quantize_grid` deals the tiles of matrices, so many along M and K, to at
    most `resident` CTAs: as evenly as can be, and then as wide as can be."""
    most = max(1, resident // matrices)

    def tiles_of_one(k: int) -> tuple[int, int]:
        return -(-tiles[0] // min(tiles[0], most // k)) * -(-tiles[1] // k), -k

    k = min(range(1, min(tiles[1], most) + 1), key=tiles_of_one)
    m = min(tiles[0], most // k)
    return min(resident, matrices * m * k), m, k


def one_launch(
    kinds: Kinds, matrices: int, tiles: tuple[int, int], device: tuple[int, int, bool], bytes_each: int
) -> tuple[OneLaunch, tuple[int, int, int]] | None:
    """The mode of `quantize_grid` for matrices of so many tiles, and its division. None where a launch for
    the maxima and one for the conversion are as fast.

    device: its SMs, the bytes of shared memory that a CTA can have, and whether clusters can be had.

    A tile for each CTA of one cluster takes the least time of all. Two launches pass over a large tensor
    without a pause: CTAs that end early are replaced. One launch saves 2 µs of the host's time, and the
    second read of what stays on the chip. Lines of both outputs need three launches otherwise.
    """
    sms, smem_bytes, clusters = device
    count = matrices * tiles[0] * tiles[1]
    if clusters and count in CLUSTERS:
        return OneLaunch(2, 0, False, cluster=True), division_of(matrices, tiles, count)
    both = None not in kinds
    if kinds != ("lines", "lines") and not (0 if both else 4 * sms) < count <= 8 * sms:
        return None
    found = []
    for per_sm in (2,) if bytes_each > 2 else (2, 3):
        ctas, m, k = division_of(matrices, tiles, per_sm * sms)
        steps = -(-tiles[0] // m) * -(-tiles[1] // k) * -(-matrices * m * k // ctas)
        found.append((steps * per_sm, per_sm, (ctas, m, k)))
    # Three CTAs hide more, unless they share the work worse.
    _, per_sm, division = found[-1] if found[-1][0] <= 1.1 * found[0][0] else found[0]
    own = 4 * WARPS * TILE + (TILE * TILE if kinds[1] is not None else 0)
    kept = ((smem_bytes + RESERVED) // per_sm - RESERVED - own) // (TILE * TILE * bytes_each)
    return OneLaunch(per_sm, kept, matrices > per_sm * sms), division
