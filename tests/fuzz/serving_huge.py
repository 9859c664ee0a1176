"""Caches whose pages lie more than 2³¹ elements apart, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from reference.inputs import normal
from reference.tolerance import check_exact
from tests.fuzz import attention_contents as contents
from tests.fuzz.attention_contents import Operands
from tests.fuzz.case import Call, Mode, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_huge import alone_on_the_gpu
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations
from tests.fuzz.serving_decode import Scores

_BEYOND = 1 << 31
_PAGE, _HEADS, _DIM = 16, 2, 64
_SCORES = Scores(True, None, None, 0.0, None, None)


@dataclass(frozen=True)
class HugeCase:
    """One sequence of `length` keys, in the last and the first page of a cache: `append_kv` writes the last
    key, `attention_decode` reads all."""

    draw: Draw = field(repr=False)
    length: int
    mode: Mode = Mode.PLAIN

    def __str__(self) -> str:
        return f"huge cache of {self.length} keys"

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return ("attention_decode", "append_kv", "cache beyond 2^31 elements")

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`; the caches are made within the call, alone on the GPU."""
        seeds, operations = Draw("huge cache", self.draw.number, settings), Operations(settings)

        def rows(name: str, count: int, heads: int) -> torch.Tensor:
            seed, shape = seeds.value_seed(), (1, count, heads, _DIM)
            make = lambda g: normal(shape, torch.bfloat16, seed=seed + g, device=settings.device)  # noqa: E731
            return arena.input(name, make)

        q, k, v = rows("q", 1, 2 * _HEADS), rows("k", self.length, _HEADS), rows("v", self.length, _HEADS)
        return Call(
            run=lambda: self._run(operations, q, k, v),
            check=lambda found: self._check(found, Operands(q, k, v)),
            arguments=("q", "k", "v"),
        )

    def _run(
        self, operations: Operations, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        table = torch.tensor([[2, 0]], dtype=torch.int32, device=q.device)
        lengths = torch.tensor([self.length - 1], dtype=torch.int32, device=q.device)
        step = _BEYOND // 2 + 8
        with alone_on_the_gpu():
            caches = []
            for x in (k, v):
                memory = torch.empty(2 * step + _PAGE * _HEADS * _DIM, dtype=x.dtype, device=x.device)
                cache = memory.as_strided((3, _PAGE, _HEADS, _DIM), (step, _HEADS * _DIM, _DIM, 1))
                cache.zero_()
                cache[2], cache[0, : self.length - 1 - _PAGE] = x[0, :_PAGE], x[0, _PAGE:-1]
                caches.append(cache)
            operations.append_kv(k[:, -1:], v[:, -1:], *caches, cache_seqlens=lengths, block_table=table)
            out, lse = operations.attention_decode(
                q, *caches, seqused_k=lengths + 1, block_table=table, return_lse=True
            )
            written = [cache[0, self.length - 1 - _PAGE].clone() for cache in caches]
        return out, lse, *written

    def _check(self, found: tuple[torch.Tensor, ...], rows: Operands) -> None:
        for name, x, new in zip("kv", found[2:], rows[1:]):
            check_exact(x, new[0, -1], case=f"{name}_cache")
        contents.check(found[0], found[1], rows, _SCORES.masking(None), None)


def draw_huge(draw: Draw) -> HugeCase:
    """A case on a cache of some 4 GiB for keys, and as much for values."""
    return HugeCase(draw, draw.data.randint(_PAGE + 2, 2 * _PAGE))
