"""The compiled functions. Each does what a NumPy function of the emulator does, bit for bit.

All of them are in one file, because numba's cache on disk looks at the source file of a function alone.
"""

from __future__ import annotations

import numpy as np

from .jit import jit

_FAR_BELOW = -2000  # the exponent of zero
_LOWEST = 400  # POWERS[i] is 2 ** (i - _LOWEST); shifts of finite operands lie far inside
_POWERS = np.ldexp(1.0, np.arange(-_LOWEST, _LOWEST))
_LARGEST = float.fromhex("0x1.fffffep127")
_SUBNORMAL = float.fromhex("0x1p-126")
_NAN = np.uint32(0x7FFFFFFF)


@jit
def _exponents(values, out):  # type: ignore[no-untyped-def]
    """floor(log2 |x|) of normal float64 values, from their bits; far below every other for zeros.

    Returns whether all are finite.
    """
    bits = values.view(np.int64)
    finite = True
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            field = (bits[i, j] >> 52) & 0x7FF
            out[i, j] = field - 1023 if field else _FAR_BELOW
            finite &= field != 0x7FF
    return finite


@jit
def _larger(x, y):  # type: ignore[no-untyped-def]
    """Of two float32, in one vector instruction: `max` asks for NaN too."""
    return x if x > y else y


@jit
def _clamp(total, row, fraction):  # type: ignore[no-untyped-def]
    """A row of sums in the range of float32, with ``fraction`` bits."""
    bits, keep_bits = total.view(np.int64), ~((np.int64(1) << (52 - fraction)) - 1)
    quantum, finest = _POWERS[126 + fraction + _LOWEST], _POWERS[-126 - fraction + _LOWEST]
    for j in range(total.shape[1]):
        value = total[row, j]
        if abs(value) < _SUBNORMAL:
            total[row, j] = np.trunc(value * quantum) * finest
            continue
        bits[row, j] &= keep_bits
        if value > _LARGEST:
            total[row, j] = _LARGEST
        elif value < -_LARGEST:
            total[row, j] = -_LARGEST


@jit
def aligned(a, b, c, group, bits, fraction):  # type: ignore[no-untyped-def]
    """c + a @ b as `tensor_core._aligned` sums it, in float64, or the plain sum where it is not finite.

    a (M, K), b (K, N), c (M, N), all contiguous float64 that came from float32 or narrower formats. Four
    products at a time: they are cut to integers, so that their sum is exact in any order.
    """
    rows, depth = a.shape
    columns = b.shape[1]
    a_exponent, b_exponent = np.empty((rows, depth), np.float32), np.empty((depth, columns), np.float32)
    c_exponent = np.empty((rows, columns), np.float32)
    finite = _exponents(a, a_exponent) & _exponents(b, b_exponent) & _exponents(c, c_exponent)
    largest = np.empty(columns, np.float32)
    scale, back, kept = np.empty(columns), np.empty(columns), np.empty(columns)
    scale_bits, back_bits = scale.view(np.int64), back.view(np.int64)
    keep_bits = ~((np.int64(1) << (52 - fraction)) - 1)
    total = c.copy()
    total_bits = total.view(np.int64)
    for start in range(0, depth, group):
        if start:
            _exponents(total, c_exponent)
        stop = min(start + group, depth)
        fours = start + (stop - start) // 4 * 4
        for i in range(rows):
            for j in range(columns):
                largest[j] = c_exponent[i, j]
            for k in range(start, fours, 4):
                p, q = a_exponent[i, k], a_exponent[i, k + 1]
                r, s = a_exponent[i, k + 2], a_exponent[i, k + 3]
                for j in range(columns):
                    first = _larger(p + b_exponent[k, j], q + b_exponent[k + 1, j])
                    second = _larger(r + b_exponent[k + 2, j], s + b_exponent[k + 3, j])
                    largest[j] = _larger(largest[j], _larger(first, second))
            for k in range(fours, stop):
                for j in range(columns):
                    largest[j] = _larger(largest[j], a_exponent[i, k] + b_exponent[k, j])
            for j in range(columns):
                # Only zeros are that small, and infinities that large: any scale does.
                shift = min(max(bits - np.int64(largest[j]), 1 - _LOWEST), _LOWEST - 1)
                scale_bits[j] = (1023 + shift) << 52  # 2 ** shift
                back_bits[j] = (1023 - shift) << 52
                kept[j] = 0.0 + np.trunc(total[i, j] * scale[j])  # no negative zero
            for k in range(start, fours, 4):
                x, y, z, w = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
                for j in range(columns):
                    by = scale[j]
                    one = np.trunc(x * b[k, j] * by) + np.trunc(y * b[k + 1, j] * by)
                    two = np.trunc(z * b[k + 2, j] * by) + np.trunc(w * b[k + 3, j] * by)
                    kept[j] += one + two
            for k in range(fours, stop):
                for j in range(columns):
                    kept[j] += np.trunc(a[i, k] * b[k, j] * scale[j])
            odd = False
            for j in range(columns):
                value = kept[j] * back[j]
                total[i, j] = value
                odd |= (abs(value) > _LARGEST) | ((abs(value) < _SUBNORMAL) & (value != 0.0))
            if odd:
                _clamp(total, i, fraction)
                continue
            for j in range(columns):
                total_bits[i, j] &= keep_bits
    if finite:
        return total
    for i in range(rows):
        for j in range(columns):
            plain = c[i, j]
            for k in range(depth):
                plain += a[i, k] * b[k, j]
            if not np.isfinite(plain):
                total[i, j] = plain
    return total


