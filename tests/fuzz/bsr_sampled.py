"""Cases of `bsr_sddmm`: the kept blocks of a dense product."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from reference import tolerance
from reference.bsr import sampled
from tests.fuzz.bsr_matrix import Matrix, draw_matrix, plain
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

EXTENTS = (1, 3, 8, 16, 64, 65, 100, 128, 256, 500, 1024)


@dataclass(frozen=True)
class SampledCase:
    """One call. `k`: the summed extent. `transposed`: the pattern is given as its transpose's `t()`."""

    draw: Draw = field(repr=False)
    matrix: Matrix
    k: int
    batch: tuple[bool, bool]
    dtype: torch.dtype
    out_dtype: torch.dtype
    a: Layout
    b: Layout
    alpha: float
    transposed: bool
    exact: bool
    mode: Mode

    def __str__(self) -> str:
        return "sddmm " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return "bsr_sddmm", f"mode {self.mode.value}", f"pattern {self.matrix.pattern}"

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds = Draw("sddmm values", self.draw.number, self.draw.settings)
        pattern = self.matrix.lay_out(arena, self.dtype, (), seeds.value_seed(), True)
        rows, columns = self.matrix.shape[::-1] if self.transposed else self.matrix.shape
        lead = [(2,) if has else () for has in self.batch]
        a, b = (
            arena.input(
                name, filler(shape, self.dtype, seeds.value_seed(), settings.device, self.exact), layout
            )
            for name, shape, layout in (
                ("a", (*lead[0], rows, self.k), self.a),
                ("b", (*lead[1], self.k, columns), self.b),
            )
        )
        given = pattern.t() if self.transposed else pattern
        operations = Operations(settings)
        return Call(
            run=lambda: (
                operations.bsr_sddmm(a, b, given, alpha=self.alpha, out_dtype=self.out_dtype).values,
            ),
            check=lambda results: self._check(results[0], a.resolve_neg(), b.resolve_neg(), pattern),
            arguments=("a", "b", "pattern", "out_dtype"),
        )

    def _check(self, values: torch.Tensor, a: torch.Tensor, b: torch.Tensor, pattern) -> None:
        if self.transposed:
            a, b = b.mT, a.mT
        exact = self.alpha * sampled(a, b, plain(pattern))
        assert values.dtype == self.out_dtype
        if self.exact:
            tolerance.check_exact(values, exact)
            return
        peer = self.alpha * sampled(a, b, plain(pattern)).float()
        tolerance.check(values, exact, peer.to(self.out_dtype), ulps=2.0)


def draw_sampled(draw: Draw) -> SampledCase:
    """A case of `bsr_sddmm`."""
    pick, data = draw.kernel, draw.data
    dtype = pick.choice((torch.bfloat16, torch.float16))
    batch = draw.often((False, False), (True, True), (True, False), (False, True))
    alpha = pick.choice((1.0, 1.0, -0.5))
    out_dtype = draw.often(dtype, torch.bfloat16, torch.float16)
    layouts = [draw.layout(3 if has else 2) for has in batch]
    transposed = pick.random() < 0.3
    matrix = draw_matrix(draw)
    k = draw.extent(EXTENTS[:6] if draw.settings.small else EXTENTS, draw.often(1, 8, 16, odds=0.5))
    return SampledCase(
        draw, matrix, k, batch, dtype, out_dtype, a=layouts[0], b=layouts[1], alpha=alpha,
        transposed=transposed, exact=data.random() < 0.6, mode=draw.mode(),
    )  # fmt: skip
