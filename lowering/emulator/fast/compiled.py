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
def aligned(a, b, c, group, bits, fraction):  # type: ignore[no-untyped-def]
    """c + a @ b as `tensor_core._aligned` sums it, in float64, or the plain sum where it is not finite.

    a (M, K), b (K, N), c (M, N), all contiguous float64 that came from float32 or narrower formats.
    """
    rows, depth = a.shape
    columns = b.shape[1]
    a_exponent = np.empty((rows, depth), np.int32)
    b_exponent = np.empty((depth, columns), np.int32)
    c_exponent = np.empty((rows, columns), np.int32)
    finite = _exponents(a, a_exponent) & _exponents(b, b_exponent) & _exponents(c, c_exponent)
    largest = np.empty(columns, np.int32)
    scale = np.empty(columns, np.float64)
    back = np.empty(columns, np.float64)
    kept = np.empty(columns, np.float64)
    keep_bits = ~((np.int64(1) << (52 - fraction)) - 1)
    total = c.copy()
    total_bits = total.view(np.int64)
    quantum = _POWERS[126 + fraction + _LOWEST]
    finest = _POWERS[-126 - fraction + _LOWEST]
    for start in range(0, depth, group):
        if start:
            _exponents(total, c_exponent)
        stop = min(start + group, depth)
        for i in range(rows):
            for j in range(columns):
                largest[j] = c_exponent[i, j]
            for k in range(start, stop):
                e = a_exponent[i, k]
                for j in range(columns):
                    largest[j] = max(largest[j], e + b_exponent[k, j])
            for j in range(columns):
                # Only zeros are that small, and infinities that large: any scale does.
                shift = min(max(bits - largest[j], 1 - _LOWEST), _LOWEST - 1)
                scale[j] = _POWERS[shift + _LOWEST]
                back[j] = _POWERS[_LOWEST - shift]
                kept[j] = 0.0
            for k in range(start, stop):
                x = a[i, k]
                for j in range(columns):
                    kept[j] += np.trunc(x * b[k, j] * scale[j])
            for j in range(columns):
                total[i, j] = (kept[j] + np.trunc(total[i, j] * scale[j])) * back[j]
            for j in range(columns):
                value = total[i, j]
                if abs(value) < _SUBNORMAL:
                    total[i, j] = np.trunc(value * quantum) * finest
                else:
                    total_bits[i, j] &= keep_bits
                    if value > _LARGEST:
                        total[i, j] = _LARGEST
                    elif value < -_LARGEST:
                        total[i, j] = -_LARGEST
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
def one_run(offsets, size):  # type: ignore[no-untyped-def]
    """The start of the pieces of ``size`` bytes at distinct offsets, where they are one run; -1 otherwise."""
    low, top = offsets[0], offsets[0]
    for i in range(1, offsets.shape[0]):
        low = min(low, offsets[i])
        top = max(top, offsets[i])
    if top + size - low != offsets.shape[0] * size:
        return -1
    seen = np.zeros(top + 1 - low, np.bool_)
    for i in range(offsets.shape[0]):
        if seen[offsets[i] - low]:
            return -1
        seen[offsets[i] - low] = True
    return low


@jit
def spread(offsets, size):  # type: ignore[no-untyped-def]
    """The bytes of the pieces."""
    out = np.empty(offsets.shape[0] * size, np.int64)
    for i in range(offsets.shape[0]):
        for j in range(size):
            out[i * size + j] = offsets[i] + j
    return out


@jit
def early(writer, written_at, vc, index):  # type: ignore[no-untyped-def]
    """True if some byte's last write is not covered by the clocks."""
    for i in range(index.shape[0]):
        if written_at[index[i]] > vc[writer[index[i]]]:
            return True
    return False


@jit
def late(mark, clock, index):  # type: ignore[no-untyped-def]
    """True if some byte's last read came after ``clock``."""
    for i in range(index.shape[0]):
        if mark[index[i]] > clock:
            return True
    return False


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
def matrix_multiply(words, values, k, wide, group, bits, fraction):  # type: ignore[no-untyped-def]
    """`mma.multiply` to float32: D's registers, uint32 (4, 32).

    ``words``: those of A, B and C, uint32 (registers, 32). ``wide``: operands of 32 bits, the value of each
    its own; otherwise of 16, and ``values`` is the table of all of them.
    """
    count = words.shape[0] - 4
    a_count, b_count = count * 2 // 3, count // 3
    each = 1 if wide else 2
    floats = words.view(np.float32)
    a = np.empty((16, k), np.float64)
    b = np.empty((k, 8), np.float64)
    c = np.empty((16, 8), np.float64)
    cut = (words & np.uint32(0xFFFFE000)).view(np.float32)
    for lane in range(32):
        row, quad = lane // 4, lane % 4
        for r in range(a_count):
            for i in range(each):
                value = (
                    cut[r, lane]
                    if wide
                    else values[(words[r, lane] >> np.uint32(16 * i)) & np.uint32(0xFFFF)]
                )
                a[row + 8 * (r % 2), (r // 2) * 4 * each + quad * each + i] = value
        for r in range(b_count):
            for i in range(each):
                w = words[a_count + r, lane]
                value = (
                    cut[a_count + r, lane] if wide else values[(w >> np.uint32(16 * i)) & np.uint32(0xFFFF)]
                )
                b[r * 4 * each + quad * each + i, row] = value
        for r in range(4):
            c[row + 8 * (r // 2), quad * 2 + r % 2] = floats[count + r, lane]
    d = _canonical(aligned(a, b, c, group, bits, fraction))
    out = np.empty((4, 32), np.float32)
    for lane in range(32):
        for r in range(4):
            out[r, lane] = d[lane // 4 + 8 * (r // 2), lane % 4 * 2 + r % 2]
    return out.view(np.uint32)


@jit
def bounds(index):  # type: ignore[no-untyped-def]
    """The smallest and the largest number."""
    low, high = index[0], index[0]
    for i in range(1, index.shape[0]):
        low = min(low, index[i])
        high = max(high, index[i])
    return low, high


@jit
def note_write(writer, written_at, ordinary, undefined, index, agent, clock, plain):  # type: ignore[no-untyped-def]
    """Write down who wrote some bytes."""
    for i in range(index.shape[0]):
        at = index[i]
        writer[at] = agent
        written_at[at] = clock
        ordinary[at] = plain
        undefined[at] = False


@jit
def note_read(mark, index, clock):  # type: ignore[no-untyped-def]
    """Write down when some bytes were read."""
    for i in range(index.shape[0]):
        mark[index[i]] = clock


@jit
def rows(memory, offsets, size):  # type: ignore[no-untyped-def]
    """``size`` bytes at each offset."""
    out = np.empty((offsets.shape[0], size), np.uint8)
    for i in range(offsets.shape[0]):
        for j in range(size):
            out[i, j] = memory[offsets[i] + j]
    return out
