"""Numbers of what the interpreter executes, and of the widths of its operands."""

from __future__ import annotations

(
    MOV, ADD, SUB, MUL, MAD, AND, OR, XOR, NOT, SHL, SHR, SHR_SIGNED, MIN, MAX, MIN_UNSIGNED, MAX_UNSIGNED,
    SELECT, PACK16, PACK32, DIVIDE, REMAINDER, EQ, NE, LT, LE, GT, GE, LT_UNSIGNED, LE_UNSIGNED, GT_UNSIGNED,
    GE_UNSIGNED, BF16, BF16X2, NEGATE, NOT_PREDICATE, MAPA,
) = range(36)  # fmt: skip
"""Of one lane's values: each is taken to 64 bits, and the result is cut to the width of its destination."""

(
    SHUFFLE, ELECT, LDMATRIX, STMATRIX, MMA, LOAD, STORE, WGMMA, WGMMA_FENCE, WGMMA_COMMIT, WGMMA_WAIT,
    PROXY_FENCE, INIT_FENCE, GRID_WAIT, GRID_LAUNCH, MBARRIER_ARRIVE, MBARRIER_WAIT, BAR,
    CLUSTER_WAIT, CLUSTER_ARRIVE, SET_LIMIT, MBARRIER_INIT, PREFETCH,
) = range(64, 87)  # fmt: skip
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
KIND, FIRST, LAST, GOAL, STEP_GUARD, STEP_NEGATED, NOTED, ACCUMULATES, REJOIN, REMEMBERS, ROLE = range(11)
STEP_COLUMNS = 11
MARKS = 2
"""Noted, and marks registers that reach a WGMMA."""

# A launch: addresses of tables, each with its number of rows after it.
CODE, STEPS, USED, USED_REGISTERS, PLAN, MODEL, VALUES, COUNTED, LOGS = range(0, 18, 2)
LOGGED_ALL, RANDOM, RANDOM_WORD, RANDOM_DOUBLE = range(18, 22)
"""The rows of the log that are in use, and the generator of random numbers."""
LAUNCH_COLUMNS = 22

# The scheduler: the warps that can run, the step, where it was when the launch began and may come to, the
# next event, the warp whose turn it is and the steps left of that, and the warps that ran since Python code
# looked.
(
    T_READY_AT, T_READY, T_STEP, T_STARTED, T_MOST, T_EVENT, T_WARP, T_LEFT, T_RAN_AT, T_RAN, T_RAN_ROOM,
) = range(11)  # fmt: skip
T_COLUMNS = 11
NOTHING, LIMIT, EVENTS, FULL, ROOM, STEP_OF_WARP, WORK = range(7)
"""Reasons for which compiled turns end: the limit of steps, events are due or no warp can run, no room in the
log or for notes, a step of the warp that Python code takes, other work of that, which comes first."""
MOST_STEPS = 48
"""A turn has fewer steps."""
NEVER = (1 << 63) - 1

# A CTA: addresses, sizes, and numbers of its shadow.
(
    SMEM, SMEM_SIZE, WRITER_AT, WRITTEN_AT_AT, ORDINARY_AT, UNDEFINED_AT, MARKS_AT, READERS_ROOM, READERS_AT,
    NOTES_AT, NOTES_ROOM, READERS_COUNT, NOTES_COUNT, STRONG_THERE, BARRIERS_AT, BARRIERS, BARRIERS_ROOM,
    BARRIER_ROOM_AT, PEERS_AT, FIRST_AGENT, WARPS, ENDED, NAMED_AT, CLUSTER_AT, LIMITS_AT, DOMAIN_AT,
) = range(26)  # fmt: skip
CTA_COLUMNS = 26

# A warp: addresses and sizes, then the state that a run begins with and leaves.
(
    CTA, FILE, FILE_SIZE, AWAY, AWAY_SIZE, VC_AT, FC_AT, AGENTS, TOUCHED, TOUCHED_READS, TOUCHED_WRITES,
    TOUCHED_LIST, TOUCHED_WORDS, TOUCHES_ROOM, GROUP_AT, BLOCKS_AT, LIVE, RANKS, RANK, AGENT, NUMBER, CHECKS,
    COUNTS, BLOCKS_HIDDEN, LEFT, WHOLE, PENDING, FENCED, CLOCK, READER, READERS_USED, NOTES_USED, STRONG,
    LANES_KNOWN, TOUCHES, CONVERGED, AT, SPENT, DONE, REFRAMED, LEARNED, STOPPED,
    REACHED_AT, REACHED, KNOWN, RELEASED, GAVE_UP, IN_CLUSTER, STEP, UNFENCED_AT, COPIES, HELD, RAN, PLACE,
    BLOCKED, PASSED, SUSPENDED, BEGAN, PAST_AT, PAST_USED, ROLES, CLUSTER_TARGET, FENCES, DEPTH, FRAMES,
) = range(65)  # fmt: skip
FRAME = 3
"""Columns of a frame: the bits of its lanes, the next step, the step where it meets others."""
FRAME_MASK, FRAME_PC, FRAME_MEETING = range(FRAME)
MOST_FRAMES = 12
WARP_COLUMNS = FRAMES + FRAME * MOST_FRAMES
PAST_ROOM = 513
"""Steps of a warp's history: see `history.HISTORY`."""
EVERY = 0xFFFFFFFF
"""The bits of all lanes."""
LOG, ENTRY = 256, 10
"""Entries of the log that a turn takes at most, and the numbers of each: what ran, at which step of the
launch, the warp's clock, one more, and the warp. COMPLETED in place of what ran: an mbarrier's address and
its phase."""
COMPLETED, BLOCKED_AT = -1, -2
"""At a step where the warp is blocked: BLOCKED_AT less its number, and numbers that tell of what it waits
for."""

