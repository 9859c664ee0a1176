"""WGMMA in compiled code: its issue by one warp, its groups, and its products."""

from __future__ import annotations

import numpy as np

from . import opcodes as o
from . import places
from .compiled import aligned, gather_blocks, mark, may_consume, scatter_blocks
from .jit import jit

_UNKNOWN_BITS = 0x3FFFC000C000C000
"""Bits of a descriptor that mean nothing, or what is not modelled."""


@jit
def _swizzle_of(word):  # type: ignore[no-untyped-def]
    """A descriptor's swizzle: bytes of its span, 16 for none; see `semantics.wgmma`."""
    code = (word >> 62) & 3
    return 16 if code == 0 else 16 << (4 - code)


@jit
def _pieces(word, rows, transposed):  # type: ignore[no-untyped-def]
    """Offsets of the 16-byte pieces of an operand: two for each row, or one for each 8 rows and each k."""
    start, leading = (word & 0x3FFF) << 4, ((word >> 16) & 0x3FFF) << 4
    stride, span = ((word >> 32) & 0x3FFF) << 4, _swizzle_of(word)
    units = 0  # in a span, as a power of two
    while 16 << units < span:
        units += 1
    out = np.empty(2 * rows, np.int64)
    for i in range(2 * rows):
        if transposed:
            k, unit = i % 16, i // 16
            if span == 16:
                at = unit * stride + k % 8 * 16 + k // 8 * leading
            else:
                at = (unit << 4 & span - 1) + (unit >> units) * leading + k % 8 * span + k // 8 * stride
        else:
            row, half = i // 2, i % 2
            at = row % 8 * span + row // 8 * stride + half * (leading if span == 16 else 16)
        at += start
        out[i] = at ^ ((at >> 3) & (span - 1) & ~15)
    return out


@jit
def _inside(offsets, end):  # type: ignore[no-untyped-def]
    """The first byte and the one after the last; (-1, -1) where these are not in shared memory."""
    low, high = offsets[0], offsets[0]
    for i in range(offsets.shape[0]):
        low, high = min(low, offsets[i]), max(high, offsets[i])
    return (low, high + 16) if low >= 1024 and high + 16 <= end else (-1, -1)


@jit
def _consume(memory, warp, operation, plan, clocks, group):  # type: ignore[no-untyped-def]
    """Note the reads of both operands; False, and nothing noted, where one of them needs a look."""
    reader = -1
    for row in range(warp[o.READERS_USED]):
        if memory[o.READERS][row] == group[o.GROUP_AGENT]:
            reader = row
    if reader < 0:
        return False
    b = _pieces(operation[o.W_B], plan[o.P_COLUMNS], plan[o.P_TRANSPOSED_B])
    a = _pieces(operation[o.W_A], 64, plan[o.P_TRANSPOSED_A])
    held = memory[o.WRITER], memory[o.WRITTEN_AT], memory[o.ORDINARY], memory[o.UNDEFINED]
    for offsets in (b, a):
        if _inside(offsets, memory[0].shape[0])[0] < 0 or not may_consume(held, clocks, offsets):
            return False
    for offsets in (b, a):
        mark(memory[o.MARKS_OF_READS], reader, operation[o.W_GROUP] + 1, offsets, 16)
        entry = memory[o.NOTES][warp[o.NOTES_USED]]
        entry[0], entry[1], entry[2] = group[o.GROUP_AGENT], operation[o.W_GROUP] + 1, 0
        entry[3] = operation[o.W_STEP]
        entry[4], entry[5] = _inside(offsets, memory[0].shape[0])
        warp[o.NOTES_USED] += 1
    return True


@jit
def _block(program, file, row, warp):  # type: ignore[no-untyped-def]
    """The slot of the accumulators that these registers hold, in order; -1 where they hold none."""
    registers = program[4][row[o.TARGET] : row[o.COMBINE]]
    first = file[4][registers[0]]
    slot = (first - 1) >> o.BLOCK_BITS
    if first == 0 or (first - 1) & ((1 << o.BLOCK_BITS) - 1) or slot >= o.MOST_BLOCKS:
        return -1
    for i in range(registers.shape[0]):
        if file[4][registers[i]] != first + i:
            return -1
    block = places.longs(places.longs(warp[o.BLOCKS_AT], o.MOST_BLOCKS)[slot], o.B_COLUMNS)
    return slot if block[o.B_COUNT] == registers.shape[0] else -1


