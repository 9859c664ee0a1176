"""Products with the communication that they need: all-gather before, reduce-scatter after.

The two halves of a layer under tensor and sequence parallelism. One collective and one product; or, with
`overlap`, each rank sends its rows, or its share of another's sum, straight to the rank that needs them,
while the product of the rows at hand runs: of n steps n - 1 communicate. The gradient of either is the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernels_dsl.checks.eager_path import PLAIN_TYPES, check_tensor, refuse_forward_mode
from kernels_dsl.checks.options import boolean, integer
from kernels_dsl.distributed.agreement import agree
from kernels_dsl.distributed.exchange import Exchange, Message
from kernels_dsl.distributed.groups import Ranks, ranks_of
from kernels_dsl.ops.gemm.gemm import gemm, supports
from kernels_dsl.ops.sm_margin import sm_margin as margin_of
from lowering.records import frozen

PARTIAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def all_gather_gemm(
    x: torch.Tensor, weight: torch.Tensor, group: Any = None, *, overlap: bool = False, sm_margin: int = 0
) -> torch.Tensor:
    """(rows of all ranks, in their order) @ weight, of which each rank has the rows x.

    x: (M / ranks, K), of the same shape on all ranks. weight: (K, N), this rank's own, such as its columns of
    a column-wise layer: a linear layer's weight is given as `weight.mT`. group: a process group, a device
    mesh of one dimension, or None for all ranks. overlap: rows travel while those at hand are multiplied, as
    many products as ranks; on two H100s slower than one collective and one product. sm_margin: SMs that
    products leave to communication.

    Returns (M, N), `gemm` of the gathered rows; with `overlap` bit for bit where its tiles are those of so
    many rows (`batch_invariant`). Differentiable: x's gradient is summed over the ranks in float32, in a
    fixed order.

    TypeError and ValueError before any communication. Ranks that disagree: as in
    `context_parallel_attention`.
    """
    call = _call("all_gather_gemm", (x, weight), group, torch.float32, overlap, sm_margin)
    return _AllGatherGemm.apply(call, x, weight)


def gemm_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: Any = None,
    *,
    partial_dtype: torch.dtype = torch.float32,
    overlap: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """This rank's rows of the sum of x @ weight over the ranks.

    x: (M, K), weight: (K, N), this rank's columns of x and rows of the weight, of the same shapes on all
    ranks; M a multiple of their number. partial_dtype: of what ranks send each other. float32 rounds once, at
    the end; x's own halves the bytes and rounds each share, the sums stay float32. The rest: as in
    `all_gather_gemm`.

    Returns (M / ranks, N) in x's dtype. Shares are added in a fixed order: the same call gives the same bits.
    Differentiable. Until it returns a rank holds the shares that it sends and those that it gets: twice M · N
    numbers of partial_dtype.
    """
    call = _call("gemm_reduce_scatter", (x, weight), group, partial_dtype, overlap, sm_margin)
    return _GemmReduceScatter.apply(call, x, weight)


@frozen
class _Call:
    """A call without its tensors."""

    ranks: Ranks
    partial_dtype: torch.dtype
    overlap: bool
    sm_margin: int


class _Shard(NamedTuple):
    """Rows, and their place among those of all ranks."""

    rows: torch.Tensor
    place: slice


def _call(
    name: str, tensors: tuple[Any, Any], group: Any, partial_dtype: Any, overlap: Any, sm_margin: Any
) -> _Call:
    """The checked call. All ranks learn of an error of one's."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{name} runs outside torch.compile only: wrap the call in torch.compiler.disable")
    ranks, (x, weight) = ranks_of(group), tensors
    try:
        overlap, sm_margin = boolean("overlap", overlap), integer("sm_margin", sm_margin, least=0)
        if partial_dtype not in PARTIAL_DTYPES:
            known = ", ".join(map(str, PARTIAL_DTYPES))
            raise TypeError(f"partial_dtype is {partial_dtype!r}, must be one of {known}")
        _check(name, x, weight, ranks)
    except (TypeError, ValueError, RuntimeError) as error:
        agree(ranks, dict, error)
        raise
    said: dict[str, Any] = {"the call": name, "x's shape": tuple(x.shape), "x's dtype": x.dtype}
    said["overlap"] = overlap
    said["x.requires_grad, weight.requires_grad"] = _asks(x, weight)
    if name == "gemm_reduce_scatter":
        said |= {"weight's shape": tuple(weight.shape), "partial_dtype": partial_dtype}
    agree(ranks, lambda: said)
    return _Call(ranks, partial_dtype, overlap, sm_margin)


def _asks(*tensors: torch.Tensor) -> tuple[bool, ...]:
    return tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors)


