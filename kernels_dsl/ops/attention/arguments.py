"""The arguments of a call of attention: checked once, described as plain data.

Every error is a TypeError or ValueError that names the argument, what it was and what it must be. The checks
look at shapes, dtypes and devices only, so they serve real and fake tensors alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kernels_dsl.checks import options
from kernels_dsl.checks.eager_path import check_tensor, signature, written_out
from kernels_dsl.config.attention import HEAD_DIM_STEP, MAX_HEAD_DIM, AttentionVariant
from kernels_dsl.ops.attention.functions import unwrapped
from kernels_dsl.ops.attention.pages import check_pages
from kernels_dsl.ops.operation import Arguments, Named
from kernels_dsl.sparse.block_lists import ALIGNMENTS, BlockLists, block_sizes
from lowering.records import NamedTuple, frozen

if TYPE_CHECKING:
    from typing_extensions import Self

INPUT_DTYPES = (torch.bfloat16, torch.float16)
MASK_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.float16)
MODES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (None, 0, 1, 2)}
"""Layout -> the modes of a tensor that are batch, rows, heads and head dimension."""
NAMES = {"bhsd": ("query", "key", "value", "attn_mask")}
"""Layout -> what q, k, v and the mask are called, where that is not their names here: as PyTorch has it."""
LEAST_SOFTCAP, MOST_SOFTCAP = 2.0**-126, 2.0**126
"""The least normal float32, since scores are divided by it, and the inverse of that."""
UNLIMITED = 1 << 30
"""A window at least as wide is without limit: sums of two such numbers stay within 32 bits."""


@frozen
class AttentionCall:
    """A checked call. `batch` and the lengths of a packed call are those of the caller's arguments.

    `longest_q` and `longest_k` are the most queries and keys that a sequence can have. `page`: keys of a page
    where K and V lie in pages, else 0; `k_len` is then what a sequence has room for.
    """

    layout: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    longest_q: int
    longest_k: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    variant: AttentionVariant
    left: int
    right: int
    scale: float
    softcap: float
    block: tuple[int, int] | None
    page: int

    @property
    def packed(self) -> bool:
        """Sequences of different lengths lie behind each other."""
        return self.layout == "thd"


class AttentionOptions(NamedTuple):
    """Options that `attention` and its relatives share, as the caller has them; `window` is a tuple."""

    causal: bool = False
    window: tuple[int | None, ...] | None = None
    alignment: str = "bottom_right"
    scale: float | None = None
    softcap: float = 0.0


class Seqlens(NamedTuple):
    """The places of packed sequences: int32 (sequences + 1,) starts in q and in k, and (sequences,) keys that
    count. With `table` (sequences, pages of one) K and V lie in pages, and `k` is None."""

    q: torch.Tensor
    k: torch.Tensor | None
    used: torch.Tensor | None = None
    table: torch.Tensor | None = None


class MaxSeqlens(NamedTuple):
    """The most queries and keys of one sequence, for the extents of `mask` and `blocks`."""

    q: int
    k: int | None = None


class Extras(NamedTuple):
    """Tensor arguments beside q, k and v; `max_seqlens` goes with `seqlens`."""

    mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    blocks: BlockLists | None = None
    aux: tuple[Any, ...] = ()
    seqlens: Seqlens | None = None
    max_seqlens: MaxSeqlens | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that are there, by the names of the caller's arguments."""
        found = {"mask": self.mask, "sinks": self.sinks}
        if isinstance(self.blocks, BlockLists):  # others are refused
            names = ("counts", "indices", "full_counts", "full_indices")
            found.update((f"blocks.{name}", x) for name, x in zip(names, self.blocks.tensors))
        found.update((f"aux[{i}]", x) for i, x in enumerate(self.aux))
        if self.seqlens is not None:
            found.update(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"), self.seqlens))
        return {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}

    def values(self) -> list[torch.Tensor]:
        """The same without names."""
        lists = self.blocks.tensors if isinstance(self.blocks, BlockLists) else ()
        candidates = (self.mask, self.sinks, *lists, *self.aux, *(self.seqlens or ()))
        return [x for x in candidates if x is not None and isinstance(x, torch.Tensor)]

    def form(self) -> tuple[Any, ...]:
        """The kinds of those that are there, and all that is no tensor."""
        blocks: Any = None
        if isinstance(self.blocks, BlockLists):
            blocks = (self.blocks.block, *[x is None for x in self.blocks.tensors])
        elif self.blocks is not None:
            blocks = type(self.blocks)
        seqlens = None if self.seqlens is None else tuple([x is None for x in self.seqlens])
        kinds = tuple(map(type, self.aux))
        return type(self.mask), type(self.sinks), blocks, kinds, seqlens, self.max_seqlens

    def in_memory(self) -> Extras:
        """The same with negated views as tensors of memory (`checks.eager_path`)."""
        found = self
        if isinstance(self.blocks, BlockLists):
            lists = written_out(self.blocks.tensors)
            if lists is not None:
                counts, indices, full_counts, full_indices = lists
                blocks = BlockLists(counts, indices, full_counts, full_indices, self.blocks.block)
                found = found._replace(blocks=blocks)
        aux, seqlens = written_out(self.aux), written_out(self.seqlens or ())
        if aux is not None:
            found = found._replace(aux=aux)
        if seqlens is not None:
            found = found._replace(seqlens=Seqlens(*seqlens))
        pair = written_out((self.mask, self.sinks))
        return found if pair is None else found._replace(mask=pair[0], sinks=pair[1])


NO_EXTRAS = Extras()


class OperatorArguments(Arguments):
    """The arguments that records of attention's operators have in common. Lengths below 0 are none."""

    mask: torch.Tensor | None
    sinks: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seqused_k: torch.Tensor | None
    counts: torch.Tensor | None
    indices: torch.Tensor | None
    full_counts: torch.Tensor | None
    full_indices: torch.Tensor | None
    aux: tuple[Any, ...]
    causal: bool
    window_left: int | None
    window_right: int | None
    alignment: str
    scale: float | None
    softcap: float
    block_q: int
    block_k: int
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def blocks(self) -> BlockLists | None:
        """The block lists."""
        lists = self.counts, self.indices, self.full_counts, self.full_indices
        if all(x is None for x in lists):
            return None
        return BlockLists(*lists, block=(self.block_q, self.block_k))

    def options(self) -> AttentionOptions:
        """The options of the call."""
        window = (self.window_left, self.window_right)
        unlimited = window == (None, None)
        return AttentionOptions(
            self.causal, None if unlimited else window, self.alignment, self.scale, self.softcap
        )

    def extras(self) -> Extras:
        """The tensors beside q, k and v."""
        found = Extras(self.mask, self.sinks, self.blocks, tuple(self.aux or ()))  # a list, or None
        table = getattr(self, "block_table", None)  # not every operator has one
        if self.cu_seqlens_q is not None and not (self.cu_seqlens_k is None and table is None):
            longest = MaxSeqlens(self.max_seqlen_q, None if self.max_seqlen_k < 0 else self.max_seqlen_k)
            seqlens = Seqlens(self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k, table)
            found = found._replace(seqlens=seqlens, max_seqlens=longest)
        return found if found.values() else NO_EXTRAS


def keywords_of(chosen: AttentionOptions) -> dict[str, Any]:
    """The options of a call as operators take them."""
    causal, window, alignment, scale, softcap = chosen
    left, right = (None, None) if window is None else window
    return {
        "causal": causal, "window_left": left, "window_right": right, "alignment": alignment, "scale": scale,
        "softcap": softcap,
    }  # fmt: skip


def longest_of(extras: Extras) -> MaxSeqlens:
    """The longest sequences as operators take them."""
    q, k = extras.max_seqlens or MaxSeqlens(0)
    return MaxSeqlens(q, -1 if k is None else k)


@frozen
class AttentionArguments(Arguments):
    """The arguments of `attention`, in one of its forms."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: AttentionOptions = AttentionOptions()
    layout: str = "bshd"
    extras: Extras = NO_EXTRAS
    score_mod: Named = None
    mask_mod: Named = None
    return_lse: bool = False
    config: Named = None
    family: str | None = None
    out: torch.Tensor | None = None
    score_mod_bwd: Named = None
    deterministic: bool = True
    """False if gradients may have other bits in another call."""
    drops_rows: bool = False
    """True if the caller drops rows of the output that belong to no sequence."""

    leading = "q"
    unlisted = ("options", "extras", "config", "drops_rows")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of q, k, v and the mask."""
        return NAMES.get(self.layout, ("q", "k", "v", "mask"))

    @property
    def aliases(self) -> Mapping[str, str]:
        """Field -> the caller's name for it."""
        return dict(zip("qkv", self.names)) if self.layout in NAMES else {}

    def read(self) -> dict[str, Any]:
        """All that the call reads and may be a tensor, by the caller's names."""
        return {**super().read(), **self.extras.tensors()}

    def check(self) -> None:
        """TypeError for an option that is wrong."""
        options.boolean("return_lse", self.return_lse)

    def in_memory(self) -> Self:
        """The record with negated views as tensors of memory."""
        made, extras = super().in_memory(), self.extras
        if extras is not NO_EXTRAS:
            extras = extras.in_memory()
        return made if extras is self.extras else replace(made, extras=extras)

    def plan_key(self) -> Any:
        """All that a plan depends on."""
        fields, own = vars(self), (signature(self.q), signature(self.k), signature(self.v))
        key = (*own, *map(fields.get, _DECIDING), signature(self.out))
        if self.extras is NO_EXTRAS:
            return key
        extras = self.extras
        others = tuple((name, signature(x)) for name, x in extras.tensors().items())
        block = getattr(extras.blocks, "block", None)
        return key, others, tuple(map(type, extras.aux)), block, extras.max_seqlens


_DECIDING = ("layout", "options", "score_mod", "mask_mod", "return_lse", "config", "family")


def _check_tensor(
    name: str, value: object, rank: int, dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES
) -> torch.Tensor:
    tensor = check_tensor(name, value)
    if tensor.dim() != rank:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must have {rank} modes")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}, must be {' or '.join(map(str, dtypes))}")
    return tensor


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, names: tuple[str, ...]
) -> None:
    batch, _, heads, _ = MODES[layout]
    of_keys = MODES["bshd"] if k.dim() > q.dim() else MODES[layout]  # in pages, or as q
    name_q, name_k, name_v = names[:3]
    for name, x in ((name_k, k), (name_v, v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype}, must be {q.dtype} like {name_q}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, must be on {q.device} like {name_q}")
        if batch is not None and x.shape[batch] != q.shape[batch]:
            raise ValueError(
                f"{name} has a batch of {x.shape[batch]}, must be {q.shape[batch]} like {name_q}'s"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{name_k} has head dimension {k.shape[-1]}, must be {q.shape[-1]} like {name_q}'s")
    for extent, mode in (("length", of_keys[1]), ("number of heads", of_keys[2])):
        if v.shape[mode] != k.shape[mode]:
            raise ValueError(
                f"{name_v} has a {extent} of {v.shape[mode]}, must be {k.shape[mode]} like {name_k}'s"
            )
    q_heads, kv_heads = q.shape[heads], k.shape[of_keys[2]]
    if q_heads % kv_heads if kv_heads else q_heads:
        raise ValueError(
            f"{name_q} has {q_heads} heads, must be a multiple of {name_k}'s number of heads, {kv_heads}"
        )
    for name, x in ((name_q, q), (name_v, v)):
        size = x.shape[-1]
        if not HEAD_DIM_STEP <= size <= MAX_HEAD_DIM or size % HEAD_DIM_STEP:
            raise ValueError(
                f"{name} has head dimension {size}, must be a multiple of {HEAD_DIM_STEP} up to "
                f"{MAX_HEAD_DIM}"
            )


def check_softcap(softcap: float) -> None:
    """ValueError where float32 does not hold it, its inverse, or its product with log2(e)."""
    if softcap != 0 and not LEAST_SOFTCAP <= softcap <= MOST_SOFTCAP:
        limits = f"from {LEAST_SOFTCAP} to {MOST_SOFTCAP}, as float32"
        raise ValueError(f"softcap is {softcap}, must be 0 (none) or {limits}")


def checked_scalars(causal: Any, scale: Any, softcap: Any) -> bool:
    """`causal`, of a call that has one of these of a type that Python takes for another: 1 for True."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None:
            options.real(name, value)
    return options.boolean("causal", causal)


def aux_of(aux: Any) -> tuple[Any, ...]:
    """The extra arguments of score and mask functions as a tuple."""
    if type(aux) is tuple:
        return aux
    if not isinstance(aux, Sequence) or isinstance(aux, (str, bytes)):
        raise TypeError(f"aux is a {type(aux).__name__}, must be a sequence of tensors and numbers")
    return tuple(aux)


def widths_of(window: Any) -> tuple[int | None, ...]:
    """A window as a tuple of integers and None."""
    kept = type(window) is tuple
    if not kept and (not isinstance(window, Sequence) or isinstance(window, (str, bytes))):
        raise TypeError(f"window is a {type(window).__name__}, must be (left, right) or None")
    for width in window:
        if width is not None and type(width) is not int:
            return tuple(_width(place, x) for place, x in enumerate(window))
    return window if kept else tuple(window)


def _width(place: int, width: Any) -> int | None:
    """The width of a window to its left (place 0) or right (1)."""
    try:
        return None if width is None else options.integer("width", width, least=-1)
    except (TypeError, ValueError):
        side = ("left", "right")[place] if place < 2 else f"entry {place}"
        raise ValueError(f"window's {side} is {width!r}, must be None, -1 (no limit) or at least 0") from None


def window_limits(causal: bool, window: Sequence[int | None] | None) -> tuple[int | None, int | None]:
    """(left, right) with None for no limit."""
    widths = (None, None) if window is None else widths_of(window)
    if len(widths) != 2:
        raise ValueError(f"window has {len(widths)} entries, must be (left, right)")
    limits: list[int | None] = []
    for width in map(_width, range(2), widths):
        limits.append(None if width is None or width == -1 or width >= UNLIMITED else width)
    left, right = limits
    return left, 0 if options.boolean("causal", causal) else right


def _check_mask(
    mask: torch.Tensor | None,
    shape: tuple[int, int, int, int | None],
    device: torch.device,
    names: tuple[str, ...],
) -> str | None:
    """None, "boolean" or "additive"."""
    if mask is None:
        return None
    name = names[3]
    if shape[3] is None:
        raise ValueError("max_seqlen_k is None, must be given beside mask")
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__}, must be a torch.Tensor")
    if mask.dtype not in MASK_DTYPES:
        raise TypeError(f"{name} is {mask.dtype}, must be one of {', '.join(map(str, MASK_DTYPES))}")
    if mask.device != device:
        raise ValueError(f"{name} is on {mask.device}, must be on {device} like {names[0]}")
    padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(padded) != 4 or any(m not in (1, s) for m, s in zip(padded, shape)):
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, must broadcast to (B, H, Sq, Sk) = {shape}")
    return "boolean" if mask.dtype == torch.bool else "additive"


def check_sinks(sinks: torch.Tensor | None, heads: int, device: torch.device) -> bool:
    """True where sinks are given. TypeError or ValueError where they are wrong."""
    if sinks is None:
        return False
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks is a {type(sinks).__name__}, must be a torch.Tensor")
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, must be (heads,) = ({heads},)")
    if not sinks.is_floating_point() or sinks.device != device:
        raise ValueError(f"sinks is {sinks.dtype} on {sinks.device}, must be floating point on {device}")
    return True


def _check_blocks(blocks: BlockLists, batch: int, heads: int, q_len: int, device: torch.device) -> None:
    rows = -(-q_len // blocks.block[0])
    if blocks.counts is None and blocks.full_counts is None:
        raise ValueError("blocks has neither counts nor full_counts, must have one of them")
    for prefix, counts, indices in (
        ("", blocks.counts, blocks.indices),
        ("full_", blocks.full_counts, blocks.full_indices),
    ):
        if (counts is None) != (indices is None):
            raise ValueError(f"blocks has one of {prefix}counts and {prefix}indices, must have both or none")
        for name, x, rank in ((f"{prefix}counts", counts, 3), (f"{prefix}indices", indices, 4)):
            if x is None:
                continue
            options.instance(f"blocks.{name}", x, torch.Tensor)
            if x.dtype != torch.int32 or x.device != device:
                raise TypeError(f"blocks.{name} is {x.dtype} on {x.device}, must be torch.int32 on {device}")
            if (
                x.dim() != rank
                or x.shape[0] not in (1, batch)
                or x.shape[1] not in (1, heads)
                or (x.shape[2] != rows)
            ):
                raise ValueError(
                    f"blocks.{name} has shape {tuple(x.shape)}, must be (1 or {batch}, 1 or {heads}, {rows}"
                    + (", entries)" if rank == 4 else ")")
                )


def _lengths(q_len: int, k_len: int, extras: Extras) -> tuple[int, int | None]:
    """Queries and keys that a mask tensor and block lists are about: of the longest sequence where packed."""
    if extras.seqlens is None:
        return q_len, k_len
    longest = extras.max_seqlens or MaxSeqlens(0)
    most_k = None if longest.k is None else options.integer("max_seqlen_k", longest.k, least=0)
    return options.integer("max_seqlen_q", longest.q, least=0), most_k


def _at_most(length: int | None, rows: int) -> int:
    """Rows of the longest sequence, of which more than all rows are said to be possible, or nothing is."""
    return rows if length is None or length > rows else length


def _check_seqlens(seqlens: Seqlens, device: torch.device) -> int:
    """The number of sequences."""
    cu_q, cu_k, used, table = seqlens
    optional = ("seqused_k",) if table is None else ("seqused_k", "cu_seqlens_k")
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k), ("seqused_k", used)):
        if x is None and name in optional:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, must be a torch.Tensor")
        if x.dtype != torch.int32 or x.device != device:
            raise TypeError(f"{name} is {x.dtype} on {x.device}, must be torch.int32 on {device}")
        if x.dim() != 1 or not (x.is_contiguous() or x.numel() < 2):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be contiguous with one mode")
    if cu_q.numel() < 1 or (cu_k is not None and cu_k.numel() != cu_q.numel()):
        name, x = ("cu_seqlens_q", cu_q) if cu_k is None else ("cu_seqlens_k", cu_k)
        like = "or more" if cu_k is None else "like cu_seqlens_q"
        raise ValueError(f"{name} has {x.numel()} elements, must have {max(cu_q.numel(), 1)} {like}")
    if used is not None and used.numel() != cu_q.numel() - 1:
        raise ValueError(f"seqused_k has {used.numel()} elements, must have {cu_q.numel() - 1}")
    return cu_q.numel() - 1


def _check_backward_function(function: Any, score_mod: Any, aux: int) -> None:
    if function is not None:
        if score_mod is None:
            raise ValueError("score_mod_bwd is given, must be None without score_mod")
        takes = ("gradient", "score", "b", "h", "i", "j")
        from kernels_dsl.checks.functions import check_function  # here, since most calls have no functions

        check_function("score_mod_bwd", unwrapped(function), "aux", takes, aux)


def describe(arguments: AttentionArguments, dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES) -> AttentionCall:
    """Check a call with operands of one of `dtypes`. Raises TypeError or ValueError naming the argument."""
    q, k, v, layout, extras, names = (
        arguments.q,
        arguments.k,
        arguments.v,
        arguments.layout,
        arguments.extras,
        arguments.names,
    )
    causal, window, alignment, scale, softcap = arguments.options
    rank = 3 if layout == "thd" else 4
    table = None if extras.seqlens is None else extras.seqlens.table
    for name, x, modes in zip(names, (q, k, v), (rank, *[rank if table is None else 4] * 2)):
        _check_tensor(name, x, modes, dtypes)
    _check_shapes(q, k, v, layout, names)
    for name, x in extras.tensors().items():
        check_tensor(names[3] if name == "mask" else name, x)
    options.one_of("alignment", alignment, ALIGNMENTS)
    batch_mode, rows, head_mode, _ = MODES[layout]
    heads, dim = q.shape[head_mode], q.shape[-1]
    k_len, kv_heads = (k.shape[mode] for mode in ((rows, head_mode) if table is None else (1, 2)))
    if layout == "thd":
        assert extras.seqlens is not None
        batch = _check_seqlens(extras.seqlens, q.device)
        if table is not None:
            k_len = check_pages(k, v, table, extras.seqlens.k, extras.seqlens.used, batch)
    else:
        assert batch_mode is not None
        batch = q.shape[batch_mode]
    if scale is None:
        scale = 1.0 / math.sqrt(dim)
    scale, softcap = options.real("scale", scale, above=0), options.real("softcap", softcap, least=0)
    check_softcap(softcap)
    left, right = window_limits(causal, window)
    lengths = _lengths(q.shape[rows], k_len, extras)
    block = None if extras.blocks is None else block_sizes("blocks.block", extras.blocks.block)
    if extras.blocks is not None:
        _check_blocks(extras.blocks, batch, heads, lengths[0], q.device)
    for name, x in extras.tensors().items():
        if name.startswith("aux") and x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, must be on {q.device} like q")
        if name.startswith("aux") and x.dtype == torch.bool:
            raise TypeError(f"{name} is torch.bool, must be of numbers: view it as torch.uint8")
        if name.startswith("aux") and x.is_complex():
            raise TypeError(f"{name} is {x.dtype}, must be of real numbers")
    for i, x in enumerate(extras.aux):
        if not isinstance(x, torch.Tensor):
            options.number(f"aux[{i}]", x)
    score_mod, mask_mod = unwrapped(arguments.score_mod), unwrapped(arguments.mask_mod)
    coordinates = ("b", "h", "i", "j")
    functions = (("score_mod", score_mod, ("score", *coordinates)), ("mask_mod", mask_mod, coordinates))
    for name, function, takes in functions:
        if function is not None:
            from kernels_dsl.checks.functions import check_function

            check_function(name, function, "aux", takes, len(extras.aux))
    _check_backward_function(arguments.score_mod_bwd, score_mod, len(extras.aux))
    variant = AttentionVariant(
        right=right is not None,
        left=left is not None,
        top_left=alignment == "top_left" and (left, right) != (None, None),
        softcap=softcap > 0,
        sinks=check_sinks(extras.sinks, heads, q.device),
        mask=_check_mask(extras.mask, (batch, heads, *lengths), q.device, names),
        score_mod=score_mod,
        mask_mod=mask_mod,
    )
    return AttentionCall(
        layout, batch, heads, kv_heads, q_len=q.shape[rows], k_len=k_len,
        longest_q=_at_most(lengths[0], q.shape[rows]), longest_k=_at_most(lengths[1], k_len), dim=dim,
        dim_v=v.shape[-1], dtype=q.dtype, variant=variant, left=left or 0, right=right or 0,
        scale=float(scale), softcap=float(softcap) or 1.0,
        block=block, page=0 if table is None else k.shape[1],
    )  # fmt: skip