@jit
def issue(program, memory, file, row, warp):  # type: ignore[no-untyped-def]
    """``wgmma.mma_async`` that goes on from accumulators under way; False, and nothing done, for others.

    STOPPED: its operands need a look, and the WGMMA is number STOPPED - 1.
    """
    a, b = np.int64(file[3][row[o.A]]), np.int64(file[3][row[o.B]])
    scale = np.int64(file[0][row[o.C]]) ^ ((row[o.FLAGS] >> 2) & 1)
    if not warp[o.FENCED] or not scale or (a | b) & _UNKNOWN_BITS:
        return False
    slot = _block(program, file, row, warp)
    if slot < 0:
        return False
    group, part = places.longs(warp[o.GROUP_AT], o.GROUP_COLUMNS), warp[o.NUMBER]
    number, room = group[o.ISSUED + part], group[o.ROOM]
    fresh = number == group[o.NEXT]
    if room == 0 or (fresh and number - group[o.OLDEST] == room):
        return False
    operation = places.table(group[o.ROWS_AT], room, o.W_COLUMNS)[number % room]
    if fresh:
        operation[:] = 0
        operation[o.W_STEP], operation[o.W_A], operation[o.W_B] = warp[o.AT], a, b
        operation[o.W_SCALE], operation[o.W_GROUP] = 1, -1
        group[o.NEXT] += 1
    elif (
        operation[o.W_STEP] != warp[o.AT] or operation[o.W_A] != a or operation[o.W_B] != b
        or operation[o.W_SCALE] != 1
    ):  # fmt: skip
        return False
    agents = warp[o.AGENTS]
    clocks = places.words(group[o.CLOCKS_AT], room * 2 * agents)[number % room * 2 * agents :]
    mine = places.words(warp[o.VC_AT], agents), places.words(warp[o.FC_AT], agents)
    least = clocks[:agents], clocks[agents : 2 * agents]
    for which in range(2):
        if operation[o.W_PARTS]:
            for i in range(agents):
                least[which][i] = min(least[which][i], mine[which][i])
        else:
            least[which][:] = mine[which]
    block = places.longs(places.longs(warp[o.BLOCKS_AT], o.MOST_BLOCKS)[slot], o.B_COLUMNS)
    block[o.B_GROUP] = group[o.COMMITS + part] + 1
    operation[o.W_BLOCKS + part] = block[o.B_VALUES]
    operation[o.W_PARTS] |= 1 << part
    group[o.ISSUED + part] += 1
    if operation[o.W_PARTS] == o.ALL_PARTS:
        operation[o.W_GROUP] = group[o.COMMITS + part]
        plan = program[4][row[o.TARGET] - o.P_LENGTH : row[o.TARGET]]
        if warp[o.CHECKS] and not _consume(memory, warp, operation, plan, least, group):
            warp[o.STOPPED] = number + 1
    return True


@jit
def commit(warp):  # type: ignore[no-untyped-def]
    """``wgmma.commit_group``; returns the group's number plus one if all four warps have committed it."""
    group, part = places.longs(warp[o.GROUP_AT], o.GROUP_COLUMNS), warp[o.NUMBER]
    number = group[o.COMMITS + part]
    group[o.COMMITS + part] += 1
    for i in range(4):
        if group[o.COMMITS + i] <= number:
            return np.int64(0)
    return number + 1


@jit
def wait(row, warp, memory, entry):  # type: ignore[no-untyped-def]
    """``wgmma.wait_group`` that blocks, or for which no accumulators are complete; False for others."""
    group = places.longs(warp[o.GROUP_AT], o.GROUP_COLUMNS)
    target = group[o.COMMITS + warp[o.NUMBER]] - row[o.OFFSET]
    if group[o.DONE_GROUPS] < target:
        entry[5], entry[6] = target, 0
        for i in range(4):
            entry[6] |= np.int64(group[o.COMMITS + i] < target) << i
        warp[o.BLOCKED] = 1
        return True
    if warp[o.BLOCKS_HIDDEN]:
        return False
    blocks = places.longs(warp[o.BLOCKS_AT], o.MOST_BLOCKS)
    for slot in range(o.MOST_BLOCKS):
        if blocks[slot] and places.longs(blocks[slot], o.B_COLUMNS)[o.B_GROUP] <= target:
            return False
    if target > 0 and memory[o.VC][group[o.GROUP_AGENT]] < target:
        memory[o.VC][group[o.GROUP_AGENT]] = target
        warp[o.LEARNED] = 1
    return True


