"""Shared memory in compiled code: accesses of a whole warp, with the race detector's checks and notes.

Each function does nothing and says so where anything needs a report: the Python code then does it all.
"""

from __future__ import annotations

import numpy as np

from . import opcodes as o
from . import places
from .compiled import any_of, bank_conflicts, read, write
from .jit import jit


@jit
def _addresses(memory, file, row, state, count, size):  # type: ignore[no-untyped-def]
    """The offsets that the first ``count`` lanes name; an empty array where one is no place of this CTA."""
    out = np.empty(count, np.int64)
    for lane in range(count):
        at = row[o.A] + lane
        base = np.int64(file[3][at]) if row[o.A_WIDTH] == o.LONG else np.int64(file[2][at])
        address = base + row[o.OFFSET]
        offset = address & 0xFFFFFF
        if address >> 24 != state[o.RANK] or offset < 1024 or offset + size > memory[0].shape[0]:
            return out[:0]
        if offset % size:
            return out[:0]
        out[lane] = offset
    return out


@jit
def _note(memory, state, low, high, wrote):  # type: ignore[no-untyped-def]
    """Remember the instruction, for reports."""
    entry = memory[o.NOTES][state[o.NOTES_USED]]
    entry[0], entry[1], entry[2] = state[o.AGENT], state[o.CLOCK], wrote
    entry[3], entry[4], entry[5] = state[o.AT], low, high
    state[o.NOTES_USED] += 1


@jit
def may_read(memory, state, offsets, size):  # type: ignore[no-untyped-def]
    """True for a read that follows the writes of defined bytes; it is noted."""
    if offsets.shape[0] == 0 or state[o.READER] < 0:
        return False
    if not state[o.CHECKS]:
        return True
    if any_of(memory[o.UNDEFINED], offsets, size):
        return False
    low, high = read(
        memory[o.WRITER], memory[o.WRITTEN_AT], memory[o.VC], memory[o.MARKS_OF_READS], state[o.READER],
        state[o.CLOCK], offsets, size,
    )  # fmt: skip
    if low < 0:
        return False
    _note(memory, state, low, high, 0)
    return True


@jit
def may_write(memory, state, offsets, size):  # type: ignore[no-untyped-def]
    """True for an ordinary write that follows all other accesses; it is noted."""
    if offsets.shape[0] == 0 or state[o.STRONG]:
        return False
    if not state[o.CHECKS]:
        return True
    held = memory[o.WRITER], memory[o.WRITTEN_AT], memory[o.ORDINARY], memory[o.UNDEFINED]
    reads = memory[o.MARKS_OF_READS], memory[o.READERS], state[o.READERS_USED]
    low, high = write(held, reads, memory[o.VC], (state[o.AGENT], state[o.CLOCK]), offsets, size, True)
    if low < 0:
        return False
    _note(memory, state, low, high, 1)
    return True


@jit
def count(counts, state, offsets, size):  # type: ignore[no-untyped-def]
    """Bytes and bank conflicts of an access."""
    if state[o.COUNTS]:
        counts[state[o.AT], 1] += offsets.shape[0] * size
        counts[state[o.AT], 2] += bank_conflicts(offsets, size)


@jit
def matrix(program, memory, file, row, state, counts):  # type: ignore[no-untyped-def]
    """``ldmatrix`` and ``stmatrix``."""
    first, matrices, stores = row[o.TARGET], row[o.COMBINE] - row[o.TARGET], row[o.OP] == o.STMATRIX
    offsets = _addresses(memory, file, row, state, 8 * matrices, 16)
    if stores:
        if not may_write(memory, state, offsets, 16):
            return False
        places.flags(state[o.UNFENCED_AT], 32)[:] = True
    elif not may_read(memory, state, offsets, 16):
        return False
    state[o.CONVERGED] = 1
    count(counts, state, offsets, 16)
    for i in range(matrices):
        register = program[4][first + i]
        for lane in range(32):
            if row[o.FLAGS] & 8:  # transposed
                column, at = lane // 4, i * 8 + lane % 4 * 2
                low, high = offsets[at] // 2 + column, offsets[at + 1] // 2 + column
                if stores:
                    value = file[2][register + lane]
                    memory[1][low] = np.uint16(value & np.uint32(0xFFFF))
                    memory[1][high] = np.uint16(value >> np.uint32(16))
                else:
                    halves = np.uint32(memory[1][low]), np.uint32(memory[1][high])
                    file[2][register + lane] = halves[0] | (halves[1] << np.uint32(16))
            else:
                word = offsets[i * 8 + lane // 4] // 4 + lane % 4
                if stores:
                    memory[2][word] = file[2][register + lane]
                else:
                    file[2][register + lane] = memory[2][word]
    return True


@jit
def _lanes_clash(lanes, state, offsets, size, writes):  # type: ignore[no-untyped-def]
    """True if another lane may have touched these words since the lanes came together; notes this access."""
    epoch = lanes[0][0]
    for lane in range(32):
        for word in range(offsets[lane] >> 2, (offsets[lane] + size + 3) >> 2):
            wrote, read = lanes[2][word], lanes[1][word]
            if wrote >> 6 == epoch and wrote & 63 != lane:
                return True
            if writes and read >> 6 == epoch and read & 63 != lane:
                return True
    for lane in range(32):
        for word in range(offsets[lane] >> 2, (offsets[lane] + size + 3) >> 2):
            if writes:
                if lanes[2][word] >> 6 == epoch and lanes[2][word] & 63 != lane:
                    return True  # two lanes of this access
                lanes[2][word] = epoch << 6 | lane
            elif lanes[1][word] >> 6 == epoch and lanes[1][word] & 63 != lane:
                lanes[1][word] = epoch << 6 | 63
            else:
                lanes[1][word] = epoch << 6 | lane
    touch = lanes[3][state[o.TOUCHES]]
    touch[0], touch[1] = state[o.AT], writes
    touch[2:34] = offsets
    state[o.TOUCHES] += 1
    return False


@jit
def access(program, memory, file, row, state, counts):  # type: ignore[no-untyped-def]
    """``ld.shared`` and ``st.shared`` of words by a whole warp."""
    first, words = row[o.TARGET], row[o.COMBINE] - row[o.TARGET]
    writes, lanes = row[o.OP] == o.STORE, memory[o.LANES]
    if state[o.CONVERGED] == 1:
        lanes[0][0] += 1
        state[o.CONVERGED], state[o.TOUCHES], state[o.LANES_KNOWN] = 2, 0, 1
    if not state[o.LANES_KNOWN] or state[o.TOUCHES] == lanes[3].shape[0]:
        return False
    offsets = _addresses(memory, file, row, state, 32, 4 * words)
    if offsets.shape[0] == 0:
        return False
    if state[o.CHECKS] and _lanes_clash(lanes, state, offsets, 4 * words, int(writes)):
        state[o.LANES_KNOWN] = 0
        return False
    if writes:
        if not may_write(memory, state, offsets, 4 * words):
            state[o.TOUCHES] -= state[o.CHECKS]
            return False
        places.flags(state[o.UNFENCED_AT], 32)[:] = True
    elif not may_read(memory, state, offsets, 4 * words):
        state[o.TOUCHES] -= state[o.CHECKS]
        return False
    count(counts, state, offsets, 4 * words)
    for i in range(words):
        register = program[4][first + i]
        for lane in range(32):
            if writes:
                memory[2][offsets[lane] // 4 + i] = file[2][register + lane]
            else:
                file[2][register + lane] = memory[2][offsets[lane] // 4 + i]
    return True