def _check(name: str, x: Any, weight: Any, ranks: Ranks) -> None:
    for called, tensor in (("x", x), ("weight", weight)):
        check_tensor(called, tensor)
        if type(tensor) not in PLAIN_TYPES:
            raise TypeError(
                f"{called} is a {type(tensor).__name__}, must be a torch.Tensor, as a DTensor's to_local()"
            )
        if tensor.dim() != 2:
            raise ValueError(f"{called} has {tensor.dim()} modes, must have 2: rows and columns")
    refuse_forward_mode(name, {"x": x, "weight": weight})
    reason = supports(x.detach(), weight.detach())
    if reason is not None:
        raise ValueError(f"x @ weight: {reason}")
    if name == "gemm_reduce_scatter" and x.shape[0] % ranks.size:
        raise ValueError(f"x has {x.shape[0]} rows, must be a multiple of {ranks.size}, the ranks: pad it")


def _shards(call: _Call, own: torch.Tensor) -> Iterator[_Shard]:
    """All ranks' rows at once; with overlap each rank's, this rank's first: those of the next step travel
    while a step computes."""
    (group, rank, size), own = call.ranks, own.contiguous()
    if not call.overlap:
        whole = own.new_empty(size * len(own), own.shape[1])
        dist.all_gather_into_tensor(whole, own, group=group)
        yield _Shard(whole, slice(None))
        return

    def begin(step: int) -> Exchange:
        sent = Message((rank + step) % size, (own,))
        return Exchange(call.ranks, sent, Message((rank - step) % size, (torch.empty_like(own),)))

    def shard(owner: int, rows: torch.Tensor) -> _Shard:
        return _Shard(rows, slice(owner * len(own), (owner + 1) * len(own)))

    coming = begin(1) if size > 1 else None
    yield shard(rank, own)
    for step in range(1, size):
        assert coming is not None
        (rows,) = coming.wait()
        coming = begin(step + 1) if step + 1 < size else None
        yield shard((rank - step) % size, rows)


def _gathered(call: _Call, own: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """All ranks' rows times the weight."""
    out = own.new_empty(call.ranks.size * own.shape[0], weight.shape[1])
    with margin_of(call.sm_margin):
        for shard in _shards(call, own):
            gemm(shard.rows, weight, out=out[shard.place])
    return out


def _scattered(call: _Call, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum over the ranks: its own share, then those of the ranks before it."""
    if call.overlap:
        return _scattered_in_steps(call, x, weight)
    group, rank, size = call.ranks
    with margin_of(call.sm_margin):
        shares = gemm(x, weight, out_dtype=call.partial_dtype)
    found = torch.empty_like(shares)
    dist.all_to_all_single(found, shares, group=group)
    by_rank = found.unflatten(0, (size, -1))
    total = by_rank[rank].to(torch.float32, copy=True)
    for step in range(1, size):
        total += by_rank[(rank - step) % size]
    return total.to(x.dtype)


def _scattered_in_steps(call: _Call, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same, of a product for each rank: its share travels while the next one is computed."""
    _, rank, size = call.ranks
    rows, sending = x.shape[0] // size, []
    with margin_of(call.sm_margin):
        for step in range(1, size):
            owner = (rank + step) % size
            share = gemm(x[owner * rows : (owner + 1) * rows], weight, out_dtype=call.partial_dtype)
            received = Message((rank - step) % size, (torch.empty_like(share),))
            sending.append(Exchange(call.ranks, Message(owner, (share,)), received))
        total = gemm(x[rank * rows : (rank + 1) * rows], weight, out_dtype=torch.float32)
    for exchange in sending:
        (share,) = exchange.wait()
        total += share
    return total.to(x.dtype)


class _Sum:
    """A weight's gradient, summed over the steps in float32 by the products' epilogues."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds leftᵀ @ right."""
        self._total = gemm(left.mT, right, c=self._total, out=self._total, out_dtype=torch.float32)

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """The sum, rounded once."""
        assert self._total is not None
        return self._total.to(dtype)


class _AllGatherGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(x, weight)
        return _gathered(call, x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        call, (x, weight) = ctx.call, ctx.saved_tensors
        _, needs_x, needs_weight = ctx.needs_input_grad
        d_x = _scattered(call, d_out, weight.mT) if needs_x else None
        if not needs_weight:
            return None, d_x, None
        total = _Sum()
        with margin_of(call.sm_margin):
            for shard in _shards(call, x):
                total.add(shard.rows, d_out[shard.place])
        return None, d_x, total.value(weight.dtype)


class _GemmReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(x, weight)
        return _scattered(call, x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        call, (x, weight) = ctx.call, ctx.saved_tensors
        _, needs_x, needs_weight = ctx.needs_input_grad
        d_x, total = torch.empty_like(x) if needs_x else None, _Sum()
        with margin_of(call.sm_margin):
            for shard in _shards(call, d_out):
                if d_x is not None:
                    gemm(shard.rows, weight.mT, out=d_x[shard.place])
                if needs_weight:
                    total.add(x[shard.place], shard.rows)
        return None, d_x, total.value(weight.dtype) if needs_weight else None