@jit
def _matrix(smem, pieces, transposed, values, out, across):  # type: ignore[no-untyped-def]
    """Values of an operand of 16-bit elements: (rows, 16), or its transpose with ``across``."""
    for i in range(pieces.shape[0]):
        for j in range(8):
            row, k = (i // 16 * 8 + j, i % 16) if transposed else (i // 2, i % 2 * 8 + j)
            value = values[smem[pieces[i] // 2 + j]]
            if across:
                out[k, row] = value
            else:
                out[row, k] = value


@jit
def _operands(program, operation, plan, smem):  # type: ignore[no-untyped-def]
    """A (64, 16) and B (16, N) of a WGMMA; empty where they do not lie in shared memory."""
    columns = plan[o.P_COLUMNS]
    a, b = np.empty((64, 16), np.float64), np.empty((16, columns), np.float64)
    of_a = _pieces(operation[o.W_A], 64, plan[o.P_TRANSPOSED_A])
    of_b = _pieces(operation[o.W_B], columns, plan[o.P_TRANSPOSED_B])
    if _inside(of_a, smem.shape[0])[0] < 0 or _inside(of_b, smem.shape[0])[0] < 0:
        return a[:0], b
    halves = smem[: smem.shape[0] // 2 * 2].view(np.uint16)
    _matrix(halves, of_a, plan[o.P_TRANSPOSED_A], program[6], a, False)
    _matrix(halves, of_b, plan[o.P_TRANSPOSED_B], program[6], b, True)
    return a, b


@jit
def _blocks(operation, columns):  # type: ignore[no-untyped-def]
    """The accumulators of the four warps."""
    at, size = operation[o.W_BLOCKS :], (columns // 2, 32)
    return (
        places.patterns(at[0], size), places.patterns(at[1], size), places.patterns(at[2], size),
        places.patterns(at[3], size),
    )  # fmt: skip


@jit
def multiply(launch, operations, smem):  # type: ignore[no-untyped-def]
    """The products of WGMMAs whose parts have all come, in order, up to one of another kind; how many."""
    program = places.program(launch)
    held = np.empty((0, 0), np.float64)  # the accumulators of the last one
    for done in range(operations.shape[0]):
        operation = operations[done]
        step = program[1][operation[o.W_STEP]]
        row = program[0][step[o.FIRST]]
        known = step[o.KIND] == o.OPERATION and row[o.OP] == o.WGMMA and row[o.OFFSET] > 0
        plan = program[4][row[o.TARGET] - o.P_LENGTH : row[o.TARGET]] if known else program[4][:0]
        last = operations[max(done - 1, 0)]
        same = done > 0 and (last[o.W_BLOCKS :] == operation[o.W_BLOCKS :]).all()
        same = same and known and held.shape[1] == plan[o.P_COLUMNS]
        if done > 0 and not same:
            scatter_blocks(_blocks(last, held.shape[1]), held)
        if not known:
            return done
        a, b = _operands(program, operation, plan, smem)
        if a.shape[0] == 0:
            if same:
                scatter_blocks(_blocks(last, held.shape[1]), held)
            return done
        columns = plan[o.P_COLUMNS]
        if not operation[o.W_SCALE]:
            held = np.zeros((64, columns), np.float64)
        elif not same:
            held = gather_blocks(_blocks(operation, columns), columns)
        held = aligned(a, b, held, plan[o.P_GROUP], plan[o.P_BITS], plan[o.P_FRACTION])
    if operations.shape[0]:
        scatter_blocks(_blocks(operations[operations.shape[0] - 1], held.shape[1]), held)
    return operations.shape[0]
