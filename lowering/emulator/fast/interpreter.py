"""Steps of a warp in compiled code: register arithmetic, branches that do not diverge, some operations.

A run ends before a step that it does not know, or in which anything is out of the ordinary: that one is left
to the Python code, which is the reference, with its reports.
"""

from __future__ import annotations

import numpy as np

from . import cluster, initialise, limits, mbarrier, named, past, places, wgmma, words
from . import memory as shared
from . import opcodes as o
from .compiled import products
from .jit import jit


@jit
def _load(file, at, width):  # type: ignore[no-untyped-def]
    """One lane's value as 64 bits."""
    if width == o.WORD:
        return np.int64(file[2][at])
    if width == o.SIGNED_WORD:
        return np.int64(np.int32(file[2][at]))
    if width == o.LONG:
        return np.int64(file[3][at])
    if width == o.BIT:
        return np.int64(file[0][at])
    if width == o.HALF:
        return np.int64(file[1][at])
    return np.int64(np.int16(file[1][at]))


@jit
def _store(file, at, width, value):  # type: ignore[no-untyped-def]
    """The low bits of ``value`` into one lane."""
    if width == o.WORD:
        file[2][at] = np.uint32(value & 0xFFFFFFFF)
    elif width == o.LONG:
        file[3][at] = np.uint64(value)
    elif width == o.BIT:
        file[0][at] = np.uint8(value & 1)
    else:
        file[1][at] = np.uint16(value & 0xFFFF)


@jit
def _bf16(bits):  # type: ignore[no-untyped-def]
    """A float32 pattern, in 64 bits, rounded to bfloat16."""
    return np.int64(words.bf16(np.uint32(bits & 0xFFFFFFFF)))


@jit
def _shifted(op, x, amount):  # type: ignore[no-untyped-def]
    if op == o.SHR_SIGNED:
        return x >> min(amount, 63)
    if amount > 63:
        return np.int64(0)
    if op == o.SHL:
        return x << amount
    return np.int64(np.uint64(x) >> np.uint64(amount))


@jit
def _divided(op, x, y):  # type: ignore[no-untyped-def]
    """Quotient rounded towards zero, or remainder; all ones, or the dividend, where the divisor is zero."""
    if y == 0:
        return np.int64(-1) if op == o.DIVIDE else x
    quotient = abs(x) // abs(y)
    if (x < 0) != (y < 0):
        quotient = -quotient
    return quotient if op == o.DIVIDE else x - quotient * y


@jit
def _compared(op, x, y):  # type: ignore[no-untyped-def]
    if op >= o.LT_UNSIGNED:
        a, b = np.uint64(x), np.uint64(y)
        less, equal = a < b, a == b
        op = op - o.LT_UNSIGNED + o.LT
    else:
        less, equal = x < y, x == y
    if op == o.EQ:
        return equal
    if op == o.NE:
        return not equal
    if op == o.LT:
        return less
    if op == o.LE:
        return less or equal
    if op == o.GT:
        return not (less or equal)
    return not less


@jit
def _result(op, x, y, z):  # type: ignore[no-untyped-def]
    """Of one lane; comparisons give 1 or 0."""
    if op == o.MOV:
        return x
    if op == o.ADD:
        return x + y
    if op == o.SUB:
        return x - y
    if op == o.MUL:
        return x * y
    if op == o.MAD:
        return x * y + z
    if op == o.AND:
        return x & y
    if op == o.OR:
        return x | y
    if op == o.XOR:
        return x ^ y
    if op == o.SHL or op == o.SHR or op == o.SHR_SIGNED:
        return _shifted(op, x, y)
    if op == o.SELECT:
        return x if z else y
    if op >= o.EQ and op <= o.GE_UNSIGNED:
        return np.int64(_compared(op, x, y))
    if op == o.PACK32:
        return x | (y << 32)
    if op == o.PACK16:
        return x | (y << 16)
    if op == o.BF16:
        return _bf16(x)
    if op == o.BF16X2:
        return _bf16(y) | (_bf16(x) << 16)
    if op == o.NOT:
        return ~x
    if op == o.NOT_PREDICATE:
        return x ^ 1
    if op == o.NEGATE:
        return -x
    if op == o.MIN:
        return min(x, y)
    if op == o.MAX:
        return max(x, y)
    if op == o.MIN_UNSIGNED:
        return np.int64(min(np.uint64(x), np.uint64(y)))
    if op == o.MAX_UNSIGNED:
        return np.int64(max(np.uint64(x), np.uint64(y)))
    if op == o.MAPA:
        return (x & 0xFFFFFF) | (y << 24)
    return _divided(op, x, y)


