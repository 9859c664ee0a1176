"""One block of a Llama, of torch's, fp8 or block-sparse linear layers, and how several ranks share it.

A model of rotary embedding, grouped heads, causal attention and SwiGLU as Llama 3 has them, without the
embedding and the head. All kinds are made of the same weights: `sparse` and its peer of torch keep the same
blocks, a quarter of all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import kernels_dsl
from kernels_dsl.distributed import BsrColwiseParallel, BsrRowwiseParallel

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
ROW_WISE = ("o", "down")
"""Linear layers whose inputs ranks share under tensor parallelism; of the others they share the outputs."""
OURS = ("fp8", "sparse")
"""Kinds of layers: `ScaledLinear` and `BsrLinear`, each with our attention."""
KINDS = ("torch", *OURS)
"""And `torch.nn.Linear` with SDPA. "torch_fp8" and "torch_sparse" are PyTorch's in the dtypes of ours: errors
are judged by theirs, and they are not timed."""
SHARED = ("tp", "fsdp")
"""Forms of several ranks; "one" is that of one."""


def path_of(name: str) -> str:
    """A linear layer's name in the block."""
    return f"{'attention' if name in ('q', 'k', 'v', 'o') else 'mlp'}.{name}"


class Sizes(NamedTuple):
    """Extents of the block and of a step.

    Of sparse weights: `tile`, the extent of their blocks, of which one of `of` is kept.
    """

    batch: int = 2
    length: int = 4096
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    tile: int = 64
    of: int = 4

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.batch * self.length

    def features(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a linear layer."""
        heads, kv_heads = self.heads * self.dim, self.kv_heads * self.dim
        outputs = {"q": heads, "k": kv_heads, "v": kv_heads, "gate": self.hidden, "up": self.hidden}
        inputs = {"o": heads, "down": self.hidden}
        return outputs.get(name, self.width), inputs.get(name, self.width)


TOY = Sizes(batch=2, length=16, width=64, hidden=64, heads=4, kv_heads=2, dim=16, tile=16, of=2)


def kept_blocks(sizes: Sizes, name: str) -> torch.Tensor:
    """The mask of a sparse weight's blocks: diagonals, so that ranks have equal shares."""
    rows, columns = (torch.arange(n // sizes.tile) for n in sizes.features(name))
    return (rows[:, None] + columns) % sizes.of == 0


class _Fp8(torch.autograd.Function):
    """A linear layer whose three products are of operands that were rounded to fp8, each row scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        e4m3 = torch.float8_e4m3fn
        return (rounded(x, e4m3, -1) @ rounded(weight, e4m3, 1).mT).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        d_x = rounded(gradient, e5m2, -1) @ rounded(weight, e4m3, 0)
        flat, rows = gradient.flatten(0, -2), x.flatten(0, -2)
        d_weight = rounded(flat, e5m2, 0).mT @ rounded(rows, e4m3, 0)
        return d_x.to(x.dtype), d_weight.to(weight.dtype)


def rounded(x: torch.Tensor, dtype: torch.dtype, dim: int) -> torch.Tensor:
    """The float32 values of x after a trip to fp8, with a scale for what lies along `dim`."""
    scale = x.abs().amax(dim, keepdim=True).float() / torch.finfo(dtype).max
    scale = scale.clamp(min=2.0**-126)
    return (x.float() / scale).to(dtype).float() * scale


class Fp8Linear(torch.nn.Linear):
    """The products of `ScaledLinear`, by PyTorch's operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in_features) to (…, out_features)."""
        return _Fp8.apply(x, self.weight)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x (B, S, H, D) turned by the angles (S, 1, D / 2) of its rows, in float32 or float64."""
    wide = x.to(angles.dtype)
    first, second = wide.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Attention(torch.nn.Module):
    """Grouped heads with rotary embedding, causal."""

    def __init__(self, sizes: Sizes, linears: dict[str, torch.nn.Module], ours: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linears[name] for name in ("q", "k", "v", "o"))
        self.dim, self.ours = sizes.dim, ours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, width)."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.dim)) for layer in (self.q, self.k, self.v))
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        steps = torch.arange(0, self.dim, 2, device=x.device, dtype=wide) / self.dim
        rows = torch.arange(x.shape[1], device=x.device, dtype=wide)
        angles = (rows[:, None] / 500_000.0**steps)[:, None]
        q, k = rotated(q, angles), rotated(k, angles)
        if self.ours:
            return self.o(kernels_dsl.attention(q, k, v, causal=True).flatten(-2))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(seen.transpose(1, 2).flatten(-2))


class Mlp(torch.nn.Module):
    """SwiGLU."""

    def __init__(self, linears: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.gate, self.up, self.down = (linears[name] for name in ("gate", "up", "down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(torch.nn.Module):
    """Both halves, each behind a norm and beside a residual."""

    def __init__(self, sizes: Sizes, linears: dict[str, torch.nn.Module], ours: bool) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(sizes, linears, ours), Mlp(linears)
        self.attention_norm, self.mlp_norm = (torch.nn.RMSNorm(sizes.width, 1e-5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def draw_weights(sizes: Sizes, device: str) -> dict[str, torch.Tensor]:
    """Weights by the names of a block's parameters, bf16, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    found = {}
    for name in LINEARS:
        outputs, inputs = sizes.features(name)
        found[f"{path_of(name)}.weight"] = new(outputs, inputs) / inputs**0.5
    for norm in ("attention_norm", "mlp_norm"):
        found[f"{norm}.weight"] = 1 + 0.1 * new(sizes.width)
    return {name: weight.bfloat16() for name, weight in found.items()}


def _linear(kind: str, name: str, weight: torch.Tensor, sizes: Sizes) -> torch.nn.Module:
    if kind == "sparse":
        mask = kept_blocks(sizes, name).to(weight.device)
        block = (sizes.tile, sizes.tile)
        return kernels_dsl.BsrLinear(kernels_dsl.BsrTensor.from_dense(weight, mask, block))
    layer = {"fp8": kernels_dsl.ScaledLinear, "torch_fp8": Fp8Linear}.get(kind, torch.nn.Linear)
    made = layer(weight.shape[1], weight.shape[0], bias=False, device="meta")
    if kind == "torch_sparse":
        weight = weight * spread_mask(sizes, name).to(weight)
    made.weight = torch.nn.Parameter(weight.clone())
    return made


def spread_mask(sizes: Sizes, name: str) -> torch.Tensor:
    """`kept_blocks` for each element."""
    return kept_blocks(sizes, name).repeat_interleave(sizes.tile, 0).repeat_interleave(sizes.tile, 1)


def make_block(
    kind: str, sizes: Sizes, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
) -> Block:
    """A block of this kind, with copies of the weights. dtype: float64 for references, of torch's kinds."""
    given = {name: weight.to(dtype) for name, weight in weights.items()}
    linears = {name: _linear(kind, name, given[f"{path_of(name)}.weight"], sizes) for name in LINEARS}
    block = Block(sizes, linears, ours=kind in OURS)
    for norm in ("attention_norm", "mlp_norm"):
        getattr(block, norm).weight = torch.nn.Parameter(given[f"{norm}.weight"].clone())
    return block


def share(block: Block, kind: str, parallelism: str, mesh: DeviceMesh) -> None:
    """Shares a block among the ranks: its heads and features ("tp"), or its parameters ("fsdp")."""
    if parallelism == "tp":
        column, row = BsrColwiseParallel, BsrRowwiseParallel
        if kind != "sparse":
            column, row = ColwiseParallel, RowwiseParallel
        plan = {path_of(name): (row if name in ROW_WISE else column)() for name in LINEARS}
        parallelize_module(block, mesh, plan, src_data_rank=None)
    elif parallelism == "fsdp":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in (block.attention, block.mlp, block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
