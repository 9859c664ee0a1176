"""Arithmetic on 32-bit registers of all lanes at once, where compiled code can use vector instructions."""

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
def instruction(file, row):  # type: ignore[no-untyped-def]
    """An instruction without a guard, in all lanes; False, and nothing done, for those not known here."""
    op, width, target = row[o.OP], row[o.A_WIDTH], row[o.TARGET]
    if (width != o.WORD and width != o.SIGNED_WORD) or row[o.C] >= 0 or row[o.COMBINE] >= 0:
        return False
    at, other = row[o.A], max(row[o.B], 0)
    x, y = file[2][at : at + 32], file[2][other : other + 32]
    if row[o.TARGET_WIDTH] == o.WORD:
        if op == o.SHR and width == o.SIGNED_WORD:
            return False
        return _of_words(op, file[2][target : target + 32], x, y)
    if row[o.TARGET_WIDTH] != o.BIT or row[o.B_WIDTH] != width:
        return False
    out = file[0][target : target + 32]
    if width == o.SIGNED_WORD:
        return _compares(op, out, x.view(np.int32), y.view(np.int32))
    return _compares(op, out, x, y)
