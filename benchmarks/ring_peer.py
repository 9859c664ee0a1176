"""A ring around another library's attention, for context parallelism: ranks pass keys and values on.

As in Ring Attention (Liu and others, 2023) with the zig-zag order of Llama 3's report: of 2 W chunks rank r
has the chunks r and 2 W - 1 - r, so that under a causal mask each step is half of a square for every rank.
Results are merged by their log-sum-exps in float32; gradients of keys and values travel with these, in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Kernels(NamedTuple):
    """Attention of (B, S, H, D) tensors with fewer heads of k and v.

    forward: (q, k, v, causal) -> out, and log-sum-exp (B, H, S) float32. backward: (q, k, v, out, d_out,
    log-sum-exp, causal) -> dq, dk, dv; with the results of all keys it gives the part of these.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, ...]]


def flash_attention_4() -> Kernels:
    """flash-attn-4's kernels. ImportError where it is not installed."""
    from flash_attn.cute import interface

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
        return out, lse

    def backward(*tensors: Any) -> tuple[torch.Tensor, ...]:
        *given, causal = tensors
        return interface._flash_attn_bwd(*given, causal=causal)[:3]

    return Kernels(forward, backward)


class _Passing:
    """Tensors on their way from the rank before to the rank after."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self._sent = [x.contiguous() for x in tensors]
        self._found = [torch.empty_like(x) for x in self._sent]
        to, source = (rank + 1) % size, (rank - 1) % size
        steps = [dist.P2POp(dist.isend, x, to) for x in self._sent]
        steps += [dist.P2POp(dist.irecv, x, source) for x in self._found]
        self._requests = dist.batch_isend_irecv(steps)

    def wait(self) -> list[torch.Tensor]:
        """The tensors of the rank before."""
        for request in self._requests:
            request.wait()
        return self._found


class _Meeting(NamedTuple):
    """A step: this rank's rows of queries that see the rows of keys of `owner`."""

    rows: slice
    keys: slice
    causal: bool


def _meetings(half: int) -> Iterator[_Meeting]:
    """The steps of this rank, whose rows are two chunks of `half`: its own keys, then those of ranks before
    it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every, early, late = slice(None), slice(0, half), slice(half, None)
    for step in range(size):
        owner = (rank - step) % size
        if owner == rank:
            yield _Meeting(every, every, True)
        elif owner < rank:
            yield _Meeting(every, early, False)
        else:
            yield _Meeting(late, every, False)


class RingAttention(torch.autograd.Function):
    """Causal attention of rows that the ranks share in zig-zag order."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernels: Kernels
    ) -> torch.Tensor:
        """The output of this rank's rows."""
        size = dist.get_world_size()
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device)
        keys = [k, v]
        for step, at in enumerate(_meetings(q.shape[1] // 2)):
            coming = _Passing(keys) if step + 1 < size else None
            found, found_lse = kernels.forward(q[:, at.rows], *(x[:, at.keys] for x in keys), at.causal)
            before = lse[..., at.rows]
            both = torch.logaddexp(before, found_lse)
            parts = ((out[:, at.rows], before), (found, found_lse))
            out[:, at.rows] = sum(x * (part - both).exp().mT.unsqueeze(-1) for x, part in parts)
            lse[..., at.rows] = both
            keys = coming.wait() if coming is not None else keys
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.kernels = kernels
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of this rank's rows."""
        q, k, v, out, lse = ctx.saved_tensors
        (d_out,) = gradients
        size = dist.get_world_size()
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        keys: list[torch.Tensor] = [k, v]
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in keys]
        for step, at in enumerate(_meetings(q.shape[1] // 2)):
            coming = _Passing(keys) if step + 1 < size else None
            own = (x[:, at.rows] for x in (out, d_out))
            found = ctx.kernels.backward(
                q[:, at.rows], *(x[:, at.keys] for x in keys), *own, lse[..., at.rows].contiguous(), at.causal
            )
            dq[:, at.rows] += found[0]
            for total, part in zip(sums, found[1:]):
                total[:, at.keys] += part
            sums = _Passing(sums).wait()  # after the last step: the owner's again
            keys = coming.wait() if coming is not None else keys
        return dq.to(q.dtype), *(x.to(k.dtype) for x in sums), None