@jit
def _canonical(values):  # type: ignore[no-untyped-def]
    """float64 -> float32 patterns, every NaN the canonical one."""
    out = values.astype(np.float32)
    words = out.view(np.uint32)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            if np.isnan(out[i, j]):
                words[i, j] = _NAN
    return out


@jit
def product(a, b, c, group, bits, fraction):  # type: ignore[no-untyped-def]
    """`aligned` as float32."""
    return _canonical(aligned(a, b, c, group, bits, fraction))


@jit
def gather_blocks(blocks, columns):  # type: ignore[no-untyped-def]
    """The accumulators of four warps, uint32 (N / 2, 32) each, as a matrix (64, N) of float64."""
    out = np.empty((64, columns), np.float64)
    for warp in range(4):
        held = blocks[warp].view(np.float32)
        for register in range(columns // 2):
            row = warp * 16 + 8 * (register // 2 % 2)
            column = register // 4 * 8 + register % 2
            for lane in range(32):
                out[row + lane // 4, column + lane % 4 * 2] = held[register, lane]
    return out


@jit
def scatter_blocks(blocks, matrix):  # type: ignore[no-untyped-def]
    """The inverse, every NaN the canonical one."""
    for warp in range(4):
        block = blocks[warp]
        held = block.view(np.float32)
        for register in range(matrix.shape[1] // 2):
            row = warp * 16 + 8 * (register // 2 % 2)
            column = register // 4 * 8 + register % 2
            for lane in range(32):
                value = np.float32(matrix[row + lane // 4, column + lane % 4 * 2])
                held[register, lane] = value
                if np.isnan(value):
                    block[register, lane] = _NAN


@jit
def warpgroup_product(a, b, blocks, add, model):  # type: ignore[no-untyped-def]
    """`wgmma.accumulate` to float32. a (64, K), b (K, N) contiguous float64; four blocks uint32 (N / 2, 32).

    ``model``: the group, bits and fraction of `aligned`.
    """
    group, bits, fraction = model
    columns = b.shape[1]
    c = gather_blocks(blocks, columns) if add else np.zeros((64, columns), np.float64)
    scatter_blocks(blocks, aligned(a, b, c, group, bits, fraction))


@jit
def one_target(addresses, size, rank_shift, low, high, ranks):  # type: ignore[no-untyped-def]
    """The rank that all cluster-window addresses name, in bounds and aligned; -1 where anything is amiss."""
    first = addresses[0] >> rank_shift
    if first < 0 or first >= ranks:
        return -1
    for i in range(addresses.shape[0]):
        offset = addresses[i] & ((1 << rank_shift) - 1)
        if addresses[i] >> rank_shift != first or offset < low or offset + size > high or offset % size:
            return -1
    return first


@jit
def inside(offsets, size, end):  # type: ignore[no-untyped-def]
    """True if there are pieces of ``size`` bytes, and all of their bytes are below ``end``."""
    for i in range(offsets.shape[0]):
        if offsets[i] < 0 or offsets[i] + size > end:
            return False
    return offsets.shape[0] > 0


@jit
def _bounds(offsets, size):  # type: ignore[no-untyped-def]
    low, high = offsets[0], offsets[0]
    for i in range(1, offsets.shape[0]):
        low = min(low, offsets[i])
        high = max(high, offsets[i])
    return low, high + size


@jit
def _alike(values, low, high):  # type: ignore[no-untyped-def]
    """True if all of these numbers are the same."""
    first, different = values[low], False
    for at in range(np.uint64(low), np.uint64(high)):
        different |= values[at] != first
    return not different


@jit
def _follows(writer, written_at, vc, offsets, size):  # type: ignore[no-untyped-def]
    """True if the clocks cover the last write of every byte."""
    for i in range(offsets.shape[0]):
        low, high = offsets[i], offsets[i] + size
        if size > 256 and _alike(writer, low, high) and _alike(written_at, low, high):
            if written_at[low] > vc[writer[low]]:
                return False
            continue
        last_writer, last_clock = -1, 0
        for at in range(offsets[i], offsets[i] + size):
            by, clock = writer[at], written_at[at]
            if by != last_writer or clock != last_clock:
                if clock > vc[by]:
                    return False
                last_writer, last_clock = by, clock
    return True


@jit
def mark(marks, row, clock, offsets, size):  # type: ignore[no-untyped-def]
    """Note a read of the pieces in a row."""
    for i in range(offsets.shape[0]):
        low = np.uint64(offsets[i])
        for at in range(low, low + np.uint64(size)):
            marks[row, at] = clock


@jit
def read(writer, written_at, vc, marks, row, clock, offsets, size):  # type: ignore[no-untyped-def]
    """Note a read in ``row`` and return its bounds; (-1, -1), and no note, if it does not follow a write."""
    if not inside(offsets, size, writer.shape[0]) or not _follows(writer, written_at, vc, offsets, size):
        return -1, -1
    mark(marks, row, clock, offsets, size)
    return _bounds(offsets, size)


@jit
def write(held, reads, vc, mine, offsets, size, plain):  # type: ignore[no-untyped-def]
    """Note a write and return its bounds; (-1, -1), and no note, if it does not follow an access.

    ``held``: the last writers, their clocks, and which bytes are ordinary and undefined. ``reads``: marks,
    the agents of their rows, and how many there are. ``mine``: the agent that writes, and its clock.
    """
    writer, written_at, ordinary, undefined = held
    marks, readers, count = reads
    agent, clock = mine
    if not inside(offsets, size, writer.shape[0]) or not _follows(writer, written_at, vc, offsets, size):
        return -1, -1
    for row in range(count):
        seen = vc[readers[row]]
        for i in range(offsets.shape[0]):
            late = False
            for at in range(offsets[i], offsets[i] + size):
                late |= marks[row, at] > seen
            if late:
                return -1, -1
    for i in range(offsets.shape[0]):
        low, high = offsets[i], offsets[i] + size
        writer[low:high] = agent
        written_at[low:high] = clock
        ordinary[low:high] = plain
        undefined[low:high] = False
    return _bounds(offsets, size)


@jit
def fenced(ordinary, writer, written_at, fc, offsets, size):  # type: ignore[no-untyped-def]
    """True if every ordinary write of these bytes is covered by the clocks of proxy fences."""
    if not inside(offsets, size, writer.shape[0]):
        return False
    for i in range(offsets.shape[0]):
        some = False
        for at in range(offsets[i], offsets[i] + size):
            some |= ordinary[at]
        if not some:
            continue
        for at in range(offsets[i], offsets[i] + size):
            if ordinary[at] and written_at[at] > fc[writer[at]]:
                return False
    return True


@jit
def _alike_there(held, low, size):  # type: ignore[no-untyped-def]
    """True if these bytes are defined, and their last write is that of the first of them."""
    writer, written_at, ordinary, undefined = held
    by, clock, plain = writer[low], written_at[low], ordinary[low]
    others, later, odd = False, False, False
    for at in range(low, low + size):
        others |= writer[at] != by
        later |= written_at[at] != clock
        odd |= undefined[at] | (ordinary[at] != plain)
    return not (others | later | odd)


@jit
def may_consume(held, clocks, offsets):  # type: ignore[no-untyped-def]
    """True if all bytes are defined, and these clocks cover their writes: as fenced, where ordinary."""
    writer, written_at, ordinary, undefined = held
    vc, fc = clocks
    size = np.uint64(16)
    for i in range(offsets.shape[0]):
        low = np.uint64(offsets[i])
        end = low + np.uint64(1) if _alike_there(held, low, size) else low + size
        for at in range(low, end):
            by, clock = writer[at], written_at[at]
            if undefined[at] or clock > vc[by] or (ordinary[at] and clock > fc[by]):
                return False
    return True


@jit
def any_of(flags, offsets, size):  # type: ignore[no-untyped-def]
    """True if a flag is set in the pieces of ``size`` bytes."""
    for i in range(offsets.shape[0]):
        for j in range(size):
            if flags[offsets[i] + j]:
                return True
    return False


@jit
def bank_conflicts(addresses, size):  # type: ignore[no-untyped-def]
    """Passes of a shared access beyond one for each group of lanes, see `Stats.shared_access`."""
    group = 32 if size <= 4 else (16 if size == 8 else 8)
    words_each = max(size, 4) // 4
    held = np.empty((32, group * words_each), np.int64)
    count = np.empty(32, np.int64)
    extra = 0
    for start in range(0, addresses.shape[0], group):
        count[:] = 0
        most = 0
        for i in range(start, min(start + group, addresses.shape[0])):
            for j in range(words_each):
                word = (addresses[i] + 4 * j) >> 2
                bank = word & 31
                known = False
                for n in range(count[bank]):
                    known |= held[bank, n] == word
                if not known:
                    held[bank, count[bank]] = word
                    count[bank] += 1
                    most = max(most, count[bank])
        extra += most - 1
    return extra


@jit
def distribute(rows, transposed):  # type: ignore[no-untyped-def]
    """`ldmatrix.distribute` with the registers first: uint16 (count, 8, 8) -> uint32 (count, 32)."""
    out = np.empty((rows.shape[0], 32), np.uint32)
    for matrix in range(rows.shape[0]):
        for lane in range(32):
            i, j = lane // 4, lane % 4 * 2
            low = rows[matrix, j, i] if transposed else rows[matrix, i, j]
            high = rows[matrix, j + 1, i] if transposed else rows[matrix, i, j + 1]
            out[matrix, lane] = np.uint32(low) | (np.uint32(high) << np.uint32(16))
    return out


@jit
def _multiply(words, plan, values, k, wide, group, bits, fraction):  # type: ignore[no-untyped-def]
    """`mma.multiply` to float32, among rows of 32 ``words``: the first of those of D, A, B, C in ``plan``.

    ``wide``: operands of 32 bits, the value of each its own; otherwise of 16, and ``values`` is the table of
    all of them.
    """
    each = 1 if wide else 2
    b_end = len(plan) - 4
    a_end = 4 + (b_end - 4) * 2 // 3
    d, a_rows, b_rows, c_rows = plan[:4], plan[4:a_end], plan[a_end:b_end], plan[b_end:]
    floats = words.view(np.float32)
    a = np.empty((16, k), np.float64)
    b = np.empty((k, 8), np.float64)
    c = np.empty((16, 8), np.float64)
    one = np.empty(1, np.uint32)
    for lane in range(32):
        row, quad = lane // 4, lane % 4
        for r in range(a_rows.shape[0]):
            word = words[a_rows[r] + lane]
            for i in range(each):
                if wide:
                    one[0] = word & np.uint32(0xFFFFE000)
                    value = one.view(np.float32)[0]
                else:
                    value = values[(word >> np.uint32(16 * i)) & np.uint32(0xFFFF)]
                a[row + 8 * (r % 2), (r // 2) * 4 * each + quad * each + i] = value
        for r in range(b_rows.shape[0]):
            word = words[b_rows[r] + lane]
            for i in range(each):
                if wide:
                    one[0] = word & np.uint32(0xFFFFE000)
                    value = one.view(np.float32)[0]
                else:
                    value = values[(word >> np.uint32(16 * i)) & np.uint32(0xFFFF)]
                b[r * 4 * each + quad * each + i, row] = value
        for r in range(4):
            c[row + 8 * (r // 2), quad * 2 + r % 2] = floats[c_rows[r] + lane]
    total = aligned(a, b, c, group, bits, fraction)
    for lane in range(32):
        for r in range(4):
            value = np.float32(total[lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2])
            floats[d[r] + lane] = value
            if np.isnan(value):
                words[d[r] + lane] = _NAN


@jit
def products(words, plan, values, k, wide, group, bits, fraction):  # type: ignore[no-untyped-def]
    """Products one after another; a row of ``plan`` is that of one."""
    for i in range(plan.shape[0]):
        _multiply(words, plan[i], values, k, wide, group, bits, fraction)


@jit
def rows(memory, offsets, size):  # type: ignore[no-untyped-def]
    """``size`` bytes at each offset."""
    out = np.empty((offsets.shape[0], size), np.uint8)
    for i in range(offsets.shape[0]):
        for j in range(size):
            out[i, j] = memory[offsets[i] + j]
    return out


@jit
def put_rows(memory, offsets, data):  # type: ignore[no-untyped-def]
    """A row of ``data`` to each offset, the last one last."""
    for i in range(offsets.shape[0]):
        for j in range(data.shape[1]):
            memory[offsets[i] + j] = data[i, j]
