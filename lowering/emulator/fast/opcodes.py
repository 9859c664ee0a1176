"""Numbers of what the interpreter executes, and of the widths of its operands."""

from __future__ import annotations

(
    MOV, ADD, SUB, MUL, MAD, AND, OR, XOR, NOT, SHL, SHR, SHR_SIGNED, MIN, MAX, MIN_UNSIGNED, MAX_UNSIGNED,
    SELECT, PACK16, PACK32, DIVIDE, REMAINDER, EQ, NE, LT, LE, GT, GE, LT_UNSIGNED, LE_UNSIGNED, GT_UNSIGNED,
    GE_UNSIGNED, BF16, BF16X2, NEGATE, NOT_PREDICATE, MAPA,
) = range(36)  # fmt: skip
"""Of one lane's values: each is taken to 64 bits, and the result is cut to the width of its destination."""

SHUFFLE, ELECT, LDMATRIX, STMATRIX, MMA, WGMMA, LOAD, STORE = range(64, 72)
"""Of a whole warp."""

BIT, HALF, WORD, LONG, SIGNED_HALF, SIGNED_WORD = range(6)
"""Widths; the signed ones extend the sign."""

UNKNOWN, STRAIGHT, BRANCH, OPERATION = range(4)
"""Kinds of steps."""

# Columns of an instruction.
OP, TARGET, A, B, C, GUARD, NEGATED, TARGET_WIDTH, A_WIDTH, B_WIDTH, C_WIDTH, COMBINE, OTHER = range(13)
FLAGS, OFFSET, COLUMNS = 13, 14, 15
NONE = -1

# Columns of a step.
KIND, FIRST, LAST, GOAL, STEP_GUARD, STEP_NEGATED, NOTED, ACCUMULATES = range(8)
MARKS = 2
"""Noted, and marks registers that reach a WGMMA."""

# The state that a run begins with and leaves.
(
    PC, LEFT, MEETING, WHOLE, PENDING, FENCED, RANKS, RANK, AGENT, CLOCK, READER, READERS_USED, NOTES_USED,
    STRONG, CHECKS, COUNTS, LANES_KNOWN, TOUCHES, CONVERGED, WROTE, AT, DONE, LOGGED,
) = range(23)  # fmt: skip
STATE = 23
LOG, ENTRY = 64, 5
"""Steps of one run that are noted, at most, and the numbers of each."""

# Shared memory: its bytes, halves and words, and what the race detector knows.
WRITER, WRITTEN_AT, ORDINARY, UNDEFINED, MARKS_OF_READS, READERS, NOTES, VC, LANES = range(3, 12)
TOUCH = 34
"""Numbers of an access of 32 lanes: the step, whether it wrote, addresses."""
