"""Step 1: c = a + b. Layouts, who-holds-what, predication, and compiling at the first call.

    python tutorials/01_vector_add.py

Adds:      layout, thread-value layout, coordinate tensor, predicate; `lowering.jit`.
Reuses:    nothing.
Measures:  against `torch.add`, and as a share of the rate of `Tensor.copy_`; 32- against 128-bit accesses;
           the first call, a call from disk, and a call after that.

WHY
A vector add does one addition for every 12 bytes, so all it can do well is to move bytes. Whether it does
is decided by one thing: which thread touches which element. CuTe has a word for that: a layout.

A *layout* is a function from coordinates to offsets, written shape:stride. Coordinate (i, j) of the layout
(R, C):(p, q) is at offset i*p + j*q. That is all. (4, 8):(8, 1) is a row-major 4 x 8 matrix, (4, 8):(1, 4)
the column-major one, and (4, 8):(0, 1) is one row that is shown four times. Dimensions are called *modes*.

A *thread-value layout* (TV layout) is a layout whose coordinates are (thread, value): "where is value v of
thread t?". Here are two for 4 threads with 4 values each, 16 elements in all. The numbers are threads:

    blocked, (4, 4):(4, 1)         0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3      a thread's 4 floats are neighbours:
                                                                        one access of 128 bits
    interleaved, (4, 4):(1, 4)     0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3      a thread's floats are apart:
                                                                        four accesses of 32 bits

Either way a warp (32 threads) touches whole 128-byte lines, so both are *coalesced*; but the first needs a
quarter of the instructions. The kernel below takes the layout as an argument and does not change otherwise.

*Names* are CuTe's, here and in other people's kernels: mA is the whole tensor in memory, gA the tile of it
that this CTA (thread block) has, sA a copy in shared memory, rA one in registers; tAgA is what a partition
named A leaves to this thread of gA. Comments say what the modes are: # (bM, bK, stages).
"""

import tempfile
import time
from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch

from lowering import cache, jit
from lowering.function import forget_loaded

THREADS = 256  # of a CTA (cooperative thread array: CUDA's thread block)
VALUES = 4  # of a thread


# ---- kernel ------------------------------------------------------------------------------------------------


def tv_layout(interleaved: bool) -> cute.Layout:
    """(thread, value) -> offset within the tile of one CTA, which is THREADS * VALUES elements."""
    if interleaved:
        return cute.make_layout((THREADS, VALUES), stride=(1, THREADS))
    return cute.make_layout((THREADS, VALUES), stride=(VALUES, 1))