@jit
def _instruction(file, row, mask):  # type: ignore[no-untyped-def]
    """One instruction of arithmetic in the lanes of ``mask`` that its guard lets through."""
    op, guard = row[o.OP], row[o.GUARD]
    if guard < 0 and mask == o.EVERY and words.instruction(file, row):
        return
    y, z = np.int64(0), np.int64(0)
    for lane in range(32):
        if not mask >> lane & 1 or (guard >= 0 and np.int64(file[0][guard + lane]) == row[o.NEGATED]):
            continue
        x = _load(file, row[o.A] + lane, row[o.A_WIDTH])
        if row[o.A_WIDTH] == o.BIT:
            x ^= row[o.FLAGS] & 1
        if row[o.B] >= 0:
            y = _load(file, row[o.B] + lane, row[o.B_WIDTH])
            if row[o.B_WIDTH] == o.BIT:
                y ^= (row[o.FLAGS] >> 1) & 1
        if row[o.C] >= 0:
            z = _load(file, row[o.C] + lane, row[o.C_WIDTH])
            if row[o.C_WIDTH] == o.BIT:
                z ^= (row[o.FLAGS] >> 2) & 1
        value = _result(op, x, y, z)
        if row[o.COMBINE] >= 0:
            other = np.int64(file[0][row[o.OTHER] + lane]) ^ ((row[o.FLAGS] >> 3) & 1)
            value = _result(row[o.COMBINE], value, other, z)
        _store(file, row[o.TARGET] + lane, row[o.TARGET_WIDTH], value)


@jit
def _shuffle(file, row):  # type: ignore[no-untyped-def]
    """``shfl.sync.idx`` of a whole warp."""
    held = np.empty(32, np.uint32)
    for lane in range(32):
        amount = np.int64(file[2][row[o.B] + lane]) & 31
        control = np.int64(file[2][row[o.C] + lane])
        segment, clamp = (control >> 8) & 31, control & 31
        source = (lane & segment) | (amount & ~segment)
        if source > ((lane & segment) | (clamp & ~segment)):
            source = lane
        held[lane] = file[2][row[o.A] + source]
    for lane in range(32):
        file[2][row[o.TARGET] + lane] = held[lane]


@jit
def _taken(file, step, mask):  # type: ignore[no-untyped-def]
    """The bits of the lanes of ``mask`` that the guard of a step lets through."""
    taken = np.int64(0)
    for lane in range(32):
        if mask >> lane & 1 and np.int64(file[0][step[o.STEP_GUARD] + lane]) != step[o.STEP_NEGATED]:
            taken |= np.int64(1) << lane
    return taken


@jit
def _products(program, file, row):  # type: ignore[no-untyped-def]
    """``mma.sync``, several of them."""
    plan = program[4][row[o.TARGET] : row[o.COMBINE]].reshape((-1, row[o.OFFSET]))
    model = program[5]
    products(file[2], plan, program[6], row[o.OTHER], False, model[0], model[1], model[2])
    return True


