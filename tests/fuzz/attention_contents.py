"""Contents of q, k and v, how they share memory, and the comparison of a result with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from reference import tolerance
from reference.attention import Masking, attention, masked_scores
from reference.inputs import case_seed, integers, normal
from tests.fuzz.attention_options import Extents
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout

LSE_TOLERANCE = 1e-3
"""Absolute, as in the tests of attention: scores are float32 sums, the exponentials the hardware's."""
ULPS = 4.0
LOOKUP_SCALE = 16.0
"""In a lookup the wanted key's score is above all others by twice as much."""
_CODE = 16
_LEAST_VALUE = 1e-4
_ALONE = 1e-9
STORAGES = ("apart", "apart", "apart", "qkv", "kv", "v is k")
"""Those of q, k and v that lie in one tensor, side by side along the heads; or are the same tensor."""


class Operands(NamedTuple):
    """q, k and v, rows before heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Layouts:
    """The memory of operands and output. `storage` of `STORAGES`; what lies in one tensor has k's layout.
    out: None where the call makes it."""

    q: Layout
    k: Layout
    v: Layout
    out: Layout | None
    storage: str

    @property
    def features(self) -> list[str]:
        """For coverage."""
        every = (self.q, self.k, self.v)
        names = ["out="] if self.out is not None else []
        names += ["negated"] if any(x.negated for x in every) else []
        names += ["stride 0"] if any(x.expanded for x in every) else []
        names += ["odd steps"] if any(x.step > 1 for x in every) else []
        return names + ([f"storage {self.storage}"] if self.storage != "apart" else [])


def draw_layouts(draw: Draw, rank: int, *, with_out: float) -> Layouts:
    """Layouts of tensors of `rank` modes, 3 where packed; `with_out`: odds of an output of the caller's.

    Packed keys that do not count hold NaN, so that no rows there share their memory with others.
    """
    q, k, v = (draw.layout(rank, expand=rank == 4 or name == "q") for name in "qkv")
    out = draw.layout(rank, negate=False, expand=False)
    given = draw.kernel.random() < with_out
    return Layouts(q, k, v, out if given else None, draw.data.choice(STORAGES))


def storage_for(storage: str, sizes: Extents, same_rows: bool) -> str:
    """`storage` where these sizes allow it, else "apart"."""
    alike = sizes.dim == sizes.dim_v and (storage != "qkv" or same_rows)
    return storage if alike else "apart"


@dataclass(frozen=True)
class Contents:
    """Values of operands with (batch, rows, heads, head dimension), by generation. lookup: each query finds
    one key. `q_rows` and `k_rows`: rows of each batch, of all sequences if packed."""

    sizes: Extents
    batch: int
    q_rows: int
    k_rows: int
    dtype: torch.dtype
    lookup: bool
    device: str
    seed: int

    def values(self, generation: int, targets: torch.Tensor | None = None) -> Operands:
        """The operands. targets: the key that each query looks for, (batch, rows, heads); None: any."""
        s, seed = self.sizes, case_seed("attention", self.seed, generation)
        q_shape = (self.batch, self.q_rows, s.heads, s.dim)
        k_shape = (self.batch, self.k_rows, s.kv_heads, s.dim)
        v = normal((*k_shape[:3], s.dim_v), self.dtype, seed=seed, device=self.device)
        if self.lookup and min(*q_shape, *k_shape) > 0:
            q, k = self._codes(q_shape, k_shape, seed, targets)
        else:
            q = normal(q_shape, self.dtype, seed=seed + 1, device=self.device)
            k = normal(k_shape, self.dtype, seed=seed + 2, device=self.device)
        return Operands(q, k, v)

    def _codes(
        self, q_shape: tuple[int, ...], k_shape: tuple[int, ...], seed: int, targets: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k of ±1 in some columns, of which a query agrees in all with one key alone; in the other
        columns one of the two is 0."""
        dim, (batch, rows, heads) = self.sizes.dim, q_shape[:3]
        generator = torch.Generator().manual_seed(seed)
        if targets is None:
            targets = torch.randint(0, self.k_rows, (batch, rows, heads), generator=generator)
        columns = torch.randperm(dim, generator=generator)
        width = min(_CODE, dim)
        numbers = (torch.arange(self.k_rows) * 40503 + seed % 977) % (
            1 << width
        )  # an odd factor: no two equal
        bits = (numbers[:, None] >> torch.arange(width)) & 1
        signs = torch.randint(0, 2, (batch, 1, k_shape[2], width), generator=generator) * 2 - 1
        codes = (bits * 2 - 1)[None, :, None, :] * signs
        q = integers(q_shape, torch.float32, seed=seed + 1)
        k = integers(k_shape, torch.float32, seed=seed + 2)
        q[..., columns[: dim // 2]], k[..., columns[dim // 2 :]] = 0, 0
        b = torch.arange(batch)[:, None, None]
        h = torch.arange(heads)[None, None] // self.sizes.group
        k[..., columns[:width]] = codes.float()
        q[..., columns[:width]] = codes[b, targets.cpu(), h].float()
        return q.to(self.dtype).to(self.device), k.to(self.dtype).to(self.device)


def lay_out(arena: Arena, layouts: Layouts, storage: str, values: list[Operands], packed: bool) -> Operands:
    """The operands in `arena`, as `storage` says. `values`: of each generation; `packed`: without a batch."""
    rows = [Operands(*(x[0] if packed else x for x in some)) for some in values]
    heads = -2

    def one(name: str, layout: Layout, tensors: list[torch.Tensor]) -> torch.Tensor:
        return arena.input(name, lambda generation: tensors[generation], layout)

    if storage == "qkv":
        base = one("qkv", layouts.k, [torch.cat(some, dim=heads) for some in rows])
        counts = [x.shape[heads] for x in rows[0]]
        return Operands(*base.split(counts, dim=heads))
    q = one("q", layouts.q, [some.q for some in rows])
    if storage == "kv":
        base = one("kv", layouts.k, [torch.cat(some[1:], dim=heads) for some in rows])
        return Operands(q, *base.chunk(2, dim=heads))
    k = one("k", layouts.k, [some.k for some in rows])
    return Operands(q, k, k if storage == "v is k" else one("v", layouts.v, [some.v for some in rows]))


def check(
    out: torch.Tensor, lse: torch.Tensor | None, operands: Operands, rules: Masking, scale: float | None
) -> None:
    """Compare an output, and perhaps its log-sum-exp, with float64; all (B, S, H, D).

    By the tolerance rule; and bit by bit where one key has all the weight, as the result is its value then.
    """
    operands = Operands(*(x.resolve_neg() for x in operands))
    expected, exact_lse = attention(*operands, rules, scale=scale)
    peer, _ = attention(*operands, rules, scale=scale, dtype=operands.q.dtype)
    tolerance.check(*(x.transpose(1, 2) for x in (out, expected, peer)), ulps=ULPS)
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == exact_lse.shape, (lse.shape, exact_lse.shape)
        close = (lse.double() == exact_lse) | ((lse - exact_lse).abs() < LSE_TOLERANCE)
        assert bool(close.all()), (
            f"{int((~close).sum())} log-sum-exps differ: {_worst(lse, exact_lse, close)}"
        )
    if operands.k.shape[1] == 0 or out.numel() == 0:
        return
    top = masked_scores(operands.q, operands.k, rules, scale).amax(dim=-1)
    alone = ((exact_lse - top < _ALONE) & (top > -torch.inf)).transpose(1, 2)
    found, value = out[alone], expected[alone]
    seen = (
        value.abs() > _LEAST_VALUE
    )  # what other keys give to a value of 0 depends on the last digits of scores
    tolerance.check_exact(found[seen], value[seen], case="rows of one key")


def _worst(found: torch.Tensor, expected: torch.Tensor, close: torch.Tensor) -> str:
    place = tuple(int(i) for i in (~close).nonzero()[0])
    return f"the first is at {place}: {found[place].item()!r}, must be {expected[place].item()!r}"
