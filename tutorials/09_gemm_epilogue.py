"""Step 9: nobody waits for the store. TMA store, ping-pong, and a function fused into the epilogue.

    python tutorials/09_gemm_epilogue.py

Adds:      staging and TMA store, ping-pong warpgroups, an epilogue that is a Python function, PDL.
Reuses:    step 8's producer, walk and plan; step 7's WGMMA loop; `blocks.epilogue` for stmatrix.
Measures:  against step 8 and cuBLAS (the goal is 90 % at 8192³); K sweep; bias + gelu, fused or not.

WHY
In step 8 the *loads* of the next tile overlap the store, but the tensor cores still stop: both warpgroups
hold halves of one tile and store at the same time. And a warp stores badly: eight rows of 16 bytes.

*Ping-pong.* Each consumer warpgroup gets tiles of its own (128 x 192: 192 accumulators a thread), and they
take turns: while one multiplies, the other stores.

    consumer 0 | wgmma tile 0 | store 0 |   wait   | wgmma tile 2 | store 2 |
    consumer 1 |     wait     | wgmma tile 1       | store 1 |    | wgmma tile 3 ...

Turns are passed with *named barriers*: the hardware has 16 that count threads. `barrier(id, 256)` blocks
until 256 threads have come, `barrier_arrive(id, 256)` comes and does not block: 128 waiters + 128 givers.

*Staging.* Registers -> shared memory by *stmatrix*, which stores 8 x 8 matrices in the arrangement that
WGMMA's accumulators have; then one TMA store for 64 x 32 elements. Threads have written what TMA will read,
so now the proxy fence that step 2 did not need comes between the two:

    wait until this buffer's last store was read | stmatrix | fence | barrier (128) | one warp: TMA store

*Fusion.* What comes after the products is the *epilogue*; what it does to the accumulators before they are
rounded is a function, float32 in and out, given as a Constexpr: `def bias_gelu(acc, bias): return
gelu_tanh(acc + bias)`. A second kernel would read and write D once more.

*PDL* (programmatic dependent launch) lets the set-up of one kernel run beside the end of the one before it,
if both say so: two `griddepcontrol` instructions here, `use_pdl=True` at the launch; 2-3 µs a launch.
"""

from functools import partial

import common
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode

from kernels_dsl.blocks.epilogue.functions import gelu_tanh, identity
from kernels_dsl.blocks.epilogue.tile_store import register_to_smem_copy
from kernels_dsl.blocks.hw import tma
from kernels_dsl.blocks.hw.layouts import major_mode, staged_smem_layout
from kernels_dsl.blocks.hw.pipeline import consumer_state, make_tma_ring, skip, sync_after_init
from kernels_dsl.blocks.hw.wgmma import make_warpgroup_mma
from lowering import jit

step8 = common.load("08_gemm_persistent")
step6, step7 = step8.step6, step8.step7
WARPGROUP = 128
COLUMNS, BUFFERS = 32, 2  # staging buffers of 64 x 32, two for each warpgroup
STAGING, TURN = 1, 3  # ids of named barriers; that of a warpgroup is its number more. 0 is sync_threads.
PLAN = step8.Plan(step7.Tile(128, 192, 64, 5))


def bias_gelu(acc, bias):
    """The fused function of this step: traced like the kernel, on all of a thread's values at once."""
    return gelu_tanh(acc + bias)


