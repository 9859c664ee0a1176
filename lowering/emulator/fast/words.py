"""Arithmetic on registers of all lanes at once, where compiled code can use vector instructions."""

from __future__ import annotations

import numpy as np

from . import opcodes as o
from .jit import jit


@jit
def _of_words(op, out, x, y):  # type: ignore[no-untyped-def]
    """One operation on rows of 32 words; False, and nothing done, for others."""
    if op == o.MOV:
        for i in range(32):
            out[i] = x[i]
    elif op == o.ADD:
        for i in range(32):
            out[i] = x[i] + y[i]
    elif op == o.SUB:
        for i in range(32):
            out[i] = x[i] - y[i]
    elif op == o.MUL:
        for i in range(32):
            out[i] = x[i] * y[i]
    elif op == o.AND:
        for i in range(32):
            out[i] = x[i] & y[i]
    elif op == o.OR:
        for i in range(32):
            out[i] = x[i] | y[i]
    elif op == o.XOR:
        for i in range(32):
            out[i] = x[i] ^ y[i]
    elif op == o.SHL:
        for i in range(32):
            out[i] = x[i] << y[i] if y[i] < 32 else np.uint32(0)
    elif op == o.SHR:
        for i in range(32):
            out[i] = x[i] >> y[i] if y[i] < 32 else np.uint32(0)
    else:
        return False
    return True


@jit
def _compares(op, out, x, y):  # type: ignore[no-untyped-def]
    """One comparison of rows of 32 numbers of one type; False, and nothing done, for others."""
    if op == o.EQ:
        for i in range(32):
            out[i] = x[i] == y[i]
    elif op == o.NE:
        for i in range(32):
            out[i] = x[i] != y[i]
    elif op == o.LT or op == o.LT_UNSIGNED:
        for i in range(32):
            out[i] = x[i] < y[i]
    elif op == o.LE or op == o.LE_UNSIGNED:
        for i in range(32):
            out[i] = x[i] <= y[i]
    elif op == o.GT or op == o.GT_UNSIGNED:
        for i in range(32):
            out[i] = x[i] > y[i]
    elif op == o.GE or op == o.GE_UNSIGNED:
        for i in range(32):
            out[i] = x[i] >= y[i]
    else:
        return False
    return True


@jit
def bf16(pattern):  # type: ignore[no-untyped-def]
    """A float32 pattern rounded to bfloat16, nearest even; NaN becomes the canonical one."""
    odd = (pattern >> np.uint32(16)) & np.uint32(1)
    rounded = (pattern + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.uint32(0x7FFF) if pattern & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000) else rounded


@jit
def _pairs(op, out, x, y):  # type: ignore[no-untyped-def]
    """Two numbers rounded and packed into a word; False, and nothing done, for other operations."""
    if op != o.BF16X2:
        return False
    for i in range(32):
        out[i] = bf16(y[i]) | (bf16(x[i]) << np.uint32(16))
    return True


@jit
def _select(row, out, x, y, which):  # type: ignore[no-untyped-def]
    """``selp`` of words; False, and nothing done, for other operations of three operands."""
    if row[o.OP] != o.SELECT or row[o.TARGET_WIDTH] != o.WORD or row[o.COMBINE] >= 0:
        return False
    negated = np.uint8((row[o.FLAGS] >> 2) & 1)
    for i in range(32):
        out[i] = x[i] if which[i] != negated else y[i]
    return True


@jit
def _long(file, row):  # type: ignore[no-untyped-def]
    """An instruction on 64 bits, or one that packs two words; False, and nothing done, for others."""
    op, width, out = row[o.OP], row[o.A_WIDTH], file[3][row[o.TARGET] : row[o.TARGET] + 32]
    at, other = row[o.A], max(row[o.B], 0)
    if op == o.PACK32 and width == o.WORD and row[o.B_WIDTH] == o.WORD:
        x, y = file[2][at : at + 32], file[2][other : other + 32]
        for i in range(32):
            out[i] = np.uint64(x[i]) | (np.uint64(y[i]) << np.uint64(32))
        return True
    if width != o.LONG or op >= o.SHL or (op != o.MOV and row[o.B_WIDTH] != o.LONG):
        return False
    return _of_words(op, out, file[3][at : at + 32], file[3][other : other + 32])


@jit
def instruction(file, row):  # type: ignore[no-untyped-def]
    """An instruction without a guard, in all lanes; False, and nothing done, for those not known here."""
    op, width, target = row[o.OP], row[o.A_WIDTH], row[o.TARGET]
    if row[o.C] < 0 and row[o.TARGET_WIDTH] == o.LONG and row[o.COMBINE] < 0:
        return _long(file, row)
    if width != o.WORD and width != o.SIGNED_WORD:
        return False
    at, other = row[o.A], max(row[o.B], 0)
    x, y = file[2][at : at + 32], file[2][other : other + 32]
    if row[o.C] >= 0:
        return _select(row, file[2][target : target + 32], x, y, file[0][row[o.C] : row[o.C] + 32])
    if row[o.COMBINE] >= 0:
        return False
    if row[o.TARGET_WIDTH] == o.WORD:
        if op == o.SHR and width == o.SIGNED_WORD:
            return False
        out = file[2][target : target + 32]
        return _of_words(op, out, x, y) or _pairs(op, out, x, y)
    if row[o.TARGET_WIDTH] != o.BIT or row[o.B_WIDTH] != width:
        return False
    out = file[0][target : target + 32]
    if width == o.SIGNED_WORD:
        return _compares(op, out, x.view(np.int32), y.view(np.int32))
    return _compares(op, out, x, y)
