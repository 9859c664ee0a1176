"""Cases of `grouped_gemm`: empty groups, rows of no group, offsets that decrease or pass M."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.config.gemm_table import TABLES
from reference import gemm as reference
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_dense import DTYPES, fitting, table_name
from tests.fuzz.memory import PLAIN, Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler, peer

SIZES = (0, 0, 1, 2, 7, 16, 33, 63, 64, 65, 128, 129, 200, 500)
EXTENTS = (1, 8, 16, 33, 64, 80, 129, 200, 512)
NAMES = ("a", "b", "offs", "bias", "residual", "alpha", "activation", "epilogue", "epilogue_args", "out",
         "out_dtype", "config", "family")  # fmt: skip


@dataclass(frozen=True)
class GroupedCase:
    """One call. `sizes`: rows of each group; `extra`: rows after the last group. `past`: the last offset lies
    so far beyond M, which counts as M. `bias`: its modes, or ""."""

    draw: Draw = field(repr=False)
    sizes: tuple[int, ...]
    extra: int
    past: int
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    a: Layout
    b: Layout
    out: Layout | None
    bias: str
    residual: bool
    activation: str | None
    config: GemmConfig | None
    family: str | None
    exact: bool
    mode: Mode

    def __str__(self) -> str:
        return "grouped " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["grouped_gemm", f"mode {self.mode.value}"]
        names += [f"grouped {table_name(self.config)}"] if self.config is not None else []
        return tuple(names + (["empty"] if 0 in (sum(self.sizes), self.n, self.k) else []))

    @property
    def m(self) -> int:
        """Rows of a."""
        return sum(self.sizes) + self.extra

    def _ends(self, generation: int) -> torch.Tensor:
        """Ends of the groups: in generation 1 the same sizes in another order."""
        sizes = list(self.sizes) if generation == 0 else list(reversed(self.sizes))
        ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0)
        if self.past and len(ends):
            ends[-1] = self.m + self.past
        return ends.to(torch.int32)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("grouped values", self.draw.number, self.draw.settings), Operations(settings)

        def tensor(
            name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout = PLAIN
        ) -> torch.Tensor:
            fill = filler(shape, dtype, seeds.value_seed(), settings.device, self.exact)
            return arena.input(name, fill, layout)

        groups = len(self.sizes)
        a = tensor("a", (self.m, self.k), self.dtype, self.a)
        b = tensor("b", (groups, self.k, self.n), self.dtype, self.b)
        offs = arena.input("offs", self._ends)
        options: dict[str, Any] = {}
        if self.bias:
            shape = (self.n,) if self.bias == "n" else (groups, self.n)
            options["bias"] = tensor("bias", shape, self.out_dtype)
        if self.residual:
            options["residual"] = tensor("residual", (self.m, self.n), self.out_dtype)
        options.update({"activation": self.activation} if self.activation else {})

        def written() -> torch.Tensor:
            mask = torch.zeros(self.m, self.n, dtype=torch.bool)
            mask[: self._last(offs)] = True
            return mask

        out = None
        if self.out is not None:
            out = arena.output("out", (self.m, self.n), self.out_dtype, self.out, written)
        forced: dict[str, Any] = {"out": out, "family": self.family, "config": fitting(self.config, a, b)}
        forced.update({} if out is not None else {"out_dtype": self.out_dtype})
        return Call(
            run=lambda: (operations.grouped_gemm(a, b, offs, **options, **forced),),
            check=lambda results: self._check(results[0], a, b, offs, options),
            arguments=NAMES,
            supports=lambda: operations.grouped_gemm_supports(a, b, offs, **options, **forced),
            may_refuse=self.config is not None,
            # Without out=, rows of no group hold whatever was there.
            repeats=out is not None or self._last(self._ends(0)) == self.m,
        )

    def _last(self, offs: torch.Tensor) -> int:
        return min(int(offs[-1]), self.m) if len(offs) else 0

    def _check(
        self,
        result: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        assert tuple(result.shape) == (self.m, self.n) and result.dtype == self.out_dtype
        a, b, start = a.resolve_neg(), b.resolve_neg(), 0
        exact, like = [], []
        for group, stop in enumerate(offs.tolist()):
            rows = slice(start, max(start, min(stop, self.m)))
            start = rows.stop
            if rows.start == rows.stop or self.n == 0:
                continue
            own = dict(options)
            if self.bias == "ln":
                own["bias"] = options["bias"][group]
            if self.residual:
                own["residual"] = options["residual"][rows]
            exact.append(reference.gemm(a[rows], b[group], **own))
            like += [] if self.exact else [peer(a[rows], b[group], self.out_dtype, **own)]
        if self.exact and exact:
            tolerance.check_exact(result[:start], torch.cat(exact))
        elif exact:  # together: the few elements of a small group say little about the error to expect
            tolerance.check(result[:start], torch.cat(exact), torch.cat(like))


def draw_grouped(draw: Draw) -> GroupedCase:
    """A case of `grouped_gemm`."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    count = data.choice((0, 1, 2, 3, 5) if small else (0, 1, 2, 3, 5, 8, 40, 130))
    sizes = tuple(data.choice(SIZES[:8] if small or count > 8 else SIZES) for _ in range(count))
    dtype = pick.choice(DTYPES)
    family = draw.family_of_kernels()
    config = None
    if pick.random() < 0.5:
        families = [family] if family else (["sm90", "sm80"] if draw.arch() == "sm_90a" else ["sm80"])
        config = pick.choice(TABLES[pick.choice(families)]).config
        family = pick.choice((None, config.family))
    activation = pick.choice((None, None, "relu", "silu"))
    extra = data.choice((0, 0, 5))
    pool = EXTENTS[:6] if small else EXTENTS
    n, k = (draw.extent(pool, draw.often(1, 8, 16, odds=0.4)) for _ in range(2))
    return GroupedCase(
        draw, sizes, extra, past=3 if extra == 0 and data.random() < 0.1 else 0, n=n, k=k, dtype=dtype,
        out_dtype=draw.often(dtype, *DTYPES), a=draw.layout(2), b=draw.layout(3),
        out=draw.layout(2, negate=False, expand=False) if pick.random() < 0.7 else None,
        bias=pick.choice(("", "", "n", "ln")), residual=pick.random() < 0.3, activation=activation,
        config=config, family=family, exact=data.random() < 0.5 and activation != "silu", mode=draw.mode(),
    )  # fmt: skip
