"""The usual remedy for each kind of finding, in one line."""

from __future__ import annotations

from .reports import Kind

HINTS = {
    Kind.READ_BEFORE_ARRIVAL: "a wait for the full barrier of this stage and phase; for the cp.async group",
    Kind.OVERWRITE_IN_USE: "a wait for the WGMMA before the stage's release; cp.async.bulk.wait_group.read "
    "before a staging buffer is reused or the kernel ends",
    Kind.RACE: "a barrier, or a release that an acquire reads, between the two accesses",
    Kind.MISSING_PROXY_FENCE: "fence.proxy.async in the writing threads, before the barrier",
    Kind.PENDING_REGISTER: "wgmma.wait_group before the registers are touched",
    Kind.MISSING_WGMMA_FENCE: "wgmma.fence (warpgroup.arrive) between the arithmetic and the first WGMMA",
    Kind.ARRIVE_COUNT: "the count at mbarrier.init must be that of the arrivals in a phase",
    Kind.TRANSACTION_COUNT: "expect_tx must be the bytes of all copies that complete on the barrier",
    Kind.PHASE_WAITED_TWICE: "flip the parity when the stage index wraps",
    Kind.BARRIER_STATE: "fence.mbarrier_init and a barrier between mbarrier.init and the first use",
    Kind.PEER_ENDED: "a cluster barrier after the set-up and before the end",
    Kind.DEADLOCK: "look at the table for the barrier that lacks arrivals or bytes",
    Kind.OUT_OF_BOUNDS: "a predicate for the last tile, or a larger allocation",
    Kind.MISALIGNED: "a narrower vector, or a promise of alignment that the caller keeps",
    Kind.UNINITIALISED: "write the bytes first, or do not let them reach a result",
    Kind.BARRIER_DIVERGENCE: "let every thread that the operation names execute it",
    Kind.DESCRIPTOR: "check box, swizzle, alignment and masks of the copy or matrix operand",
    Kind.SCHEDULE_DEPENDENT: "an order for results that meet, such as floating-point atomics",
}
