"""dK and dV of the SM80-class attention backward, from accumulators to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.hw.swizzled_rows import RowsTile, shared_pointer, store_rows

from .backward_sm80_copies import Gradients, Site, Tensors
from .backward_sm80_spec import BackwardSpec
from .backward_work import BackwardWork


@cute.jit
def finish(
    spec: cutlass.Constexpr,
    gradients: Gradients,
    tensors: Tensors,
    base: Int32,
    work: BackwardWork,
    site: Site,
):
    """Stores dK and dV of this warp's keys. Of two warps with the same keys one stores dK, the other dV."""
    head = site.job.at.kv_head
    dk, dv = tensors.dk[None, None, head], tensors.dv[None, None, head]
    if cutlass.const_expr(spec.query_warps == 1):
        store_keys(spec, gradients.dv, dv, base, Float32(1.0), site)
        store_keys(spec, gradients.dk, dk, base, work.scores.scale, site)
    else:
        dk_part = base + site.key_warp * (spec.warp_keys * 4 * spec.config.dim)
        dv_part = base + spec.warp_keys * 4 * (
            spec.key_warps * spec.config.dim + site.key_warp * spec.config.dim_v
        )
        if site.query_warp == 0:
            give(gradients.dk, dk_part, site)
        else:
            give(gradients.dv, dv_part, site)
        cute.arch.sync_threads()
        if site.query_warp == 0:
            take(gradients.dv, dv_part, site)
        else:
            take(gradients.dk, dk_part, site)
        cute.arch.sync_threads()
        if site.query_warp == 0:
            store_keys(spec, gradients.dv, dv, base, Float32(1.0), site)
        else:
            store_keys(spec, gradients.dk, dk, base, work.scores.scale, site)


def give(values: cute.Tensor, address: Int32, site: Site) -> None:
    """Accumulators to shared memory, where another warp takes them."""
    for i in range(cute.size(values) // 4):
        vector = shared_pointer(Float32, address + (32 * i + site.lane) * 16, 16)
        source = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
        cute.autovec_copy(source, cute.make_tensor(vector, cute.make_layout(4)))


def take(values: cute.Tensor, address: Int32, site: Site) -> None:
    """Adds to accumulators what another warp gave."""
    for i in range(cute.size(values) // 4):
        vector = shared_pointer(Float32, address + (32 * i + site.lane) * 16, 16)
        found = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(cute.make_tensor(vector, cute.make_layout(4)), found)
        own = cute.make_tensor(values.iterator + 4 * i, cute.make_layout(4))
        own.store(own.load() + found.load())


def store_keys(
    spec: BackwardSpec, values: cute.Tensor, target: cute.Tensor, base: Int32, scale: Float32, site: Site
) -> None:
    """Stores this warp's rows of dK or dV, times `scale`, by way of shared memory of its own."""
    warp = (site.query_warp + site.product) * spec.key_warps + site.key_warp
    tile = RowsTile(spec.warp_keys, 8 * cute.size(values, mode=[2]))
    widest = RowsTile(spec.warp_keys, max(spec.config.dim, spec.config.dim_v)).bytes
    result = cute.make_rmem_tensor_like(values, spec.dtype)
    result.store((values.load() * scale).to(spec.dtype))
    first_row = site.job.at.n * spec.tile_k + site.key_warp * spec.warp_keys
    cute.arch.sync_warp()
    store_rows(result, tile, base + warp * widest, target, first_row, site.job.seq.k_len, site.lane)
