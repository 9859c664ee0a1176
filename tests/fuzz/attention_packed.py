"""Cases of `attention_varlen`: empty sequences, rows of no sequence, keys that do not count and hold NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

import kernels_dsl
from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.sparse.block_lists import BlockLists
from tests.fuzz import attention_configs as configs
from tests.fuzz import attention_contents as contents
from tests.fuzz import attention_lists as block_lists
from tests.fuzz import attention_options as masks
from tests.fuzz.attention_contents import Contents, Layouts, Operands
from tests.fuzz.attention_dense import DTYPES, config_features, head_dims, heads_of
from tests.fuzz.attention_lists import ListsOf
from tests.fuzz.attention_options import Extents, Options, Part, Piece
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations

LARGE_LENGTHS = (0, 0, 1, 3, 16, 63, 64, 77, 127, 128, 129, 200, 255, 500, 700, 1024)
SHORT_LENGTHS = (0, 1, 2, 5, 16, 33, 64, 65)
SMALL_LENGTHS = (0, 0, 1, 3, 16, 33, 64, 65)
_MOST_SCORES = 1 << 23
_MOST_SMALL_TILES = 8
NAMES = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "mask",
         "sinks", "blocks", "block", "scale", "softcap", "window", "score_mod", "mask_mod", "aux", "out",
         "config", "family")  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """Sequences of a call: queries, keys, and keys that count of each. In generation 1 they come in reverse.

    before, after: rows of q that are of no sequence; after_k: rows of k. `used`: whether the call gets
    `seqused_k`. more_q, more_k: by how much the longest lengths that the call is told are too large.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    counted: tuple[int, ...]
    used: bool
    before: int
    after: int
    after_k: int
    more_q: int
    more_k: int

    def turned(self, generation: int) -> Lengths:
        """The lengths of a generation."""
        if generation == 0:
            return self
        return replace(self, q=self.q[::-1], k=self.k[::-1], counted=self.counted[::-1])

    @property
    def max_q(self) -> int:
        """The lengths that the call is told."""
        return max(*self.q, 0, 0) + self.more_q

    @property
    def max_k(self) -> int:
        """The same for keys."""
        return max(*self.k, 0, 0) + self.more_k

    @property
    def q_rows(self) -> int:
        """Rows of q."""
        return self.before + sum(self.q) + self.after

    @property
    def covered(self) -> slice:
        """Rows of q that are of a sequence."""
        return slice(self.before, self.before + sum(self.q))

    @property
    def k_rows(self) -> int:
        """Rows of k."""
        return sum(self.k) + self.after_k

    def starts_q(self) -> list[int]:
        """Starts of the sequences in q."""
        return list(accumulate(self.q, initial=self.before))

    def starts_k(self) -> list[int]:
        """The same in k."""
        return list(accumulate(self.k, initial=0))

    def keep(self) -> torch.Tensor:
        """The rows of k that count."""
        keep = torch.zeros(self.k_rows, dtype=torch.bool)
        for start, count in zip(self.starts_k(), self.counted):
            keep[start : start + count] = True
        return keep

    def targets(self, heads: int, seed: int) -> torch.Tensor:
        """For each query one of its sequence's keys: (1, rows, heads)."""
        found = torch.zeros((1, self.q_rows, heads), dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        for first, rows, start, count in zip(self.starts_q(), self.q, self.starts_k(), self.counted):
            if count:
                own = torch.randint(0, count, (rows, heads), generator=generator)
                found[0, first : first + rows] = start + own
        return found


@dataclass(frozen=True)
class Tensors:
    """A call's index tensors."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    used: torch.Tensor | None


@dataclass(frozen=True)
class Laid:
    """A call's inputs. `options`: its keywords but for lists, out and configuration."""

    rows: Operands
    index: Tensors
    given: masks.Given
    lists: block_lists.Made | None
    options: dict[str, Any]


@dataclass(frozen=True)
class PackedCase:
    """One call. `sizes`: with the longest lengths that the call is told. `checked` and `lookup` as in
    `DenseCase`. `with_max_k`: whether the call is told the longest keys where it need not be."""

    draw: Draw = field(repr=False)
    sizes: Extents
    lengths: Lengths
    dtype: torch.dtype
    layouts: Layouts
    options: Options
    lists: ListsOf | None
    return_lse: bool
    config: AttentionConfig | None
    family: str | None
    with_max_k: bool
    checked: bool
    lookup: bool
    mode: Mode

    def __str__(self) -> str:
        return "packed " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        lengths, names = self.lengths, ["attention_varlen", f"mode {self.mode.value}"]
        names += [*self.options.features, *self.layouts.features]
        names += self.lists.features if self.lists is not None else []
        names += config_features(self.config, self.family)
        names += ["seqused_k"] if lengths.used else []
        names += ["rows of no sequence"] if lengths.before + lengths.after else []
        names += ["longest of 0"] if self.sizes.q_len == 0 else []
        names += ["no sequences"] if not lengths.q else []
        names += ["one head"] if self.sizes.heads == 1 else []
        names += ["groups of heads"] if self.sizes.group > 1 else []
        names += ["checked"] if self.checked else []
        names += ["log-sum-exp"] if self.return_lse else []
        names += ["lookup"] if self.lookup else []
        return tuple(names)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        laid, operations = self.lay_out(arena, settings), Operations(settings)
        out = None
        if self.layouts.out is not None:
            shape = (self.lengths.q_rows, self.sizes.heads, self.sizes.dim_v)
            out = arena.output("out", shape, self.dtype, self.layouts.out, self._written)
        options = {**laid.options, "return_lse": self.return_lse, "out": out}
        options.update(config=self.config, family=self.family)
        lists = laid.lists
        blocks = {} if lists is None else {"blocks": lists.make()}
        return Call(
            run=self._run(operations, laid.rows, options, lists),
            check=lambda results: self._check(results, laid),
            arguments=NAMES,
            supports=None
            if self.mode is Mode.GRAPH
            else lambda: operations.attention_supports(*laid.rows, layout="thd", **options, **blocks),
            may_refuse=self.config is not None,
        )

    def lay_out(self, arena: Arena, settings: Settings) -> Laid:
        """The inputs in `arena`."""
        seeds = Draw("packed values", self.draw.number, self.draw.settings)
        sizes, lengths, device = self.sizes, self.lengths, settings.device
        made = Contents(sizes, 1, lengths.q_rows, lengths.k_rows, self.dtype, self.lookup, device,
                        seeds.value_seed())  # fmt: skip
        storage = contents.storage_for(self.layouts.storage, sizes, lengths.q_rows == lengths.k_rows)
        values = [self._values(made, generation) for generation in (0, 1)]
        rows = contents.lay_out(arena, self.layouts, storage, values, packed=True)
        index = self._index_tensors(arena)
        given = masks.give(self.options, sizes, arena, seeds)
        lists = None
        if self.lists is not None:
            lists = block_lists.lay_out(self.lists, given, sizes, arena, seeds)
        options = {**given.keywords(), "seqused_k": index.used, "max_seqlen_q": sizes.q_len}
        if self.with_max_k or given.mask is not None:
            options["max_seqlen_k"] = sizes.k_len
        options.update(cu_seqlens_q=index.cu_q, cu_seqlens_k=index.cu_k)
        return Laid(rows, index, given, lists, options)

    def _written(self) -> torch.Tensor:
        mask = torch.zeros((self.lengths.q_rows, self.sizes.heads, self.sizes.dim_v), dtype=torch.bool)
        mask[self.lengths.covered] = True
        return mask

    def _values(self, made: Contents, generation: int) -> Operands:
        """Contents of a generation, with NaN in rows of K and V that no query may see."""
        lengths = self.lengths.turned(generation)
        q, k, v = made.values(
            generation, lengths.targets(self.sizes.heads, made.seed) if self.lookup else None
        )
        lost = (~lengths.keep()).to(k.device)
        return Operands(q, *(x.masked_fill(lost[None, :, None, None], torch.nan) for x in (k, v)))

    def _index_tensors(self, arena: Arena) -> Tensors:
        def tensor(name: str, numbers: Callable[[Lengths], Any]) -> torch.Tensor:
            fill = lambda g: torch.tensor(list(numbers(self.lengths.turned(g))), dtype=torch.int32)  # noqa: E731
            return arena.input(name, fill)

        return Tensors(
            tensor("cu_seqlens_q", Lengths.starts_q),
            tensor("cu_seqlens_k", Lengths.starts_k),
            tensor("seqused_k", lambda lengths: lengths.counted) if self.lengths.used else None,
        )

    def _run(
        self, operations: Operations, rows: Operands, options: dict[str, Any], lists: block_lists.Made | None
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Results are those of the rows that are of a sequence: others hold whatever was there."""
        lengths, sizes = self.lengths, self.sizes

        def run() -> tuple[torch.Tensor, ...]:
            blocks = {} if lists is None else {"blocks": lists.make()}
            with kernels_dsl.checked() if self.checked else nullcontext():
                found = operations.attention_varlen(*rows, **options, **blocks)
            out, lse = found if self.return_lse else (found, None)
            assert tuple(out.shape) == (lengths.q_rows, sizes.heads, sizes.dim_v) and out.dtype == self.dtype
            assert options["out"] is None or out is options["out"], "the result is not `out`"
            results = [out[lengths.covered]]
            if lse is not None:
                assert tuple(lse.shape) == (sizes.heads, lengths.q_rows), lse.shape
                results.append(lse[:, lengths.covered])
            compared = lists is not None and lists.compared
            return (*results, *(block_lists.canonical(blocks["blocks"]) if compared else ()))

        return run

    def _check(self, results: tuple[torch.Tensor, ...], laid: Laid) -> None:
        out, *rest = results
        lse = rest.pop(0) if self.return_lse else None
        lists = None if laid.lists is None else block_lists.check_built(tuple(rest), laid.lists)
        before, rows = self.lengths.before, laid.rows
        for queries, keys, part, spread in self.sequences(laid, lists):
            if part.q_len == 0:
                continue
            found = slice(queries.start - before, queries.stop - before)
            own = Operands(rows.q[None, queries], *(x[None, keys] for x in rows[1:]))
            rules = masks.masking(laid.given, part, spread)
            try:
                own_lse = None if lse is None else lse[None, :, found]
                contents.check(out[None, found], own_lse, own, rules, self.options.scale)
            except AssertionError as error:
                text = f"sequence {part.sequence} of {part.q_len} queries and {part.k_len} keys"
                raise AssertionError(text) from error

    def sequences(self, laid: Laid, lists: BlockLists | None) -> Iterator[Piece]:
        """The sequences of what the index tensors hold now, with the part of `lists` that each has."""
        spread = None
        if lists is not None:
            spread = block_lists.spread(lists, self.sizes, laid.rows.q.device)
        index = laid.index
        starts_q, starts_k = index.cu_q.tolist(), index.cu_k.tolist()
        counts = [end - start for start, end in pairwise(starts_k)]
        counts = counts if index.used is None else index.used.tolist()
        for n, count in enumerate(counts):
            queries = slice(starts_q[n], starts_q[n + 1])
            part = Part(1, self.sizes.heads, queries.stop - queries.start, count, n)
            own = None if spread is None else of_sequence(spread, part)
            yield Piece(queries, slice(starts_k[n], starts_k[n] + count), part, own)


def of_sequence(spread: block_lists.Lists, part: Part) -> block_lists.Lists:
    """The part of (B or 1, H or 1, Sq, Sk) that one sequence has."""
    n = part.sequence or 0
    first, second = (
        (x[n : n + 1] if x.shape[0] > 1 else x)[:, :, : part.q_len, : part.k_len] for x in spread
    )
    return first, second


def _draw_lengths(draw: Draw, heads: int) -> Lengths:
    data, small = draw.data, draw.settings.small
    short = not small and draw.kernel.random() < 0.25
    pool = SMALL_LENGTHS if small else SHORT_LENGTHS if short else LARGE_LENGTHS
    count = data.choice((0, 1, 1, 2, 3) if small else (20, 40, 90) if short else (0, 1, 2, 3, 4, 6, 9))
    alike = data.random() < 0.3
    q = [data.choice(pool) for _ in range(count)]
    q = [0] * count if data.random() < 0.06 else q
    k = q if alike else [data.choice(pool) for _ in range(count)]
    most = _MOST_SMALL_TILES * 4096 if small else _MOST_SCORES
    while heads * sum((i + 64) * (j + 64) if small else i * j for i, j in zip(q, k)) > most and len(q) > 1:
        q, k = q[1:], k[1:]
    used = draw.kernel.random() < 0.5
    counted = [data.choice((n, n, n // 2, data.randint(0, n), 0)) for n in k] if used else k
    more_q = data.choice((0, 0, 1, 5 if small else 70)) if any(q) else data.choice((0, 0, 0, 5))
    return Lengths(
        tuple(q), tuple(k), tuple(counted), used, before=5 if data.random() < 0.08 else 0,
        after=data.choice((0, 0, 0, 7, 130)), after_k=data.choice((0, 0, 9, 70)), more_q=more_q,
        more_k=data.choice((0, 0, 3, 10 if small else 100)),
    )  # fmt: skip


def draw_packed(draw: Draw, with_config: bool = True) -> PackedCase:
    """A case of `attention_varlen`, perhaps with a forced configuration."""
    pick = draw.kernel
    config = configs.forced(draw) if with_config else None
    family = pick.choice((None, *configs.families(draw.arch())))
    heads, group = heads_of(draw)
    dim, dim_v = head_dims(draw, config)
    wide = max(dim, dim_v) // 64 if draw.settings.small and max(dim, dim_v) > 64 else 1
    lengths = _draw_lengths(draw, heads * group * wide)
    options = masks.draw_options(draw)
    lists = block_lists.draw_lists(draw, block_lists.PACKED_KINDS, config, 0.2)
    if config is not None:
        family = pick.choice((None, config.family))
        packs = configs.packed(draw, config, group)
        config = packs if options.packable and lists is None else config
    lookup = draw.data.random() < 0.4
    if lookup:
        options = replace(options, scale=contents.LOOKUP_SCALE)
    mode = draw.mode()
    checked = draw.data.random() < 0.1 and mode in (Mode.PLAIN, Mode.STREAM) and not lengths.before
    layouts = contents.draw_layouts(draw, 3, with_out=0.6)
    if checked:  # it asks for `out` where not all of its rows are written
        lengths = replace(lengths, more_k=0, after=lengths.after if layouts.out is not None else 0)
    return PackedCase(
        draw, Extents(len(lengths.q), lengths.max_q, lengths.max_k, heads, group, dim, dim_v), lengths,
        pick.choice(DTYPES), layouts, options, lists,
        return_lse=pick.random() < 0.5, config=config, family=family, with_max_k=draw.data.random() < 0.5,
        checked=checked, lookup=lookup, mode=mode,
    )  # fmt: skip
