"""Functions of a rank in the tests of context-parallel attention."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask

import kernels_dsl
from kernels_dsl.distributed import context_parallel_attention, shard_sequence, unshard_sequence
from kernels_dsl.distributed.attention import METHODS
from kernels_dsl.distributed.sequence import ORDERS
from kernels_dsl.ops.attention.arguments import NO_EXTRAS
from kernels_dsl.ops.attention.backward import Forward
from kernels_dsl.ops.serving.merge_states import merge_states
from kernels_dsl.sparse.block_lists import BlockLists, from_block_mask
from tests.distributed import models
from tests.distributed.ranks import GROUP_TIMEOUT_S, Rank

WINDOWS = {"causal": (None, 0), "full": (None, None), "window": (9, 4), "narrow": (3, 0)}


class Case(NamedTuple):
    """One attention over all ranks."""

    method: str
    order: str
    window: tuple[int | None, int | None]
    rows: int = 32
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    with_lse: bool = True
    starts: tuple[int, ...] | None = None
    mask: models.Mask = models.Mask()
    """All that hides keys beside the window and the borders of sequences."""

    @property
    def packed(self) -> bool:
        """Sequences are packed: tensors have no batch."""
        return self.starts is not None


class Tensors(NamedTuple):
    """Inputs of the whole sequence, and the gradients of the results."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    d_lse: torch.Tensor


def _tensors(case: Case) -> Tensors:
    generator, batch = torch.Generator().manual_seed(hash((case.rows, case.heads))), 2 - case.packed

    def new(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, case.rows, heads, dim, generator=generator).bfloat16()

    q, k, v = new(case.heads, case.dim), new(case.kv_heads, case.dim), new(case.kv_heads, 8)
    d_lse = torch.randn(batch, case.heads, case.rows, generator=generator)
    return Tensors(q, k, v, new(case.heads, 8), d_lse if case.with_lse else torch.zeros_like(d_lse))


def _one_process(case: Case, whole: Tensors, gradients: bool) -> dict[str, torch.Tensor]:
    """The same results of one launch, in the dtype of the inputs: what ranks are measured by."""
    mask = case.mask._replace(window=case.window, starts=case.starts)
    if gradients:
        leaves = [x.double().requires_grad_() for x in whole[:3]]
        out, lse = models.exact(*leaves, mask)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # which has no derivative
        torch.autograd.backward((out, lse), (whole.do.double(), whole.d_lse.double()))
        found = [x.grad for x in leaves]
    else:
        q, k, v = whole[:3]
        out, lse = models.exact(q, k, v, mask)
        out, lse = out.to(q.dtype), lse.float()
        forward = Forward(q, k, v, out, lse, NO_EXTRAS)
        gradient = models.gradients_by_formula(forward, whole.do, whole.d_lse, mask, None)
        found = [gradient.q, gradient.k, gradient.v]
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *found)))


def check(case: Case) -> None:
    """Results and gradients of all ranks are as near to float64 as those of one process, times two."""
    whole, rows = _tensors(case), 1 - case.packed
    given = Tensors(*(x[0] for x in whole)) if case.packed else whole
    own = [shard_sequence(x, dim=rows, order=case.order).requires_grad_() for x in given[:3]]
    result = context_parallel_attention(
        *own, method=case.method, order=case.order, window=case.window, return_lse=case.with_lse,
        cu_seqlens=case.starts, blocks=case.mask.blocks, mask_mod=case.mask.mask_mod, aux=case.mask.aux,
    )  # fmt: skip
    grads = ((given.do, rows), (given.d_lse, rows + 1))
    do, d_lse = (shard_sequence(x, dim=dim, order=case.order) for x, dim in grads)
    if case.with_lse:
        torch.autograd.backward(result, (do, d_lse))
    else:
        result.backward(do)
    named = dict(zip(("dq", "dk", "dv"), (x.grad for x in own)))
    assert all(x is not None and x.dtype == torch.bfloat16 for x in named.values())
    named["out"] = result[0] if case.with_lse else result
    if case.with_lse:
        named["lse"] = result[1].masked_fill(result[1] == -torch.inf, 0.0)
    expected, peer = (_one_process(case, whole, gradients) for gradients in (True, False))
    for name, mine in named.items():
        mine = mine.detach()[None] if case.packed else mine.detach()
        mine = unshard_sequence(mine, dim=1 + (name == "lse"), order=case.order)
        largest = expected[name].abs().max()
        error, allowed = (float((x - expected[name]).abs().max() / largest) for x in (mine, peer[name]))
        assert error <= 2 * allowed + 2.0**-8, (
            f"{case}: {name} has an error of {error}, one process {allowed}"
        )


