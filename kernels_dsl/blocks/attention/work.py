"""What every attention kernel derives from its tensors: views of them, and the description of the work."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_dsl.blocks.attention.kv_blocks import Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.query_tiles import L2_BYTES, QueryTiles, groups_for_l2
from kernels_dsl.blocks.attention.seqlen import SeqExtent

LAYOUTS = {"bshd": (1, 3, 2, 0), "bhsd": (2, 3, 1, 0), "thd": (0, 2, 1, None)}
"""Name of a tensor's layout -> which of its modes are rows, head dimension, head, batch."""


class Work(NamedTuple):
    """What every role needs to know of the problem.

    `lists` is None or (counts, indices, whole counts, whole indices) of key blocks a query tile.
    `sinks` is None or float32 (H,). `lse` is None or float32 (B, H, Sq), packed (H, T).
    `v_dim` columns of the output are real.
    `counter` is None for a static schedule, or that of `blocks.attention.tile_queue`.
    `descales` is None or float32 factors of fp8 operands: of Q (B, H), of K and of V (B, Hk), or (B, Hk,
    blocks of DESCALE_KEYS keys), each of which may be None.
    """

    tiles: QueryTiles
    extent: SeqExtent
    window: Window
    scores: ScoreOperands
    lists: tuple | None
    sinks: cute.Tensor | None
    lse: cute.Tensor | None
    heads_per_kv: Int32
    v_dim: Int32
    counter: cute.Tensor | None
    descales: tuple | None = None
    later: tuple | None = None
    """None or `sm90_later.Later`: V is transposed beside the attention."""


def rows_first(tensor: cute.Tensor, modes: tuple) -> cute.Tensor:
    """View as (rows, dim, head, batch); a layout without batch gets one of 1."""
    shape, stride = tensor.shape, tensor.stride
    return cute.make_tensor(
        tensor.iterator,
        cute.make_layout(
            tuple(1 if m is None else shape[m] for m in modes),
            stride=tuple(0 if m is None else stride[m] for m in modes),
        ),
    )


def pack_heads(tensor: cute.Tensor, pack: int) -> cute.Tensor:
    """View of (rows, dim, head, batch) as ((pack, rows), dim, head / pack, batch)."""
    (rows, dim, heads, batch), (row, column, head, image) = tensor.shape, tensor.stride
    shape = ((pack, rows), dim, heads // pack, batch)
    return cute.make_tensor(
        tensor.iterator, cute.make_layout(shape, stride=((head, row), column, head * pack, image))
    )


def describe_work(
    spec,
    mQ: cute.Tensor,
    mK: cute.Tensor,
    seqlens: tuple | None,
    max_q: Int32,
    lead_kv: Int32 | None = None,
) -> tuple[QueryTiles, SeqExtent, Int32]:
    """Query tiles, lengths and query heads a KV head, for q (Sq, D, H, B) and k (Sk, D, Hk, B).

    Of `spec` it reads tile, pack, dim, dim_v and dtype. `max_q` counts where `seqlens` are given.
    The tiles of the first `lead_kv` KV heads of all sequences come first.
    """
    rows, keys, heads, batch = mQ.shape[0], mK.shape[0], mQ.shape[2], mQ.shape[3]
    if spec.pack > 1:
        rows = rows[1]
    cu, used_k, longest = None, None, rows
    if seqlens is not None:
        cu, used_k = (seqlens[0], seqlens[1]), seqlens[2]
        longest, batch = max_q, cute.size(seqlens[0]) - 1
    heads_per_kv = heads // mK.shape[2]
    # As many keys do not fit in any case, and of more the product would leave 32 bits.
    kv_bytes = cutlass.min(keys, L2_BYTES >> 5) * ((spec.dim + spec.dim_v) * spec.dtype.width // 8)
    groups = groups_for_l2(heads * batch, heads_per_kv, kv_bytes)
    lead = None if lead_kv is None else lead_kv * heads_per_kv
    tiles = QueryTiles(cute.ceil_div(longest, spec.tile[0]), heads, Int32(batch), groups, lead)
    return tiles, SeqExtent(rows, keys, cu, used_k), heads_per_kv


@cute.jit
def kv_head(head: Int32, heads_per_kv: Int32) -> Int32:
    """The KV head of a query head; consecutive query heads share one."""
    return head // heads_per_kv
