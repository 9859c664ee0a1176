"""All CTAs of a launch wait for each other, at one counter in global memory.

The launch must be cooperative: its CTAs run all at the same time. The counter is 0 before the launch and
after it. Every CTA arrives at as many points as it likes, in the same order, and waits at each of them or
not; the last point is left with `leave`, after which the counter must not be used.
"""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def await_count(count: cute.Pointer, wanted: Int32):
    """Until what others add to in global memory is at least `wanted`."""
    seen = cute.arch.load(count, Int32, sem="acquire", scope="gpu")
    while seen < wanted:
        seen = cute.arch.load(count, Int32, sem="acquire", scope="gpu")


@cute.jit
def arrive(counter: cute.Tensor, thread: Int32):
    """This CTA has come by; what its threads wrote to global memory before is there for who waits."""
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.fence_acq_rel_gpu()
        cute.arch.atomic_add(counter.iterator, Int32(1), sem="release", scope="gpu")


@cute.jit
def wait(counter: cute.Tensor, ctas: Int32, point: Int32, thread: Int32):
    """Until all `ctas` of the launch have come by point number `point`, the first of which is 1."""
    if thread == 0:
        wanted = ctas * point
        await_count(counter.iterator, wanted)
        cute.arch.fence_acq_rel_gpu()
    cute.arch.sync_threads()


@cute.jit
def leave(counter: cute.Tensor, ctas: Int32, point: Int32, thread: Int32):
    """After the wait at the last point, `point`: the last CTA to come by sets the counter back to 0."""
    if thread == 0:
        before = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        if before == ctas * (point + 1) - 1:
            counter[0] = Int32(0)
