"""Cases of `quantize`: every scaling, transposes, given scales, the caller's memory, bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.config.quantize import PITCH
from kernels_dsl.config.quantize import TILE as GROUP
from reference import quantize as reference
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_values import E4M3, E5M2, WIDE, Fill, check_same
from tests.fuzz.memory import PLAIN, Arena, Layout
from tests.fuzz.planted import Operations

NAMES = ("x", "dtype", "scaling", "transpose", "scale", "out")
_SCALINGS = ("tensor", "matrix", "row", "1x128", "128x128")
_SMALL = (1, 2, 7, 16, 17, 33, 64, 127, 128, 129, 150, 257)
_LARGE = (1, 2, 7, 16, 33, 64, 100, 127, 128, 129, 255, 256, 500, 513, 1000, 1024, 1537, 2048, 2072)
_LONG = (4100, 8192, 16400, 40000, 100004, 262144, 300001)
_MOST = 1 << 22
_LEADS = ((), (), (), (1,), (3,), (0,), (2, 3), (17,), (2, 1, 2), (40,), (1, 2, 0, 3))
_GIVEN = (1.0, 0.013, 2.0**-8, 1e-40, 2.0**-127, 0.0, math.inf, math.nan, -2.0, 3e38)
_SPECIAL = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-30)


def awkward(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str, patterns: bool) -> Fill:
    """Normal values with outliers, infinities, NaN, zeros, groups of zeros and subnormal numbers; or random
    bits."""

    def fill(generation: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + generation)
        if patterns:
            size = torch.int16 if dtype.itemsize == 2 else torch.int32
            limits = torch.iinfo(size)
            found = torch.randint(limits.min, limits.max + 1, shape, generator=generator, dtype=torch.int64)
            return found.to(size).view(dtype).to(device)
        x = torch.randn(shape, generator=generator)
        draw = torch.rand(shape, generator=generator)
        x = torch.where(draw < 0.02, x * 1e4, x)
        for n, value in enumerate(_SPECIAL):
            x = torch.where((draw > 0.5 + n / 200) & (draw < 0.5 + (n + 1) / 200), value, x)
        if x.dim() > 1:
            x[..., :1, :] = 0.0
        if generation == 0:
            x[..., 128:256] = 0.0 if dtype == torch.float16 else 1e-43
        return x.to(dtype).to(device)

    return fill


@dataclass(frozen=True)
class QuantizeCase:
    """One call. `given`: the scale that the caller has, of `modes` modes. `out`: whether results lie in the
    caller's memory. `wrong`: what is not as it must be."""

    draw: Draw = field(repr=False)
    shape: tuple[int, ...]
    source: torch.dtype
    dtype: torch.dtype
    x: Layout
    scaling: str
    transpose: bool | str
    given: float | None
    modes: int
    out: bool
    patterns: bool
    wrong: str | None
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["quantize", f"mode {self.mode.value}", f"quantize {self.scaling} {self.transpose}"]
        names += ["quantize out"] if self.out else []
        names += ["quantize given scale"] if self.given is not None else []
        names += ["quantize random bits"] if self.patterns else []
        names += ["quantize long rows"] if self.shape[-1] > max(_LARGE) else []
        return tuple(names + (["empty"] if 0 in self.shape else []))

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds = Draw("fp8 quantize values", self.draw.number, self.draw.settings)
        operations, device = Operations(settings), settings.device
        fill = awkward(self.shape, self.source, seeds.value_seed(), device, self.patterns)
        x = arena.input("x", fill, self.x)
        options: dict[str, Any] = {"scaling": self.scaling, "transpose": self.transpose}
        scale = None
        if self.given is not None:
            shape, given = (1,) * self.modes, (self.given, 0.25)
            scale = arena.input("scale", lambda g: torch.full(shape, given[g], device=device))
            options["scale"] = scale
        if self.wrong == "scale":
            options["scale"] = torch.ones(2, device=device)
        rows: list[torch.Tensor] = []
        out = self._out(arena, scale, rows) if self.out else None

        def run() -> tuple[torch.Tensor, ...]:
            if out is None:
                return operations.quantize(x, self.dtype, **options)
            found = operations.quantize(x, self.dtype, **options, out=out)
            assert found is out
            for padding in rows:  # which a call may write
                padding.zero_()
            return found

        return Call(
            run=run,
            check=lambda found: self._check(found, x, scale),
            arguments=NAMES,
            supports=None
            if self.out or self.mode is Mode.GRAPH
            else lambda: operations.quantize_supports(x, self.dtype, **options),
            must_refuse=self.wrong,
        )

    def _orders(self) -> list[bool]:
        """For each output whether it is of the transpose."""
        return [False, True] if self.transpose == "both" else [bool(self.transpose)]

    def _out(
        self, arena: Arena, scale: torch.Tensor | None, padding: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Memory for all results. padding: gets what lies behind rows of values, up to 16 bytes."""
        if self.scaling == "tensor" and scale is None:
            scale = arena.output("out scale", (), torch.float32)
        made: list[torch.Tensor] = []
        full = self.shape if len(self.shape) > 1 else (1, *self.shape)
        for turned in self._orders():
            lead, (rows, columns) = full[:-2], full[-2:][::-1] if turned else full[-2:]
            pitch = -(-columns // PITCH) * PITCH
            whole = arena.output(f"out {turned}", (*lead, rows, pitch), self.dtype)
            values = whole[..., :columns]
            padding.append(whole[..., columns:].view(torch.uint8))
            if self.wrong == "out":
                values = values.mT.contiguous().mT[..., :0]
            own = scale
            if self.scaling == "1x128":
                own = arena.output("out scales", (*lead, -(-columns // GROUP), rows), torch.float32).mT
            elif self.scaling != "tensor":
                shapes = {
                    "matrix": (1, 1),
                    "row": (rows, 1),
                    "128x128": (-(-rows // GROUP), -(-columns // GROUP)),
                }
                own = arena.output("out scales", (*lead, *shapes[self.scaling]), torch.float32)
            assert own is not None
            if len(self.shape) == 1:
                values, own = values[0], own if own is scale else own[0]
            made += [values, own]
        return tuple(made)

    def _check(self, found: tuple[torch.Tensor, ...], x: torch.Tensor, scale: torch.Tensor | None) -> None:
        assert len(found) == 2 * len(self._orders())
        x = x.resolve_neg()
        full = x if x.dim() > 1 else x[None]
        for n, turned in enumerate(self._orders()):
            values, scales = found[2 * n : 2 * n + 2]
            source = full.mT if turned else full
            expected = reference.quantize(source, self.dtype, scaling=self.scaling, scale=scale)
            if x.dim() == 1:
                expected = tuple(t[0] if t.dim() > 1 else t for t in expected)
            what = f"output {n}"
            if scale is None:
                check_same(scales, expected[1], f"{what}, scales")
            else:
                assert scales is scale
            check_same(values, expected[0], f"{what}, values")
            assert values.stride(-1) == 1 or values.shape[-1] <= 1
            assert values.dim() == 1 or values.numel() == 0 or values.stride(-2) % PITCH == 0


def draw_quantize(draw: Draw) -> QuantizeCase:
    """A case of `quantize`."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    scaling = pick.choice(_SCALINGS)
    transpose = pick.choice((False, True, "both"))
    lead = pick.choice(_LEADS[:7] if small else _LEADS)
    long = pick.random() < 0.08 and not small
    flat = pick.random() < 0.06 and scaling in ("tensor", "row", "1x128") and not transpose
    pool, aligned = _SMALL if small else _LARGE, draw.often(1, 16, 8, odds=0.4)
    m, k = draw.extent(pool), draw.extent(_LONG if long else pool, aligned)
    if long:
        m, lead = min(m, 7), lead if len(lead) == 1 and lead[0] < 4 else ()
    count = math.prod(lead)
    while count * m * k > (1 << 16 if small else _MOST):
        m, k = (-(-m // 2), k) if m > k else (m, k // 2)
    shape = (k,) if flat else (*lead, m, k)
    source = pick.choice((torch.bfloat16, torch.bfloat16, *WIDE))
    given = data.choice(_GIVEN) if scaling == "tensor" and pick.random() < 0.35 else None
    out, modes, dtype = pick.random() < 0.4, pick.choice((0, 1, 2)), pick.choice((E4M3, E5M2))
    x = draw.layout(len(shape))
    wrong = None
    if data.random() < 0.03:
        wrong = "out" if out else "scale"
    case = QuantizeCase(
        draw, shape, source, dtype, x, scaling, transpose, given=given, modes=modes, out=out,
        patterns=data.random() < 0.2, wrong=wrong, mode=draw.mode(),
    )  # fmt: skip
    if (wrong == "out" and 0 in shape) or len(shape) == 1:
        return replace(case, wrong=None)
    return replace(case, x=PLAIN) if wrong is not None else case