@cute.kernel
def add_kernel(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, interleaved: cutlass.Constexpr):
    """mA, mB, mC: (n). Each CTA adds one tile.

    A `Constexpr` is known while the kernel is traced, that is, while Python runs this function once to see
    what it does. Everything else (the tensors, the thread index) is a value that the GPU will have.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tile, layout = (THREADS * VALUES,), tv_layout(interleaved)

    def mine(tensor: cute.Tensor) -> cute.Tensor:
        """Cut the tensor into tiles, take this CTA's, look at it as (thread, value), take this thread's."""
        return cute.composition(cute.local_tile(tensor, tile, (block,)), layout)[thread, None]

    tAgA, tBgB, tCgC = mine(mA), mine(mB), mine(mC)  # (VALUES)
    # The last tile may reach beyond n. A *coordinate tensor* holds at each place that place's coordinate;
    # partitioned like the data, it tells a thread where its values are, whatever the layout is.
    n = cute.size(mC)
    where = mine(cute.make_identity_tensor(mC.shape))  # (VALUES) of coordinates in mC

    if where[VALUES - 1][0] < n:  # offsets grow with v in both layouts: the last one is the farthest
        rA, rB = cute.make_fragment_like(tAgA), cute.make_fragment_like(tBgB)  # registers
        cute.autovec_copy(tAgA, rA)  # as wide as layout and alignment allow: 128 bits if blocked
        cute.autovec_copy(tBgB, rB)
        rA.store(rA.load() + rB.load())
        cute.autovec_copy(rA, tCgC)
    else:
        # *Predication*: each access has a condition of its own. Only in the last tile: it costs the width.
        for v in cutlass.range_constexpr(VALUES):
            if where[v][0] < n:
                tCgC[v] = tAgA[v] + tBgB[v]


# ---- host --------------------------------------------------------------------------------------------------


@jit
def vector_add(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream, interleaved: cutlass.Constexpr):
    """c = a + b for contiguous vectors of one dtype and size.

    `jit` compiles this *host function* and the kernel that it launches at the first call with arguments of
    a new kind: another dtype, rank or alignment, or another Constexpr. Another size is not another kind.
    The result is kept on disk. `stream` is torch's current stream; the caller does not pass it.
    """
    add_kernel(mA, mB, mC, interleaved).launch(
        grid=(cute.ceil_div(cute.size(mC), THREADS * VALUES), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


# ---- check -------------------------------------------------------------------------------------------------


def check(lab: common.Lab) -> None:
    """Sizes that fill no tile, one tile, and end within a thread's four values."""
    for n in lab.pick((1, 1023, 1024, 1_000_003), (1, 1023, 1026)):
        for interleaved in (False, True):
            a, b, c = lab.integers(n), lab.integers(n), lab.poison(n)
            lab.launch(vector_add, a, b, c, interleaved=interleaved)
            lab.equal(f"n={n} {'interleaved' if interleaved else 'blocked'}", c, a + b)


# ---- measure -----------------------------------------------------------------------------------------------


def measure(bench: common.Bench) -> None:
    """Rates from memory and from L2 (the cache that the whole GPU shares); then what a first call costs."""
    names = {False: "step 1, blocked (128-bit)", True: "step 1, interleaved (32-bit)"}
    for exponent, where in ((26, "memory"), (21, "L2")):
        n = 1 << exponent
        a, b = (common.random(n, dtype=torch.float32) for _ in range(2))
        c, d = torch.empty_like(a), torch.empty_like(a)
        calls = {name: partial(vector_add, a, b, c, interleaved=flag) for flag, name in names.items()}
        calls["torch.add"] = partial(torch.add, a, b, out=d)
        notes = {
            name: common.registers(vector_add, a, b, c, interleaved=flag) for flag, name in names.items()
        }
        calls["Tensor.copy_ (moves two thirds)"] = partial(d.copy_, a)
        work = dict.fromkeys(calls, 12.0 * n)
        work["Tensor.copy_ (moves two thirds)"] = 8.0 * n
        title = f"c = a + b, 2^{exponent} float32, from {where}"
        bench.compare(title, calls, bytes=work, baseline="torch.add", notes=notes)
    bench.remark(first_calls(a, b, c))


def first_calls(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> str:
    """Host time of a call: compiled, taken from disk, taken from memory, and from then on."""

    def timed(host) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        host(a, b, c, interleaved=False)
        return (time.perf_counter() - start) * 1e3

    before = cache.dir()
    with tempfile.TemporaryDirectory() as folder:
        cache.set_dir(folder)
        forget_loaded()
        compiled = timed(jit(vector_add.target))
        forget_loaded()
        from_disk = timed(jit(vector_add.target))
        again = min(timed(vector_add) for _ in range(20))
    cache.set_dir(before)
    return (
        f"First call {compiled:.0f} ms (compiles), from disk {from_disk:.1f} ms, then {again * 1e3:.0f} µs."
    )


# ---- takeaways ---------------------------------------------------------------------------------------------
# * A layout maps coordinates to offsets; a TV layout says who holds what; kernels are written against them.
# * Wide accesses need neighbours *and* alignment; `jit` knows the alignment of the tensors it is given.
#   Here they gain nothing, neither from memory nor from L2: bytes are the limit, not instructions.
# * Predicate the edge with a coordinate tensor, and let whole tiles go without.
# * exercise: python tutorials/exercises/01.py

if __name__ == "__main__":
    common.main(check, measure)
