"""Functions of a rank in the tests of PyTorch's context parallelism on these methods."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel_unshard

from kernels_dsl.distributed import torch_context_parallel
from tests.distributed import models
from tests.distributed.ranks import Rank

HEADS, KV_HEADS, DIM = 4, 2, 8


class Block(torch.nn.Module):
    """Attention of a model that knows nothing of ranks, but the lengths of its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(16, (HEADS + 2 * KV_HEADS) * DIM).bfloat16()

    def forward(self, x: torch.Tensor, causal: bool) -> torch.Tensor:
        """(B, S, H · D) from (B, S, 16)."""
        heads = self.project(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def _exact(block: Block, x: torch.Tensor, causal: bool) -> torch.Tensor:
    heads = block.project(x).unflatten(-1, (-1, DIM))
    window = (None, 0) if causal else None
    out, _ = models.exact(*heads.split([HEADS, KV_HEADS, KV_HEADS], 2), models.Mask(window))
    return out.flatten(2)


def context(rank: Rank) -> None:
    """A model under `context_parallel`: output and gradients of one process, by every method and order."""
    mesh = init_device_mesh("cpu", (rank.size,))
    x = torch.randn(2, 16 * rank.size, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        kinds = (("ring", True), ("ring", False), ("ulysses", True))
        for (method, balanced), causal in itertools.product(kinds, (True, False)):
            monkeypatch.setattr(_cp_options, "enable_load_balance", balanced)
            block, buffer, whole = Block(), x.clone(), Block()
            with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
                with torch_context_parallel(method=method):
                    assert buffer.shape[1] == 16
                    out = block(buffer, causal)
                (found,) = context_parallel_unshard(mesh, [out.detach()], [1])
                out.float().square().sum().backward()
            gradient = block.project.weight.grad.float()
            torch.distributed.all_reduce(gradient)
            expected = _exact(whole.double(), x.double(), causal)
            expected.square().sum().backward()
            for mine, reference in ((found, expected.detach()), (gradient, whole.project.weight.grad)):
                error = float((mine.double() - reference).abs().max() / reference.abs().max())
                assert error < 2.0**-6, (method, balanced, causal, error)


def plain(rank: Rank) -> None:
    """DTensors beside other placements, messages that a ring sends alone, and refusals."""
    mesh = init_device_mesh("cpu", (1, rank.size), mesh_dim_names=("tp", "cp"))
    placements = [Shard(1), Shard(2)]
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(1, 2, 8 * rank.size, 8, generator=generator).bfloat16() for _ in range(3)]
    q, k, v = (distribute_tensor(x, mesh, placements, src_data_rank=None) for x in whole)
    with pytest.MonkeyPatch.context() as monkeypatch:
        models.use(monkeypatch)
        with torch_context_parallel(order="contiguous"):
            out = F.scaled_dot_product_attention(q, k, v)
            assert isinstance(out, DTensor) and list(out.placements) == placements
            with CommDebugMode() as counts:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            assert counts.get_total_counts() == 0, "a ring sends to single ranks"
            expected = models.exact(*(x.transpose(1, 2) for x in whole), models.Mask((None, 0))).out
            assert (out.full_tensor().transpose(1, 2) - expected).abs().max() < 2.0**-6
            mine = F.scaled_dot_product_attention(*(x.to_local() for x in (q, k, v)))
            assert not isinstance(mine, DTensor)
        with torch_context_parallel():
            for message, call in (
                ("attn_mask is given", lambda: F.scaled_dot_product_attention(q, k, v, torch.ones(1).bool())),
                ("dropout_p is 0.5", lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)),
                ("key is Tensor", lambda: F.scaled_dot_product_attention(q, whole[1], v)),
                (
                    "value is .*Replicate",
                    lambda: F.scaled_dot_product_attention(
                        q, k, v.redistribute(mesh, [Shard(1), Replicate()])
                    ),
                ),
            ):
                with pytest.raises(ValueError, match=message):
                    call()
    with pytest.raises(ValueError, match="method is 'rings'"), torch_context_parallel(method="rings"):
        pass