# ---- kernel ------------------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    mmas: tuple,  # of the tile, and of 64 x COLUMNS of it
    loads: tuple,  # (atom of A, coordinates of A (M, K), the same of B (N, K))
    layouts: tuple,  # swizzled: (bM, bK, stages), (bN, bK, stages), (64, COLUMNS, buffers of both warpgroups)
    output: tuple,  # (atom, coordinates of D (M, N), bias (N) or None)
    extent: tuple,  # ((rows, columns) of cluster tiles, K tiles)
    constants: cutlass.Constexpr,  # (plan, epilogue)
):
    """Step 8's kernel, with consumers that take turns."""
    plan = constants[0]
    tile = plan.tile
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    barriers, *s_tiles = step7.allocate(layouts, tile)
    # A stage is read by one warpgroup: four arrivals a CTA.
    ring = make_tma_ring(barriers, tile.stages, tile.stage_bytes, 4, (plan.cluster, 1))
    sync_after_init((plan.cluster, 1))
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()  # only from here on does the kernel touch global memory
    group = cute.arch.make_warp_uniform(warp // 4)
    if group == 2:
        cute.arch.setmaxregister_decrease(24)
        if warp == 8:
            step8.produce(ring, loads, s_tiles[:2], extent, plan)
    else:
        cute.arch.setmaxregister_increase(240)
        consume(ring, mmas, tuple(s_tiles), output, extent, constants, group)


@cute.jit
def consume(ring, mmas, s_tiles: tuple, output, extent: tuple, constants: cutlass.Constexpr, group: Int32):
    """Warpgroup `group` takes every other tile of this cluster's walk, and skips the other's stages."""
    plan, epilogue = constants
    grid, k_tiles = extent
    rank, cluster, _ = cute.arch.block_idx()
    clusters = cute.arch.grid_dim()[1]
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    thr_mma = mmas[0].get_slice(thread)
    # All of A's rows, (MMA, 2, MMA_K, stages), and B (MMA, 1, MMA_K, stages).
    tCrA = mmas[0].make_fragment_A(thr_mma.partition_A(s_tiles[0]))
    tCrB = mmas[0].make_fragment_B(thr_mma.partition_B(s_tiles[1]))
    acc = cute.make_rmem_tensor(mmas[0].partition_shape_C((plan.tile.m, plan.tile.n)), cutlass.Float32)
    state, index = consumer_state(plan.tile.stages), cluster
    if group == 1:
        cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)  # warpgroup 0 begins
        state = skip(state, k_tiles)
        index += clusters
    while index < grid[0] * grid[1]:
        row, column = step8.tile_at(index, grid, plan.group)
        cute.arch.barrier(barrier_id=TURN + group, number_of_threads=2 * WARPGROUP)
        state, release = step7.issue_all(ring, state, mmas[0], (acc, tCrA, tCrB), k_tiles)
        # Everything is issued: the other may queue its WGMMAs behind ours while we wait for the last of ours.
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=2 * WARPGROUP)
        step7.finish(ring, release)
        origin = ((row * plan.cluster + rank) * plan.tile.m, column * plan.tile.n)
        store_tile(acc, mmas[1], s_tiles[2], output, origin, epilogue, (thread, group))
        state = skip(state, k_tiles)
        index += 2 * clusters
    if thread // 32 == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the stores that read it