def prepare_matrix() -> None:
    """Compiles the merge of results, for the ranks of this function and of those that run after it."""
    for dtype, out_dtype in itertools.product((torch.bfloat16, torch.float32), repeat=2):
        out = torch.zeros(2, 1, 16, 4, 8, dtype=dtype)
        merge_states(out, torch.zeros(2, 1, 4, 16).mT, out_dtype=out_dtype)
        merge_states(out, torch.zeros(2, 1, 16, 4), out_dtype=out_dtype)


def matrix(rank: Rank) -> None:
    """All methods, orders and masks, launches by formula."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        for method, order, window in itertools.product(METHODS, ORDERS, WINDOWS.values()):
            check(Case(method, order, window, rows=16 * rank.size))
        for method in METHODS:
            check(Case(method, "zigzag", (None, 0), rows=16 * rank.size, with_lse=False))
        check(Case("ulysses", "contiguous", (None, 0), rows=16 * rank.size, kv_heads=1))
        check(Case("ring", "contiguous", (None, 0), rows=8 * rank.size, heads=3, kv_heads=3))


def packed_sequences(size: int) -> list[tuple[int, ...]]:
    """Starts over 16 rows a rank: inside of chunks, at their borders, over several, an empty one, a rest."""
    rows = 16 * size
    return [(0, 3, rows // 2 + 5, rows), (0, 4, 8, 8, 21, rows - 9), (0, rows)]


def packed(rank: Rank) -> None:
    """Packed sequences with all methods and orders, launches by formula."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        kinds = zip(("causal", "window", "full"), packed_sequences(rank.size))
        for method, order, (window, starts) in itertools.product(METHODS, ORDERS, kinds):
            check(Case(method, order, WINDOWS[window], rows=16 * rank.size, starts=starts))
        case = Case("ulysses", "zigzag", (None, 0), with_lse=False, starts=packed_sequences(rank.size)[1])
        check(case._replace(rows=16 * rank.size))
        tensors = [x[0] for x in _small()]
        for message, starts, options in (
            ("cu_seqlens ends with 99, must be at most", (0, 99), {}),
            (r"cu_seqlens\[2\] is 2, must be at least 5", (0, 5, 2), {}),
            ("cu_seqlens starts with 1, must start with 0", torch.tensor([1, 4]), {}),
            ("cu_seqlens is torch.float32", torch.ones(2), {}),
            ("q has 7 rows, must be even", (0, 7), {"order": "zigzag"}),
        ):
            odd = [x[:7] for x in tensors] if options else tensors
            with pytest.raises(ValueError, match=message):
                context_parallel_attention(*odd, cu_seqlens=starts, **options)
        with pytest.raises(ValueError, match=r"q has shape .* must have 3 modes beside cu_seqlens"):
            context_parallel_attention(*_small(), cu_seqlens=(0, 8))