# A warpgroup: numbers of groups done and of WGMMAs, where their rows lie, and for each warp how many it has
# issued and committed.
DONE_GROUPS, OLDEST, NEXT, ROOM, ROWS_AT, CLOCKS_AT, GROUP_AGENT, ISSUED, COMMITS = *range(8), 11
GROUP_COLUMNS = 15

# A WGMMA: the step, descriptors, scale-d, the parts that have come, its group, the four blocks.
W_STEP, W_A, W_B, W_SCALE, W_PARTS, W_GROUP, W_BLOCKS = range(7)
W_COLUMNS = 10
ALL_PARTS = 15
W_DONE = -2
"""In place of the group of a WGMMA that runs, or has run."""

# Accumulators of one warp: where they lie, how many registers, the last group that computes them.
B_VALUES, B_COUNT, B_GROUP = range(3)
B_COLUMNS = 3
MOST_BLOCKS, BLOCK_BITS = 16, 10

# A named barrier: threads that have arrived and are expected, what is known of other clusters, its clocks,
# whether it is left to Python code until it opens, and the warps that wait: how many, and their places.
N_ARRIVED, N_EXPECTED, N_KNOWN, N_CLOCKS_AT, N_LEFT, N_WAITERS, N_WAITING = range(7)
N_COLUMNS, NAMED = N_WAITING + 32, 16
OPENED = 1 << 40
"""In the log: the last arrival at a named barrier, which lets others go on; no other number is so large."""

# A cluster's barrier: phases, arrivals, warps that have not ended; of the last phase and of the one that is
# under way what is known of other clusters, the clocks, how far warps had come.
(
    C_GENERATION, C_ARRIVED, C_ALIVE, C_KNOWN, C_CLOCKS_AT, C_REACHED_AT, C_ARRIVING_KNOWN, C_ARRIVING_AT,
    C_REACHING_AT,
) = range(9)  # fmt: skip
C_COLUMNS = 9
REACHED_NOW = 2
"""In place of one in REACHED: Python code does not know yet."""

# The agents of a cluster, and how many there may be.
D_AGENTS, D_CAPACITY = range(2)

# Room for mbarriers: those taken, all, where the first lies and how far apart they are in bytes.
R_USED, R_SIZE, R_FIRST, R_STEP = range(4)

# A CTA's registers: free ones, warps that wait for some, and those that each warp holds.
L_FREE, L_WAITING, L_HELD = range(3)

# An mbarrier: its state, and where its clocks (arriving and done, two each) and its tables lie.
(
    M_EXPECTED, M_PENDING, M_TX, M_PHASE, M_AGENT, M_INIT_BY, M_INIT_CLOCK, M_INIT_FENCED, M_TWICE,
    M_WARPS, M_ARRIVING_KNOWN, M_DONE_KNOWN, M_USED, M_ARRIVED, M_CLOCKS_AT, M_WAITS_AT, M_TALLY_AT,
    M_USERS_AT, M_USERS_ROOM, M_ARRIVED_AT, M_ARRIVED_ROOM,
) = range(21)  # fmt: skip
M_COLUMNS = 21
TALLY_COLUMNS = 4
"""Of a warp's arrivals: phase, in that phase, in all, whether any."""

# What the plan says of a WGMMA before its registers.
P_COLUMNS, P_SIZE, P_TRANSPOSED_A, P_TRANSPOSED_B, P_GROUP, P_BITS, P_FRACTION = range(7)
P_LENGTH = 7

# Shared memory: its bytes, halves and words, and what the race detector knows.
WRITER, WRITTEN_AT, ORDINARY, UNDEFINED, MARKS_OF_READS, READERS, NOTES, VC, LANES = range(3, 12)
NOTE_COLUMNS = 6
TOUCH = 34
"""Numbers of an access of 32 lanes: the step, whether it wrote, addresses."""