@jit
def _operation(program, memory, file, row, state, counts):  # type: ignore[no-untyped-def]
    """An operation of a whole warp; False, and nothing done, where it must be left to the Python code."""
    op = row[o.OP]
    if op == o.LDMATRIX or op == o.STMATRIX:
        return shared.matrix(program, memory, file, row, state, counts)
    if op == o.MMA:
        return _products(program, file, row)
    if op == o.LOAD or op == o.STORE:
        return shared.access(program, memory, file, row, state, counts)
    if op == o.SHUFFLE:
        state[o.CONVERGED] = 1
        _shuffle(file, row)
        return True
    if op == o.ELECT:
        state[o.CONVERGED] = 1
        for lane in range(32):
            if row[o.TARGET] >= 0:
                file[2][row[o.TARGET] + lane] = 0
            file[0][row[o.A] + lane] = lane == 0
        return True
    return False


@jit
def _mapa(file, row, mask, ranks):  # type: ignore[no-untyped-def]
    """``mapa``; False, and nothing done, where a lane names a CTA that there is not."""
    guard = row[o.GUARD]
    for lane in range(32):
        runs = mask >> lane & 1 and (guard < 0 or np.int64(file[0][guard + lane]) != row[o.NEGATED])
        if runs and np.int64(file[2][row[o.B] + lane]) >= ranks:
            return False
    _instruction(file, row, mask)
    return True


@jit
def _warpgroup(program, memory, file, row, warp, entry):  # type: ignore[no-untyped-def]
    """An operation of WGMMA; False, and nothing done, where it must be left to the Python code."""
    op = row[o.OP]
    entry[2], entry[3] = warp[o.CLOCK], 0
    if op == o.WGMMA:
        if not wgmma.issue(program, memory, file, row, warp):
            return False
        warp[o.PENDING] = 1
        entry[3] = warp[o.STOPPED]
    elif op == o.WGMMA_FENCE:
        if not warp[o.FENCED]:
            warp[o.FENCED] = entry[3] = 1
    elif op == o.WGMMA_COMMIT:
        entry[3] = wgmma.commit(warp)
    else:
        return wgmma.wait(row, warp, memory, entry)
    return True


@jit
def _synchronise(file, row, lanes, warp, memory, launch, log):  # type: ignore[no-untyped-def]
    """An operation on mbarriers, or a fence, by these lanes: the number of entries of the log before its own.

    -1, and nothing done, where it is left to the Python code.
    """
    if log.shape[0] == 0:
        return -1
    if row[o.OP] == o.MBARRIER_ARRIVE:
        return mbarrier.arrive(file, row, lanes, warp, memory, log)
    log[0, 2], log[0, 3] = warp[o.CLOCK], 0
    if row[o.OP] == o.MBARRIER_WAIT:
        return 0 if mbarrier.wait(file, row, lanes, warp, memory, launch, log[0]) else -1
    if row[o.OP] == o.CLUSTER_WAIT:
        return 0 if cluster.wait(lanes, warp, memory, log[0]) else -1
    if row[o.OP] == o.CLUSTER_ARRIVE:
        return 0 if cluster.arrive(row, lanes, warp, memory) else -1
    if row[o.OP] == o.MBARRIER_INIT:
        return 0 if initialise.mbarrier(file, row, lanes, warp, memory, log[0]) else -1
    if row[o.OP] == o.SET_LIMIT:
        return 0 if limits.set_limit(row, warp, log[0]) else -1
    if row[o.OP] == o.BAR:
        return 0 if named.synchronise(file, row, lanes, warp, memory, log[0]) else -1
    if row[o.OP] == o.PROXY_FENCE:
        mbarrier.proxy_fence(lanes, warp, memory)
    elif row[o.OP] == o.INIT_FENCE:
        mbarrier.init_fence(warp)
    elif row[o.OP] == o.GRID_WAIT:
        return 0 if mbarrier.grid_wait(warp) else -1
    return 0


@jit
def _remember(step, at, warp, entry):  # type: ignore[no-untyped-def]
    """Note what a warp did for reports; a WGMMA that needs a look is remembered after that."""
    warp[o.ROLES] |= step[o.ROLE]
    if warp[o.BLOCKED]:
        if warp[o.BEGAN] < 0:
            warp[o.BEGAN] = entry[2]
    elif step[o.REMEMBERS] and not warp[o.STOPPED]:
        past.remember(warp, at, entry[2])


