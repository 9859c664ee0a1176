"""Description of the work, which every attention kernel derives from its tensors, and views of them."""

from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernels_dsl.blocks.attention.kv_blocks import KeyLists, TileShape, Window
from kernels_dsl.blocks.attention.mask import ScoreOperands
from kernels_dsl.blocks.attention.pages import Pages
from kernels_dsl.blocks.attention.query_tiles import L2_BYTES, QueryTiles, groups_for_l2
from kernels_dsl.blocks.attention.seqlen import SeqExtent, SeqLens
from kernels_dsl.config.attention import AttentionVariant

LAYOUTS = {"bshd": (1, 3, 2, 0), "bhsd": (2, 3, 1, 0), "thd": (0, 2, 1, None)}
"""Name of a tensor's layout -> which of its modes are rows, head dimension, head, batch."""
TRANSPOSED = {"bshd": (2, 3, 1, 0), "bhsd": (2, 3, 1, 0), "thd": (1, 2, 0, None)}
"""The same for V transposed, (B, Hk, Dv, keys) or packed (Hk, Dv, keys): its rows are columns of V."""
Modes = tuple[int, int, int, int | None]


class Operands(NamedTuple):
    """Tensors in global memory of a forward pass."""

    q: cute.Tensor
    """(Sq, D, H, B)."""
    k: cute.Tensor
    """(Sk, D, Hk, B)."""
    v: cute.Tensor
    """(Sk, Dv, Hk, B) or its transpose (Dv, Sk, Hk, B), as the kernel takes it."""
    o: cute.Tensor
    """(Sq, Dv, H, B)."""


class Descales(NamedTuple):
    """float32 factors of fp8 operands, each of which may be None."""

    q: cute.Tensor | None
    """(B, H)."""
    k: cute.Tensor | None
    """(B, Hk), or (B, Hk, blocks of DESCALE_KEYS keys)."""
    v: cute.Tensor | Float32 | None
    """As `k`; a number where it is that of a tile."""

    @property
    def by_block(self) -> bool:
        """K or V has a factor a block of keys."""
        return any(isinstance(x, cute.Tensor) and cute.rank(x) == 3 for x in (self.k, self.v))


class AttentionArguments(NamedTuple):
    """A call's runtime arguments besides its tensors of Q, K, V and O."""

    lse: cute.Tensor | None
    """float32 (B, H, Sq); packed (H, T)."""
    scores: ScoreOperands
    window: Window
    seqlens: SeqLens | None
    """None for a dense batch."""
    max_q: Int32
    """Rows of the longest packed sequence."""
    lists: KeyLists | None
    sinks: cute.Tensor | None
    """float32 (H,)."""
    counter: cute.Tensor | None = None
    """int32 (1,), 0: that of `tile_queue`. None: a static schedule."""
    descales: Descales | None = None
    table: cute.Tensor | None = None
    """int32 (sequences, pages of one) where K and V lie in pages, (keys of a page, D, Hk, pages)."""


class Work(NamedTuple):
    """The problem as all roles of a kernel know it; fields of a call as in `AttentionArguments`."""

    tiles: QueryTiles
    extent: SeqExtent
    window: Window
    scores: ScoreOperands
    lists: KeyLists | None
    sinks: cute.Tensor | None
    lse: cute.Tensor | None
    heads_per_kv: Int32
    v_dim: Int32
    """Columns of the output that exist: a tile may have more."""
    counter: cute.Tensor | None
    descales: Descales | None
    pages: Pages | None = None
    """None: K and V are not in pages."""


class AttentionSpec(Protocol):
    """Trace-time facts of a kernel that blocks read."""

    @property
    def variant(self) -> AttentionVariant: ...
    @property
    def tile(self) -> TileShape: ...  # of one step
    @property
    def tile_n(self) -> int: ...  # keys of one step
    @property
    def pack(self) -> int: ...  # query heads whose rows share a tile
    @property
    def dim(self) -> int: ...
    @property
    def dim_v(self) -> int: ...
    @property
    def dtype(self) -> type[cutlass.Numeric]: ...  # of the operands
    @property
    def varlen(self) -> bool: ...  # packed sequences


def rows_first(tensor: cute.Tensor, modes: Modes) -> cute.Tensor:
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
    spec: AttentionSpec,
    arguments: AttentionArguments,
    mQ: cute.Tensor,  # (Sq, D, H, B)
    mK: cute.Tensor,  # (Sk, D, Hk, B)
    v_dim: Int32,
    lead_kv: Int32 | None = None,
) -> Work:
    """The work of a call. The tiles of the first `lead_kv` KV heads of all sequences come first."""
    rows, keys, heads, batch = mQ.shape[0], mK.shape[0], mQ.shape[2], mQ.shape[3]
    if spec.pack > 1:
        rows = rows[1]
    longest, seqlens = rows, SeqLens(None, None, None)
    if arguments.seqlens is not None:
        seqlens = arguments.seqlens
        longest, batch = arguments.max_q, cute.size(seqlens.cu_q) - 1
    heads_per_kv = heads // mK.shape[2]
    pages = None
    if arguments.table is not None:
        pages = Pages(arguments.table, cute.fast_divmod_create_divisor_v2(Int32(keys)))
        keys = keys * arguments.table.shape[1]  # that a sequence has room for
    # As many keys do not fit in any case, and of more the product would leave 32 bits.
    kv_bytes = cutlass.min(keys, L2_BYTES >> 5) * ((spec.dim + spec.dim_v) * spec.dtype.width // 8)
    groups = groups_for_l2(heads * batch, heads_per_kv, kv_bytes)
    lead = None if lead_kv is None else lead_kv * heads_per_kv
    return Work(
        QueryTiles(cute.ceil_div(longest, spec.tile.queries), heads, Int32(batch), groups, lead),
        SeqExtent(rows, keys, *seqlens), arguments.window, arguments.scores, arguments.lists, arguments.sinks,
        arguments.lse, heads_per_kv, v_dim=v_dim, counter=arguments.counter, descales=arguments.descales,
        pages=pages,
    )  # fmt: skip


@cute.jit
def kv_head(head: Int32, heads_per_kv: Int32) -> Int32:
    """The KV head of a query head; consecutive query heads share one."""
    return head // heads_per_kv
