"""Arrays in compiled code from their addresses, so that a call takes none: each one costs to hand over.

Who keeps an address keeps the array too.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from . import opcodes as o
from .jit import jit


@intrinsic
def pointer(context, address):  # type: ignore[no-untyped-def]
    """An address as a pointer."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@jit
def longs(address, count):  # type: ignore[no-untyped-def]
    """int64 numbers at an address."""
    return carray(pointer(address), (count,), np.int64)


@jit
def words(address, count):  # type: ignore[no-untyped-def]
    """int32 numbers at an address."""
    return carray(pointer(address), (count,), np.int32)


@jit
def octets(address, count):  # type: ignore[no-untyped-def]
    """Bytes at an address."""
    return carray(pointer(address), (count,), np.uint8)


@jit
def flags(address, count):  # type: ignore[no-untyped-def]
    """Booleans at an address."""
    return carray(pointer(address), (count,), np.bool_)


@jit
def halves(address, count):  # type: ignore[no-untyped-def]
    """uint16 numbers at an address."""
    return carray(pointer(address), (count,), np.uint16)


@jit
def patterns(address, shape):  # type: ignore[no-untyped-def]
    """Rows of 32-bit patterns at an address."""
    return carray(pointer(address), shape, np.uint32)


@jit
def table(address, rows, columns):  # type: ignore[no-untyped-def]
    """int64 rows at an address."""
    return carray(pointer(address), (rows, columns), np.int64)


@jit
def program(launch):  # type: ignore[no-untyped-def]
    """The tables of a kernel: see `encode`."""
    return (
        table(launch[o.CODE], launch[o.CODE + 1], o.COLUMNS),
        table(launch[o.STEPS], launch[o.STEPS + 1], o.STEP_COLUMNS),
        longs(launch[o.USED], launch[o.USED + 1]),
        longs(launch[o.USED_REGISTERS], launch[o.USED_REGISTERS + 1]),
        longs(launch[o.PLAN], launch[o.PLAN + 1]),
        longs(launch[o.MODEL], launch[o.MODEL + 1]),
        carray(pointer(launch[o.VALUES]), (launch[o.VALUES + 1],), np.float32),
    )


@jit
def registers(warp):  # type: ignore[no-untyped-def]
    """A warp's registers in four widths, and places of those that a WGMMA has not filled yet."""
    at, size = warp[o.FILE], warp[o.FILE_SIZE]
    return (
        octets(at, size),
        halves(at, size // 2),
        patterns(at, (size // 4,)),
        carray(pointer(at), (size // 8,), np.uint64),
        words(warp[o.AWAY], warp[o.AWAY_SIZE]),
    )


@jit
def shadow(place):  # type: ignore[no-untyped-def]
    """Knowledge of the race detector about the shared memory of the CTA whose row lies there."""
    cta = longs(place, o.CTA_COLUMNS)
    size = cta[o.SMEM_SIZE]
    return (
        carray(pointer(cta[o.WRITER_AT]), (size,), np.int16),
        words(cta[o.WRITTEN_AT_AT], size),
        flags(cta[o.ORDINARY_AT], size),
        flags(cta[o.UNDEFINED_AT], size),
        carray(pointer(cta[o.MARKS_AT]), (cta[o.READERS_ROOM], size), np.int32),
        longs(cta[o.READERS_AT], cta[o.READERS_ROOM]),
        table(cta[o.NOTES_AT], cta[o.NOTES_ROOM], o.NOTE_COLUMNS),
    )


@jit
def memory(warp):  # type: ignore[no-untyped-def]
    """Shared memory of a warp's CTA, its shadow, the warp's clocks, and what its lanes touched."""
    cta = longs(warp[o.CTA], o.CTA_COLUMNS)
    at, size = cta[o.SMEM], cta[o.SMEM_SIZE]
    writer, written_at, ordinary, undefined, marks, readers, notes = shadow(warp[o.CTA])
    agents, words_of_lanes = warp[o.AGENTS], warp[o.TOUCHED_WORDS]
    return (
        octets(at, size),
        halves(at, size // 2),
        patterns(at, (size // 4,)),
        writer,
        written_at,
        ordinary,
        undefined,
        marks,
        readers,
        notes,
        words(warp[o.VC_AT], agents),
        (
            longs(warp[o.TOUCHED], 1),
            longs(warp[o.TOUCHED_READS], words_of_lanes),
            longs(warp[o.TOUCHED_WRITES], words_of_lanes),
            table(warp[o.TOUCHED_LIST], warp[o.TOUCHES_ROOM], o.TOUCH),
        ),
    )