@jit
def _waits(program, at, away):  # type: ignore[no-untyped-def]
    """True if the step uses a register that a WGMMA has not filled yet."""
    for i in range(program[2][at], program[2][at + 1]):
        if away[program[3][i]]:
            return True
    return False


@jit
def _diverge(warp, frame, step, at, taken):  # type: ignore[no-untyped-def]
    """Part the lanes of a frame at a branch; False where there is no room for the frames."""
    depth, after, meet = warp[o.DEPTH], at + 1, step[o.REJOIN]
    if depth + 2 > o.MOST_FRAMES:
        return False
    mask = warp[frame + o.FRAME_MASK]
    if meet == warp[frame + o.FRAME_MEETING] and depth > 1:
        depth -= 1
    else:
        warp[frame + o.FRAME_PC] = meet
    for lanes, goal in ((mask & ~taken, after), (taken, step[o.GOAL])):
        new = o.FRAMES + o.FRAME * depth
        warp[new + o.FRAME_MASK], warp[new + o.FRAME_PC], warp[new + o.FRAME_MEETING] = lanes, goal, meet
        depth += 1
    warp[o.DEPTH], warp[o.REFRAMED] = depth, 1
    return True


@jit
def _begin(warp):  # type: ignore[no-untyped-def]
    """Take what a run needs of the CTA and of the warp's clocks."""
    cta = places.longs(warp[o.CTA], o.CTA_COLUMNS)
    agents = places.longs(cta[o.READERS_AT], cta[o.READERS_COUNT])
    warp[o.CLOCK] = places.words(warp[o.VC_AT], warp[o.AGENTS])[warp[o.AGENT]]
    warp[o.READER] = -1
    for row in range(cta[o.READERS_COUNT]):
        if agents[row] == warp[o.AGENT]:
            warp[o.READER] = row
    warp[o.READERS_USED], warp[o.NOTES_USED] = cta[o.READERS_COUNT], cta[o.NOTES_COUNT]
    warp[o.STRONG] = cta[o.STRONG_THERE]
    warp[o.STOPPED] = 0


