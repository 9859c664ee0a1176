"""Cases of `scaled_grouped_gemm`: all kinds of scales, empty groups, rows of no group, fp8 results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.config.promotion import GROUP
from reference import quantize as quantization
from reference import scaled_gemm as reference
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_forced import FAST, SCALED, Forced, fitting
from tests.fuzz.fp8_values import (
    E4M3,
    E5M2,
    INTEGERS,
    NORMAL,
    PATTERNS,
    WIDE,
    check_same,
    check_values,
    operand,
    scales,
    with_exact_sums,
)
from tests.fuzz.gemm_grouped import EXTENTS, SIZES
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

NAMES = ("a", "b", "scale_a", "scale_b", "offs", "scale_result", "amax", "bias", "residual", "alpha",
         "activation", "epilogue", "epilogue_args", "out", "out_dtype", "use_fast_accum", "config",
         "family")  # fmt: skip
_KINDS_A = ("tensor", "group", "row", "column")
_KINDS_B = ("tensor", "group", "row", "flat")
_BLOCKS = {"1x128": (1, GROUP), "128x128": (GROUP, GROUP)}
_WRONG = ("scale_a", "scale_b", "offs", "amax")


@dataclass(frozen=True)
class ScaledGroupedCase:
    """One call. `sizes`: rows of each group; `extra`: rows after the last. `past`: the last offset lies so
    far beyond M. `kinds`: scales of a ("row" is (M, 1), "column" (M,)) and of b ("row" is (G, 1, N), "flat"
    (G, N)). `b`: the layout of b's transpose. `odd`: the operand with bit patterns. `bias`: its modes, or
    "". `wrong`: the argument that is not what it must be."""

    draw: Draw = field(repr=False)
    sizes: tuple[int, ...]
    extra: int
    past: int
    n: int
    k: int
    dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype
    a: Layout
    b: Layout
    out: Layout | None
    kinds: tuple[str, str]
    fast: bool
    scale_result: bool
    amax: bool
    bias: str
    residual: bool
    alpha: float
    activation: str | None
    forced: Forced | None
    family: str | None
    contents: str
    odd: int
    wrong: str | None
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["scaled_grouped_gemm", f"mode {self.mode.value}", f"grouped {self.contents}"]
        names += [f"grouped scale_a {self.kinds[0]}", f"grouped scale_b {self.kinds[1]}"]
        names += [f"grouped {self.forced}"] if self.forced is not None else []
        names += ["fp8 result"] if self.out_dtype not in WIDE else []
        names += ["amax"] if self.amax else []
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

    def _scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        groups, parts, m, n = len(self.sizes), -(-self.k // GROUP), self.m, self.n
        of_a: dict[str, tuple[int, ...]] = {
            "tensor": (), "group": (groups, 1, 1), "row": (m, 1), "column": (m,), "1x128": (m, parts),
        }  # fmt: skip
        of_b: dict[str, tuple[int, ...]] = {
            "tensor": (1,), "group": (groups, 1, 1), "row": (groups, 1, n), "flat": (groups, n),
            "1x128": (groups, parts, n), "128x128": (groups, parts, -(-n // GROUP)),
        }  # fmt: skip
        found = of_a[self.kinds[0]], of_b[self.kinds[1]]
        return ((m + 1, 3) if self.wrong == "scale_a" else found[0],
                (groups, 5, 7) if self.wrong == "scale_b" else found[1])  # fmt: skip

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, device = Draw("fp8 grouped values", self.draw.number, self.draw.settings), settings.device
        operations, groups = Operations(settings), len(self.sizes)
        made = []
        shapes = (self.m, self.k), (groups, self.n, self.k)
        for i, (name, shape, layout) in enumerate(zip("ab", shapes, (self.a, self.b))):
            how = seeds.value_seed(), device, self.contents, self.odd == i
            made.append(arena.input(name, operand(shape, self.dtypes[i], *how), layout))
        for i, (name, shape) in enumerate(zip(("scale_a", "scale_b"), self._scale_shapes())):
            how = seeds.value_seed(), device, self.contents, self.odd == i
            made.append(arena.input(name, scales(shape, *how)))
        a, b, scale_a, scale_b = made[0], made[1].mT, made[2], made[3]
        offs = arena.input("offs", lambda g: self._ends(g).to(device))
        if self.wrong == "offs":
            offs = offs.to(torch.int64)
        options = self._epilogue(arena, seeds, device)

        def written() -> torch.Tensor:
            mask = torch.zeros(self.m, self.n, dtype=torch.bool)
            mask[: self._last(offs)] = True
            return mask

        out = amax = None
        if self.out is not None:
            out = arena.output("out", (self.m, self.n), self.out_dtype, self.out, written)
        if self.amax or self.wrong == "amax":
            amax = arena.output("amax", (2,) if self.wrong == "amax" else (), torch.float32)
        if self.scale_result:
            factors = 4.0, 0.5
            options["scale_result"] = arena.input(
                "scale_result", lambda g: torch.full((1, 1), factors[g], device=device)
            )
        config = None if self.forced is None else self.forced.config
        forced: dict[str, Any] = {
            "out": out, "amax": amax, "family": self.family, "use_fast_accum": self.fast,
            "config": fitting(config, a, b, out),
        }  # fmt: skip
        forced.update({} if out is not None else {"out_dtype": self.out_dtype})

        def run() -> tuple[torch.Tensor, ...]:
            found = operations.scaled_grouped_gemm(a, b, scale_a, scale_b, offs, **options, **forced)
            return (found,) if amax is None else (found, amax)

        def supports() -> str | None:
            return operations.scaled_grouped_gemm_supports(a, b, scale_a, scale_b, offs, **options, **forced)

        return Call(
            run=run,
            check=lambda found: self._check(found, (a, b, scale_a, scale_b), offs, options),
            arguments=NAMES,
            supports=None if self.mode is Mode.GRAPH else supports,
            must_refuse=self.wrong,
            may_refuse=self.forced is not None,
            # Without out=, rows of no group hold whatever was there.
            repeats=out is not None or self._last(self._ends(0)) == self.m,
        )

    def _epilogue(self, arena: Arena, seeds: Draw, device: str) -> dict[str, Any]:
        dtype = self.out_dtype if self.out_dtype in WIDE else torch.bfloat16
        exact = self.contents != NORMAL
        options: dict[str, Any] = {}
        if self.bias:
            shape = (self.n,) if self.bias == "n" else (len(self.sizes), self.n)
            options["bias"] = arena.input("bias", filler(shape, dtype, seeds.value_seed(), device, exact))
        if self.residual:
            fill = filler((self.m, self.n), dtype, seeds.value_seed(), device, exact)
            options["residual"] = arena.input("residual", fill)
        options |= {"activation": self.activation} if self.activation else {}
        return options | ({"alpha": self.alpha} if self.alpha != 1.0 else {})

    def _last(self, offs: torch.Tensor) -> int:
        return min(int(offs[-1]), self.m) if len(offs) else 0

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        arguments: tuple[torch.Tensor, ...],
        offs: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        a, b, scale_a, scale_b = arguments
        assert tuple(found[0].shape) == (self.m, self.n) and found[0].dtype == self.out_dtype
        blocks = None
        if self.kinds[0] in _BLOCKS:
            blocks = _BLOCKS[self.kinds[0]], _BLOCKS[self.kinds[1]][::-1]
        exact, peer, start = [], [], 0
        for group, stop in enumerate(offs.tolist()):
            rows = slice(start, max(start, min(stop, self.m)))
            start = rows.stop
            of_a = {"tensor": scale_a, "column": scale_a[rows, None] if scale_a.dim() == 1 else None}.get(
                self.kinds[0], scale_a[group] if self.kinds[0] == "group" else None
            )
            of_a = scale_a[rows] if of_a is None else of_a
            of_b = scale_b if self.kinds[1] == "tensor" else scale_b[group]
            own = {name: value for name, value in options.items() if name != "scale_result"}
            own |= {"bias": options["bias"][group]} if self.bias == "ln" else {}
            own |= {"residual": options["residual"][rows]} if self.residual else {}
            product = (a[rows], b[group], of_a, of_b)
            exact.append(reference.scaled_gemm(*product, groups=blocks, **own))
            if self.contents == NORMAL:
                how = {"groups": blocks, "fast": self.fast, "out_dtype": self.out_dtype}
                peer.append(reference.as_tensor_cores(*product, **how, **own))
        all_exact = torch.cat(exact) if exact else a.new_zeros((0, self.n), dtype=torch.float64)
        result = found[0][: len(all_exact)]
        if self.out_dtype not in WIDE:
            factor = options["scale_result"].double() if self.scale_result else 1.0
            expected = quantization.to_fp8(all_exact * factor, self.out_dtype)
            check_same(result, expected, "result", signed=False)
        elif self.contents != NORMAL:
            check_values(result, all_exact, "result")
        elif result.numel():
            tolerance.check(result, all_exact, torch.cat(peer))
        if self.amax and all_exact.numel() == 0:
            assert found[1].item() == 0.0, f"amax is {found[1].item()} of a result without elements"
        elif self.amax and self.contents != NORMAL:
            check_values(found[1], all_exact.abs().max(), "amax")
        elif self.amax:
            check_values(found[1].to(self.out_dtype), result.abs().max(), "amax")


def draw_scaled_grouped(draw: Draw, forced: Forced | None) -> ScaledGroupedCase:
    """A case of `scaled_grouped_gemm`, with a configuration or without."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    count = data.choice((0, 1, 2, 3, 5) if small else (0, 1, 2, 3, 5, 8, 40, 130))
    sizes = tuple(data.choice(SIZES[:8] if small or count > 8 else SIZES) for _ in range(count))
    sums = forced.sums if forced is not None else pick.choice((FAST, "promoted", SCALED))
    kinds = pick.choice(_KINDS_A), pick.choice(_KINDS_B)
    if sums == SCALED:
        kinds = "1x128", draw.often("128x128", "1x128", odds=0.6)
    out_dtype = draw.often(torch.bfloat16, torch.float16, torch.float32, E4M3, E5M2, odds=0.3)
    contents = data.choice((INTEGERS, NORMAL, PATTERNS))
    activation = draw.often(None, "relu", "silu", odds=0.6)
    if contents == NORMAL and out_dtype not in WIDE:
        contents = INTEGERS
    if contents != NORMAL and activation == "silu":
        activation = None
    family = draw.family_of_kernels()
    if forced is not None:
        family = pick.choice((None, forced.config.family))
    extra = data.choice((0, 0, 5))
    pool = EXTENTS[:6] if small else EXTENTS
    n, k = (draw.extent(pool, draw.often(1, 8, 16, odds=0.3)) for _ in range(2))
    if sums == "promoted" and forced is not None and 0 < k <= GROUP:
        k += GROUP
    result = pick.random() < 0.7
    amax, residual, alpha = pick.random() < 0.25, pick.random() < 0.3, pick.random() < 0.2
    case = ScaledGroupedCase(
        draw, sizes, extra, past=3 if extra == 0 and data.random() < 0.1 else 0, n=n, k=k,
        dtypes=(pick.choice((E4M3, E4M3, E5M2)), pick.choice((E4M3, E4M3, E5M2))), out_dtype=out_dtype,
        a=with_exact_sums(draw.layout(2, negate=False), contents),
        b=with_exact_sums(draw.layout(3, negate=False), contents),
        out=draw.layout(2, negate=False, expand=False) if pick.random() < 0.7 else None, kinds=kinds,
        fast=sums == FAST, scale_result=result and out_dtype not in WIDE, amax=amax,
        bias=pick.choice(("", "", "n", "ln")), residual=residual, alpha=2.0 if alpha else 1.0,
        activation=activation, forced=forced, family=family, contents=contents, odd=data.randrange(2),
        wrong=data.choice(_WRONG) if data.random() < 0.03 and forced is None else None,
        mode=draw.mode(),
    )  # fmt: skip
    if case.wrong is not None and (count < 2 or k == 0 or n == 0):
        return replace(case, wrong=None)
    return case