@cute.jit
def store_tile(acc, mma_part, sD, output: tuple, origin: tuple, epilogue: cutlass.Constexpr, who: tuple):
    """Part by part of 64 x COLUMNS: function, round, stage, TMA store. The store of one overlaps the next.

    acc (MMA, 2, 1), sD (64, COLUMNS, buffers), `origin` of the tile in D, `who` = (thread, warpgroup).
    """
    atom, tma_d, mBias = output
    thread, group = who
    r2s = register_to_smem_copy(mma_part, cutlass.BFloat16, COLUMNS).get_slice(thread)  # stmatrix
    tRS_sD = r2s.partition_D(sD)  # (R2S, 1, 1, buffers)
    tRS_rD = cute.make_rmem_tensor(r2s.partition_S(sD).shape[:3], cutlass.BFloat16)
    shape = mma_part.partition_shape_C((64, COLUMNS))  # ((2, 2, 4), 1, 1)
    part = cute.make_rmem_tensor(shape, cutlass.Float32)
    size, across = cute.size(part), cute.size(acc.shape[0]) // cute.size(part)
    first_warp = cute.arch.make_warp_uniform(thread // 32) == 0
    for i in cutlass.range_constexpr(cute.size(acc) // size):
        m, n = origin[0] + i // across * 64, origin[1] + i % across * COLUMNS
        for v in cutlass.range_constexpr(size):
            part[v] = acc[i * size + v]
        value = part.load()
        if cutlass.const_expr(mBias is None):
            value = epilogue(value)
        else:
            value = epilogue(value, load_bias(mBias, part, n, thread).load())
        cute.make_tensor(tRS_rD.iterator, part.layout).store(value.to(cutlass.BFloat16))  # the same registers
        buffer = group * BUFFERS + i % BUFFERS
        if first_warp:
            cute.arch.cp_async_bulk_wait_group(BUFFERS - 1, read=True)
        cute.arch.barrier(barrier_id=STAGING + group, number_of_threads=WARPGROUP)
        cute.copy(r2s, tRS_rD, tRS_sD[None, None, None, buffer])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STAGING + group, number_of_threads=WARPGROUP)
        if first_warp:
            gD = cute.local_tile(cute.domain_offset((m, n), tma_d), (64, COLUMNS), (0, 0))
            tDsD, tDgD = tma.load_partition(atom, gD, sD, cute.make_layout(1), Int32(0))
            cute.copy(atom, tDsD[None, buffer], tDgD)
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def load_bias(mBias: cute.Tensor, like: cute.Tensor, n: Int32, thread: Int32) -> cute.Tensor:
    """bias[n + column] for each value of a thread, in the accumulators' layout (step 5): 0 beyond N."""
    values = cute.make_rmem_tensor(like.shape, cutlass.Float32)
    for i in cutlass.range_constexpr(cute.size(values)):
        column = n + i // 4 * 8 + thread % 4 * 2 + i % 2  # value i: column + i % 2, row + 8 * (i // 2 % 2)
        values[i] = cutlass.Float32(0.0)
        if column < mBias.shape[0]:
            values[i] = mBias[column].to(cutlass.Float32)
    return values


# ---- host --------------------------------------------------------------------------------------------------


@jit
def gemm(
    mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, mBias, max_ctas: Int32, stream,
    plan: cutlass.Constexpr, epilogue: cutlass.Constexpr,
):  # fmt: skip
    """D (M, N) = epilogue(A (M, K) @ B (N, K).T[, bias (N)]) in bfloat16; mBias may be None."""
    mma, loads, layouts = step7.set_up(mA, mB, plan.tile, plan.cluster)
    mma_part = make_warpgroup_mma(cutlass.BFloat16, major_mode(mA), major_mode(mB), COLUMNS)
    d_layout = staged_smem_layout(cutlass.BFloat16, (64, COLUMNS), 2 * BUFFERS, OperandMajorMode.K)
    output = (*tma.make_store_atom(mD, d_layout, (64, COLUMNS)), mBias)
    extent, clusters = step8.schedule(mA, mD, max_ctas, plan)
    kernel = gemm_kernel((mma, mma_part), loads, (*layouts, d_layout), output, extent, (plan, epilogue))
    grid, block, cluster = (plan.cluster, clusters, 1), (3 * WARPGROUP, 1, 1), (plan.cluster, 1, 1)
    kernel.launch(grid=grid, block=block, cluster=cluster, min_blocks_per_mp=1, stream=stream, use_pdl=True)


# ---- check, measure ----------------------------------------------------------------------------------------


def call(a, b, d, bias=None, plan=PLAN, epilogue=identity) -> None:
    """`gemm` with one CTA for each SM."""
    gemm(a, b, d, bias, common.sm_count(), plan=plan, epilogue=epilogue)


def check(lab: common.Lab) -> None:
    """Exact on integers; bias + gelu within twice PyTorch's error against float64."""
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    plan = lab.pick(PLAN, step8.Plan(step7.Tile(128, 64, 64, 2), 1))
    ctas = lab.pick(common.sm_count(), 2)
    for m, n, k in lab.pick(((2048, 2048, 512), (1000, 2056, 520)), ((128, 192, 128), (200, 72, 200))):
        a, b = lab.integers(m, k, dtype=torch.bfloat16), lab.integers(n, k, dtype=torch.bfloat16)
        d, bias = lab.poison(m, n, dtype=torch.bfloat16), lab.integers(n, dtype=torch.bfloat16)
        exact = a.double() @ b.double().T
        lab.launch(gemm, a, b, d, None, ctas, plan=plan, epilogue=identity)
        lab.equal(f"{m}×{n}×{k}, {plan.label}", d, exact)
        lab.launch(gemm, a, b, d, bias, ctas, plan=plan, epilogue=bias_gelu)
        lab.close(f"{m}×{n}×{k}, bias + gelu", d, gelu(exact + bias), gelu(a @ b.T + bias))


def measure(bench: common.Bench) -> None:
    """The claim, other tiles, a sweep of K, and the fused function."""
    tiles = (PLAN, step8.Plan(PLAN.tile, 1), step8.Plan(step7.Tile(128, 128, 64, 6)))
    for m, k in ((8192, 8192), (4096, 4096), (8192, 4096), (8192, 2048), (8192, 1024)):
        a, b, d = step6.problem(m, m, k)
        calls = {"step 8": partial(step8.call, a, b, d, step8.Plan())}
        calls.update({f"step 9, {plan.label}": partial(call, a, b, d, plan=plan) for plan in tiles})
        calls["cuBLAS"] = partial(torch.mm, a, b.T, out=d)
        bench.compare(f"{m}×{m}×{k} bfloat16", calls, flops=2.0 * m * m * k, baseline="cuBLAS")
    bias, two = common.random(m), "cuBLAS with bias, then gelu"
    calls = {
        "step 9, identity": partial(call, a, b, d),
        "step 9, bias + gelu": partial(call, a, b, d, bias, epilogue=bias_gelu),
        two: lambda: torch.nn.functional.gelu(torch.addmm(bias, a, b.T), approximate="tanh"),
    }
    bench.compare(f"{m}×{m}×{k}, fusion", calls, flops=2.0 * m * m * k, baseline=two)


def show(lab: common.Lab) -> None:
    """One CTA, four tiles: for the timeline."""
    a, b = lab.integers(128, 256, dtype=torch.bfloat16), lab.integers(256, 256, dtype=torch.bfloat16)
    plan, d = step8.Plan(step7.Tile(128, 64, 64, 3), 1), lab.poison(128, 256, dtype=torch.bfloat16)
    lab.launch(gemm, a, b, d, None, 1, plan=plan, epilogue=identity)


# ---- takeaways ---------------------------------------------------------------------------------------------
# * One warpgroup multiplies while the other stores; turns are named barriers that count 256 threads.
# * Threads write, fence, barrier, then TMA reads: the order that the two proxies need.
# * The shorter K is, the more of a tile's time is its store: 1.07 times step 8 at K = 8192, 1.5 at K = 1024.
# * A fused function costs a line of Python. `kernels_dsl.gemm` is this kernel with more choices.
# * exercise: python tutorials/exercises/09.py

if __name__ == "__main__":
    common.main(check, measure, show)