@jit
def run(launch, warp):  # type: ignore[no-untyped-def]
    """Steps of a warp, from the frames that its row names; the row says how far it came.

    Returns whether the log has what is to be done before the next turn.
    """
    _begin(warp)
    program, memory, file = places.program(launch), places.memory(warp), places.registers(warp)
    counts = places.table(launch[o.COUNTED], launch[o.COUNTED + 1], 3)
    log = places.table(launch[o.LOGS], launch[o.LOGS + 1], o.ENTRY)[launch[o.LOGGED_ALL] :]
    code, steps = program[0], program[1]
    spent, popped, logged, start, urgent = 0, 0, 0, warp[o.STEP], False
    taken = np.int64(0)
    draws = False  # Python code draws a number next
    while spent < warp[o.LEFT] and not warp[o.STOPPED] and not draws:
        frame = o.FRAMES + o.FRAME * (warp[o.DEPTH] - 1)
        at, lanes = warp[frame + o.FRAME_PC], warp[frame + o.FRAME_MASK]
        if at == warp[frame + o.FRAME_MEETING] and warp[o.DEPTH] > 1:
            warp[o.DEPTH] -= 1
            warp[o.REFRAMED] = 1
            spent += 1
            popped += 1
            continue
        if not 0 <= at < steps.shape[0]:
            break
        full = lanes == warp[o.LIVE]
        warp[o.WHOLE] = full and lanes == o.EVERY
        mask = o.EVERY if full else lanes
        step = steps[at]
        kind, guarded = step[o.KIND], step[o.STEP_GUARD] >= 0
        if kind == o.UNKNOWN and not guarded:
            break
        if warp[o.PENDING] and not step[o.ACCUMULATES] and _waits(program, at, file[4]):
            break
        goal = at + 1
        if kind == o.STRAIGHT:
            if step[o.NOTED] and logged == log.shape[0]:
                break
            for i in range(step[o.FIRST], step[o.LAST]):
                _instruction(file, code[i], mask)
        elif kind == o.BRANCH:
            taken = _taken(file, step, lanes) if guarded else lanes
            if taken and taken != lanes:
                if not _diverge(warp, frame, step, at, taken):
                    break
            else:
                warp[frame + o.FRAME_PC] = step[o.GOAL] if taken else goal
            spent += 1
            continue
        else:
            if guarded:
                taken = _taken(file, step, lanes)
                if not taken:  # nothing happens
                    spent += 1
                    warp[frame + o.FRAME_PC] = goal
                    continue
                guarded = taken != lanes
            row = code[step[o.FIRST]]
            if kind == o.OPERATION and row[o.OP] == o.MAPA:
                if not _mapa(file, row, mask, warp[o.RANKS]):
                    break
                counts[at, 0] += 1
                spent += 1
                warp[frame + o.FRAME_PC] = goal
                continue
            if kind == o.OPERATION and row[o.OP] >= o.PROXY_FENCE:
                warp[o.AT], warp[o.STEP] = at, start + spent - popped + 1
                active = taken if step[o.STEP_GUARD] >= 0 else lanes
                made = _synchronise(file, row, active, warp, memory, launch, log[logged:])
                if made < 0:
                    break
                for i in range(made + 1):
                    log[logged + i, 1], log[logged + i, 4] = warp[o.STEP], warp[o.PLACE]
                urgent |= made > 0 or log[logged, 3] == o.OPENED
                logged += made
                log[logged, 0] = o.BLOCKED_AT - at if warp[o.BLOCKED] else at
                _remember(step, at, warp, log[logged])
                logged += log[logged, 3] != 0 or warp[o.BLOCKED] or step[o.NOTED] == o.MARKS
                if warp[o.BLOCKED]:
                    spent += 1
                    break
                counts[at, 0] += 1
                spent += 1
                warp[frame + o.FRAME_PC] = goal
                continue
            if (
                kind == o.UNKNOWN
                or guarded
                or not warp[o.WHOLE]
                or (step[o.NOTED] and logged == log.shape[0])
            ):
                break
            warp[o.AT] = at
            if o.WGMMA <= row[o.OP] <= o.WGMMA_WAIT:
                if not _warpgroup(program, memory, file, row, warp, log[logged]):
                    break
                urgent |= row[o.OP] != o.WGMMA_FENCE and log[logged, 3] != 0
                draws = row[o.OP] == o.WGMMA_COMMIT and log[logged, 3] != 0
            elif not _operation(program, memory, file, row, warp, counts):
                break
        if step[o.NOTED]:
            if step[o.NOTED] == o.MARKS:
                warp[o.FENCED] = 0
            if not step[o.ACCUMULATES]:
                log[logged, 2], log[logged, 3] = warp[o.CLOCK], 0
            log[logged, 0] = o.BLOCKED_AT - at if warp[o.BLOCKED] else at
            log[logged, 1], log[logged, 4] = start + spent - popped + 1, warp[o.PLACE]
            _remember(step, at, warp, log[logged])
            logged += log[logged, 3] != 0 or warp[o.BLOCKED] or step[o.NOTED] == o.MARKS
        warp[o.ROLES] |= step[o.ROLE]
        if warp[o.BLOCKED]:
            spent += 1
            break
        counts[at, 0] += 1
        spent += 1
        warp[frame + o.FRAME_PC] = goal
    warp[o.SPENT], warp[o.DONE] = spent, spent - popped
    launch[o.LOGGED_ALL] += logged
    places.longs(warp[o.CTA], o.CTA_COLUMNS)[o.NOTES_COUNT] = warp[o.NOTES_USED]
    return urgent
