"""Decoding attention: few query rows, many keys, split over the GPU. O = softmax(scale Q K^T + mask) V.

Work items are (sequence, split of its keys, KV head, tile of query rows); the CTAs that fit the GPU take
every n-th, or by TMA one when they are free. The query rows of a KV head are `pack` query heads times the
queries. An item's result, in float32 with the log-sum-exp of its rows, goes to a workspace, where a second
kernel merges the splits in their order (`decode_merge`, of many rows `decode_merge_rows`), or where they are
few the CTA that has the last one of a tile (`decode_last`). The split depends on a sequence's own lengths
alone, so its bits do not depend on the batch.

    warps   rows / 16 along the queries, the others share the keys of a step; each has a softmax of its own
    step t  wait for block t, barrier | start copies of block t + stages - 1 | scores, softmax, P V of t
    end     the warps' results become one, in the order of the warps, by way of shared memory

Keys lie in pages, found by a table, or in one cache a sequence, which is a page too. Each row is copied from
where it lies by cp.async; rows past the end, and those before the window, are zeros and not read.
`decode_tile` has the work of an item, `decode_fp8` what differs with caches of e4m3, `decode_sm90` a kernel
with the same arithmetic that loads keys by TMA, where the pages allow it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.splits import Lengths, PartRoom
from kernels_dsl.blocks.hw.dsl import choose, entry_name
from kernels_dsl.blocks.hw.swizzled_rows import ALIGN
from kernels_dsl.config.attention import AttentionVariant
from kernels_dsl.config.decode import DecodeConfig

from .decode_last import merge_if_last
from .decode_merge import VECTOR, MergeWork, merge_kernel, merge_threads
from .decode_merge_rows import merge_rows_kernel
from .decode_sm90 import decode_sm90_kernel, make_loads
from .decode_spec import DecodeSpec, Spec
from .decode_tile import DecodeWork, Parts, find_keys, item_at, make_site, work_item


def attention_decode(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    workspace: Int64,
    counters: Int64,
    used: cute.Tensor | None,
    table: cute.Tensor | None,
    sinks: cute.Tensor | None,
    k_scale: cute.Tensor | None,
    v_scale: cute.Tensor | None,
    starts: cute.Tensor | None,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    most_queries: Int32,
    parts_each: Int32,
    parts_more: Int32,
    ctas: Int32,
    stream,
    config: cutlass.Constexpr[DecodeConfig],
    variant: cutlass.Constexpr[AttentionVariant],
    early: cutlass.Constexpr[bool],
):
    """Launches the kernel of the items, and the one that merges. q, out (B, Sq, H, D), k, v (pages, page
    size, Hk, D), rows on 16 bytes. Without `table` (B, pages of one) int32 a page is a sequence. With
    `starts` (B + 1,) int32 queries are packed: q, out (T, H, D), `most_queries` of a sequence. workspace:
    address, on 16 bytes, of float32 for what is merged, as `make_parts` says. counters: address of int32, 0
    before and after: ARRIVALS, and one a tile of query rows where CTAs merge. k_scale, v_scale (1,), (Hk,) or
    (B, Hk) float32: factors of fp8 caches, None is 1. early: kernels may start before the one before them
    has ended (sm_90).
    """
    if cutlass.const_expr(starts is not None):
        q, out, lse = as_one_sequence(q), as_one_sequence(out), as_one_sequence(lse)
    sequences, q_len, heads, dim = q.shape
    page_size, kv_heads = k.shape[1], k.shape[2]
    dtype = q.element_type if config.kv_bytes == 2 else cutlass.Float16
    spec = DecodeSpec(config, dtype, variant, table is not None, q.element_type)
    capacity = page_size if table is None else table.shape[1] * page_size
    batch = sequences if starts is None else starts.shape[0] - 1
    lengths = Lengths(
        Int32(batch), most_queries, Int32(capacity), used, starts, Int32(sequences * q_len)
    )  # fmt: skip
    room = PartRoom(parts_each, parts_more)
    window = Window(left, right)
    parts, part_lse = make_parts(config, workspace, lengths, room, Int32(kv_heads))
    merge = MergeWork(
        parts, part_lse, room, out, lse, sinks, lengths, window, Int32(kv_heads),
        heads=cute.fast_divmod_create_divisor_v2(Int32(heads)),
        queries=cute.fast_divmod_create_divisor_v2(Int32(q_len)),
    )  # fmt: skip
    of_head = (batch, kv_heads)
    work = DecodeWork(
        q, k, v, table, parts, part_lse, room, lengths, window, ScoreOperands(scale, softcap, None, None),
        of_each_head(k_scale, of_head), of_each_head(v_scale, of_head),
        kv_heads=Int32(kv_heads), page=cute.fast_divmod_create_divisor_v2(Int32(page_size)), dim=Int32(dim),
        counters=counters, merge=merge,
    )  # fmt: skip
    of_items(spec, work, ctas, early).launch(
        grid=(ctas, 1, 1),
        block=(config.threads, 1, 1),
        smem=config.smem_bytes,
        min_blocks_per_mp=config.ctas_per_sm,
        # In percent. For more than one CTA the compiler asks a GPU without it, and there may be none.
        preferred_smem_carveout=None if config.ctas_per_sm == 1 else 100,
        stream=stream,
        use_pdl=config.box > 0,
    )
    if cutlass.const_expr(not config.merges):
        rows = Int32(sequences * q_len * heads)
        of_merge(spec, merge, rows, early).launch(
            grid=(merge_ctas(config, rows), 1, 1),
            block=(merge_threads(config.dim), 1, 1),
            stream=stream,
            use_pdl=early,
        )


def of_items(spec: DecodeSpec, work: DecodeWork, ctas: Int32, early: bool):
    """The kernel that takes the items, ready for its launch."""
    if spec.config.box:
        return decode_sm90_kernel(spec, work, make_loads(spec, work), ctas)
    return decode_kernel(spec, work, ctas, early)


def of_merge(spec: DecodeSpec, work: MergeWork, rows: Int32, early: bool):
    """The kernel that merges, ready for its launch."""
    if spec.config.whole_rows:
        return merge_rows_kernel(spec, work, rows, early)
    return merge_kernel(spec, work, early)


def merge_ctas(config: DecodeConfig, rows: Int32) -> Int32:
    """CTAs of the kernel that merges."""
    threads = merge_threads(config.dim)
    return (rows * (config.dim // VECTOR) + threads - 1) // threads if config.whole_rows else rows


def make_parts(
    config: DecodeConfig, workspace: Int64, lengths: Lengths, room: PartRoom, heads: Int32
) -> Parts:
    """The partial results in a workspace: all their rows (rows, padded D), then the log-sum-exps of these."""
    rows = heads * (lengths.tokens * config.pack * room.each + lengths.batch * room.more)
    of_rows = cute.make_ptr(Float32, workspace, cute.AddressSpace.gmem, assumed_align=16)
    place = workspace + Int64(rows) * (4 * config.dim)
    of_lse = cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=16)
    return Parts(of_rows, cute.make_tensor(of_lse, cute.make_layout(rows)))


def of_each_head(scale: cute.Tensor | None, shape: tuple[int, int]) -> cute.Tensor | None:
    """Factors (1,), one for each head or (B, Hk) as (B, Hk)."""
    if scale is None or cute.rank(scale) == 2:
        return scale
    step = choose(scale.shape[0] == 1, 0, scale.stride[0], Int32)
    return cute.make_tensor(scale.iterator, cute.make_layout(shape, stride=(0, step)))


def as_one_sequence(x: cute.Tensor | None) -> cute.Tensor | None:
    """Packed queries, or their log-sum-exps, as those of a dense batch of one."""
    if x is None:
        return None
    layout = cute.make_layout((1, *x.shape), stride=(0, *x.stride))
    return cute.make_tensor(x.iterator, layout)


@entry_name("attention_decode")
@cute.kernel
def decode_kernel(spec: Spec, work: DecodeWork, ctas: Int32, early: cutlass.Constexpr):
    """Device side: every n-th item, of `ctas` CTAs."""
    if cutlass.const_expr(early):
        cute.arch.griddepcontrol_launch_dependents()
    smem = cutlass.memory.SmemAllocator().allocate(spec.config.smem_bytes, byte_alignment=ALIGN)
    base = smem.toint()
    index = cute.arch.block_idx()[0]
    found = item_at(spec, work, index)
    while found.batch < work.lengths.batch:
        item = find_keys(spec, work, found.batch, found.number)
        work_item(spec, base, work, item)
        if cutlass.const_expr(spec.config.merges):
            merge_if_last(spec, work, item, make_site(spec, base))
        index = index + ctas
        found = item_at(spec, work, index, found.cursor)