def packed_matrix(rank: Rank) -> None:
    """Packed sequences with all methods, orders and masks, launches by formula."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        every = itertools.product(METHODS, ORDERS, WINDOWS.values(), packed_sequences(rank.size))
        for method, order, window, starts in every:
            check(Case(method, order, window, rows=16 * rank.size, starts=starts))


def _lists(generator: torch.Generator, lead: tuple[int, int], rows: int, full: bool = True) -> BlockLists:
    """Random lists of blocks of 64 rows, with garbage after the count."""
    blocks = rows // 64
    chosen = torch.rand(*lead, blocks, blocks, generator=generator)
    pairs: list[torch.Tensor] = []
    for picked in (chosen < 0.4, chosen > 0.8)[: 1 + full]:
        order = picked.logical_not().to(torch.uint8).argsort(dim=-1, stable=True).int()
        pairs += [
            picked.sum(-1, dtype=torch.int32),
            torch.where(picked.sort(-1, descending=True)[0], order, 77),
        ]
    return BlockLists(*pairs, block=(64, 64))


def _same_third(b, h, i, j, thirds):
    return (thirds[i] == thirds[j]) | (j < 7 + h)


def _masks(rows: int, heads: int) -> list[Case]:
    """Cases of one batch: lists alone, under a causal mask, a window and a function; torch's; a function."""
    generator = torch.Generator().manual_seed(5)
    by_thirds = models.Mask(mask_mod=_same_third, aux=((torch.arange(rows) * 3 // rows).int(),))
    flex = create_block_mask(lambda b, h, i, j: i >= j, 1, None, rows, rows, device="cpu", BLOCK_SIZE=64)
    of_torch = models.Mask(blocks=from_block_mask(flex), mask_mod=flex.mask_mod)
    kinds = [
        ("full", models.Mask(blocks=_lists(generator, (1, heads), rows))),
        ("causal", models.Mask(blocks=_lists(generator, (2, 1), rows, full=False))),
        ("window", by_thirds._replace(blocks=_lists(generator, (1, heads), rows))),
        ("narrow", models.Mask(blocks=_lists(generator, (1, 1), rows))),
        ("full", of_torch),
        ("window", by_thirds),
    ]
    return [Case("ring", "contiguous", WINDOWS[name], rows, heads, 1, 8, mask=mask) for name, mask in kinds]


def masked(rank: Rank, every: bool = False) -> None:
    """Lists of blocks and mask functions with all methods and orders, launches by formula."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        ways = list(itertools.product(METHODS, ORDERS))
        for place, case in enumerate(_masks(128 * rank.size, rank.size)):
            for way in ways if every else (ways[place], ways[(place + 3) % len(ways)]):
                check(case._replace(method=way[0], order=way[1]))


def refused_masks(rank: Rank) -> None:
    """Masks that ranks cannot share are refused before any communication; other lists name the rank."""
    generator = torch.Generator().manual_seed(1)
    lists, q = _lists(generator, (1, 1), 64 * rank.size), torch.ones(1, 64, 2, 16).bfloat16()
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        with kernels_dsl.checked():
            last = rank.size - 1
            other = replace(lists, counts=lists.counts + 1) if rank.rank == last else lists
            with pytest.raises(
                ValueError, match=rf"blocks.counts is .* on rank {last} of the group, must be"
            ):
                context_parallel_attention(q, q, q, blocks=other)
            with pytest.raises(ValueError, match="blocks is None on rank 1 of the group, must be BlockLists"):
                context_parallel_attention(q, q, q, blocks=None if rank.rank else lists)
        if rank.rank:
            return
        packed = [x[0] for x in (q, q, q)]
        for message, tensors, options in (
            ("q has 32 rows in a rank's chunk, must be a multiple of 64", (q, q, q), {"order": "zigzag"}),
            ("blocks.counts has shape", (q[:, :32], q, q), {}),
            ("aux is given, must be empty without mask_mod", (q, q, q), {"blocks": None, "aux": (q,)}),
            ("blocks is given beside cu_seqlens", packed, {"cu_seqlens": (0, 64)}),
        ):
            with pytest.raises(ValueError, match=message):
                context_parallel_attention(*tensors, **{"blocks": lists, **options})
        wants = q.clone().requires_grad_()
        with pytest.raises(
            TypeError, match=r'aux\[0\] is a int, must be a torch.Tensor for gradients with "u'
        ):
            context_parallel_attention(wants, q, q, method="ulysses", mask_mod=_same_third, aux=(3,))
        with pytest.raises(RuntimeError, match="q requires grad, but"):
            small = BlockLists(torch.ones(1, 1, 4).int(), torch.zeros(1, 1, 4, 1).int(), block=(32, 32))
            context_parallel_attention(wants, q, q, blocks=small)


def every_masked(rank: Rank) -> None:
    """All of them."""
    masked(rank, every=True)


def emulated_masked(rank: Rank) -> None:
    """Lists of blocks, windows and a mask function by kernels in the emulator."""
    for case, method in zip(_masks(64 * rank.size, 2)[2:4], ("ring", "all_gather")):
        check(case._replace(method=method))


def prepare_emulated_packed() -> None:
    """Compiles once for all ranks what these launch."""
    q, k, v = (torch.zeros(8, n, 16).bfloat16().requires_grad_() for n in (2, 1, 1))
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    keywords = {"causal": True, "alignment": "top_left", "return_lse": True}
    out, lse = kernels_dsl.attention_varlen(q, k, v, starts, starts, 5, **keywords)
    torch.autograd.backward((out, lse), (out, lse))


def emulated_packed(rank: Rank) -> None:
    """Packed sequences by kernels in the emulator, of which one launch does all: ranks share none."""
    rows = 24
    starts = [0, 5, *range(rows, rows * rank.size + 1, rows)]
    case = Case("ring", "contiguous", (None, 0), rows * rank.size, 2, 1, starts=tuple(starts))
    check(case._replace(starts=(*starts[:-1], starts[-1] - 3)))


def prepare_emulated() -> None:
    """Compiles once for all ranks what these launch."""
    q, k, v = (torch.zeros(1, 8, n, 16).bfloat16().requires_grad_() for n in (2, 1, 1))
    for causal in (True, False):
        out, lse = kernels_dsl.attention(q, k, v, causal=causal, alignment="top_left", return_lse=True)
        torch.autograd.backward((out, lse), (out, lse))


def emulated(rank: Rank) -> None:
    """The same bits of two calls by kernels in the emulator, and the right ones."""
    case = Case("ring", "zigzag", (None, 0), rows=48 * rank.size, heads=2, kv_heads=1)
    found = []
    for _ in range(2):
        own = [shard_sequence(x[:1], order="zigzag").requires_grad_() for x in _emulated_tensors(case)]
        out = context_parallel_attention(*own, order="zigzag", causal=True)
        out.backward(torch.ones_like(out))
        found.append([out.detach(), *(x.grad for x in own)])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    leaves = [x[:1].double().requires_grad_() for x in _emulated_tensors(case)]
    expected = models.exact(*leaves, models.Mask(case.window)).out
    expected.backward(torch.ones_like(expected))
    for mine, reference in zip(found[0], (expected.detach(), *(x.grad for x in leaves))):
        mine = unshard_sequence(mine, order="zigzag")
        assert (mine.double() - reference).abs().max() < 2.0**-7 * reference.abs().max()


def _emulated_tensors(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(1, case.rows, heads, 16) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def emulated_matrix(rank: Rank) -> None:
    """All methods, orders and masks by kernels in the emulator."""
    for method, order, window in itertools.product(METHODS, ORDERS, WINDOWS.values()):
        check(Case(method, order, window, rows=48 * rank.size))


def _small(rows: int = 8, heads: int = 2) -> list[torch.Tensor]:
    return [torch.ones(1, rows, heads, 16).bfloat16() for _ in range(3)]


def disagreeing(rank: Rank) -> None:
    """Ranks that say different things get an error that names the rank, and go on afterwards."""
    with pytest.MonkeyPatch.context() as monkeypatch, kernels_dsl.checked():
        models.use(monkeypatch)
        last = rank.size - 1
        rows = 8 + 8 * (rank.rank == last)
        with pytest.raises(ValueError, match=rf"q's shape is \(1, 16, 2, 16\) on rank {last} of the group"):
            context_parallel_attention(*_small(rows))
        with pytest.raises(ValueError, match=f"method is ring on rank {last} of the group, must be ulysses"):
            context_parallel_attention(*_small(), method="ring" if rank.rank == last else "ulysses")
        with torch.set_grad_enabled(True):
            q, k, v = _small()
            k.requires_grad_(rank.rank == 0)
            with pytest.raises(ValueError, match=r"k.requires_grad is False on rank 1 of the group"):
                context_parallel_attention(q, k, v)
        wrong = "window has 3 entries" if rank.rank == 0 else "rank 0 of the group has an error: window has 3"
        with pytest.raises(ValueError, match=wrong):
            context_parallel_attention(*_small(), window=(1, 2, 3) if rank.rank == 0 else (1, 2))
        packed, rows = [x[0] for x in _small()], 8 * rank.size
        starts = (0, 1, 2, 3, 4, 5 + (rank.rank == last), rows)
        with pytest.raises(ValueError, match=rf"cu_seqlens\[5\] is 6 on rank {last} of the group, must be 5"):
            context_parallel_attention(*packed, cu_seqlens=starts)
        longer = starts[:5] + (6,) * (1 + (rank.rank == last)) + (rows,)
        with pytest.raises(ValueError, match=rf"the length of cu_seqlens is 8 on rank {last} of the group"):
            context_parallel_attention(*packed, cu_seqlens=longer)
        with pytest.raises(ValueError, match=rf"x's shape is \(2, 9\) on rank {last} of the group, must be"):
            unshard_sequence(torch.ones(2, 8 + (rank.rank == last)))
        with pytest.raises(
            ValueError, match=rf"the call is unshard_sequence on rank {last} of the group, must"
        ):
            if rank.rank == last:
                unshard_sequence(torch.ones(2, 8))
            else:
                context_parallel_attention(*_small())
        assert context_parallel_attention(*_small()).shape == (1, 8, 2, 16)


def refused(rank: Rank) -> None:
    """Wrong arguments are refused before any communication: no other rank takes part."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        context_parallel_attention(*_small())
        if rank.rank:
            return
        for message, tensors, options in (
            ("method is 'rings', must be 'ring', 'all_gather' or 'ulysses'", _small(), {"method": "rings"}),
            ("q has 7 rows, must be even", _small(7), {"order": "zigzag"}),
            ("q has 3 heads, must have a multiple of 2", _small(heads=3), {"method": "ulysses"}),
            ("k has 16 rows, must have 8 like q", [*_small()[:1], *_small(16)[1:]], {"causal": True}),
            ("scale is -1", _small(), {"scale": -1.0}),
        ):
            with pytest.raises(ValueError, match=message):
                context_parallel_attention(*tensors, **options)
        with pytest.raises(ValueError, match="x has 9 rows in mode 1, must be a multiple of 4 for 2 ranks"):
            shard_sequence(torch.ones(1, 9), order="zigzag")
        with pytest.raises(ValueError, match="x requires grad, must not"):
            unshard_sequence(torch.ones(1, 8, requires_grad=True))


def killed(rank: Rank) -> None:
    """A rank that dies ends the others' calls with an error within the group's time limit."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        context_parallel_attention(*_small())
        if rank.rank:
            os._exit(0)
        start = time.monotonic()
        with pytest.raises((RuntimeError, dist.DistError)):
            for _ in range(3):
                context_parallel_attention(*_small())
        assert time.monotonic() - start < GROUP_TIMEOUT_S
        os._exit(0)


def slow(rank: Rank) -> None:
    """A rank that does not come in time is an error too, in checked mode one that says who waited."""
    groups = [dist.new_group(timeout=timedelta(seconds=2)) for _ in range(2)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        for group in groups:
            context_parallel_attention(*_small(), group)
        if rank.rank:
            time.sleep(6)
            os._exit(0)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            context_parallel_attention(*_small(), groups[0])
        waited = "rank 0 of the group waited for the arguments of the others"
        with kernels_dsl.checked(), pytest.raises(RuntimeError, match=waited):
            context_parallel_attention(*_small(), groups[1])
        assert time.monotonic() - start < 6
        os._exit(0)
