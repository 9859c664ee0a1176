"""Cases of `scaled_gemm`: all kinds of scales, both ways of summing, fp8 results, every configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.config.promotion import GROUP
from reference import quantize as quantization
from reference import scaled_gemm as reference
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.epilogues import FUNCTIONS
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
from tests.fuzz.gemm_dense import LARGE_K, LARGE_MN, SMALL_K, SMALL_MN
from tests.fuzz.memory import PLAIN, Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

_BLOCKS = {"1x128": (1, GROUP), "128x128": (GROUP, GROUP)}
_MOST_SMALL_WORK = 129 * 129 * 200
_MOST_MODELLED = 700 * 700
"""Elements of a result that is compared with the model of the tensor cores, which takes much memory."""
_SHAPES = ("full", "row", "column")
_FACTORS = (1.0, 4.0, 0.5, 0.0)
NAMES = ("a", "b", "scale_a", "scale_b", "scale_result", "amax", "c", "bias", "bias_axis", "residual",
         "alpha", "beta", "activation", "epilogue", "epilogue_args", "out", "out_dtype", "use_fast_accum",
         "config", "family")  # fmt: skip
_WRONG = ("scale_a", "scale_b", "scale_result", "amax", "out")


@dataclass(frozen=True)
class Scale:
    """The scale of one operand. kind: "tensor" (of `modes` modes), "matrix", "row" (of each row of a, each
    column of b), "1x128" or "128x128". lead: "" without a batch, "1" with one that broadcasts, "l"."""

    kind: str
    lead: str
    modes: int
    layout: Layout

    def __str__(self) -> str:
        return f"{self.lead}{self.kind}:{self.layout}"

    def shape(self, rows: int, k: int, batch: int | None) -> tuple[int, ...]:
        """For an operand of `rows` rows (of a; columns of b) in the order rows, K."""
        if self.kind == "tensor":
            return (1,) * self.modes
        groups = -(-k // GROUP)
        last = {
            "matrix": (1, 1), "row": (rows, 1), "1x128": (rows, groups),
            "128x128": (-(-rows // GROUP), groups),
        }[self.kind]  # fmt: skip
        if batch is None or self.lead == "":
            return last
        return (1 if self.lead == "1" else batch, *last)


@dataclass(frozen=True)
class ScaledCase:
    """One call of `scaled_gemm`. `b`: the layout of b's transpose. `odd`: the operand with bit patterns.
    `tensors`: kind of each extra tensor by argument. `wrong`: the argument that is not what it must be."""

    draw: Draw = field(repr=False)
    m: int
    n: int
    k: int
    batches: tuple[int | None, int | None]
    dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype
    a: Layout
    b: Layout
    out: Layout | None
    scales: tuple[Scale, Scale]
    fast: bool
    scale_result: float | None
    amax: bool
    tensors: tuple[tuple[str, str], ...]
    bias_axis: str
    alpha: float
    beta: float
    activation: str | None
    function: str | None
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
        names = ["scaled_gemm", f"mode {self.mode.value}", f"scaled_gemm {self.contents}"]
        names += [f"scale {scale.kind}" for scale in self.scales]
        if self.forced is not None:
            config, promoted = self.forced.config, self.k > GROUP or self.forced.sums != "promoted"
            plain = replace(config, split_k=1)
            names += [str(replace(self.forced, config=plain))] if promoted else []
            names += ["scaled split K"] if config.split_k > 1 else []
            names += ["scaled stream K"] if getattr(config, "stream_k", False) else []
        names += ["fp8 result"] if self.out_dtype not in WIDE else []
        names += ["amax"] if self.amax else []
        names += ["empty"] if 0 in (self.m, self.n, self.k) else []
        return tuple(names)

    @property
    def batch(self) -> int | None:
        """The product's batch."""
        sizes = [size for size in self.batches if size is not None]
        if not sizes:
            return None
        return sizes[0] if len(sizes) == 1 or sizes[1] == 1 else sizes[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape."""
        return (self.m, self.n) if self.batch is None else (self.batch, self.m, self.n)

    @property
    def groups(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Rows and columns of a and of b that share a scale, where scales are of 128 elements of K."""
        kinds = [scale.kind for scale in self.scales]
        return (_BLOCKS[kinds[0]], _BLOCKS[kinds[1]][::-1]) if kinds[0] in _BLOCKS else None

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds = Draw("fp8 scaled values", self.draw.number, self.draw.settings)
        operations, device = Operations(settings), settings.device
        made = []
        for i, (name, rows, layout) in enumerate((("a", self.m, self.a), ("b", self.n, self.b))):
            lead = () if self.batches[i] is None else (self.batches[i],)
            how = seeds.value_seed(), device, self.contents, self.odd == i
            made.append(arena.input(name, operand((*lead, rows, self.k), self.dtypes[i], *how), layout))
        for i, (name, rows) in enumerate((("scale_a", self.m), ("scale_b", self.n))):
            shape = self.scales[i].shape(rows, self.k, self.batch)
            if self.wrong == name:
                shape = (rows + 1, 3)
            how = seeds.value_seed(), device, self.contents, self.odd == i
            made.append(arena.input(name, scales(shape, *how), self.scales[i].layout if shape else PLAIN))
        a, b, scale_a, scale_b = made[0], made[1].mT, made[2], made[3]
        scale_b = scale_b.mT if scale_b.dim() > 1 else scale_b
        options = self._epilogue(arena, seeds, device)
        out = None if self.out is None else arena.output("out", self.shape, self.out_dtype, self.out)
        if self.wrong == "out":
            out = torch.empty((), dtype=self.out_dtype, device=device).expand(max(self.m, 2), max(self.n, 2))
        results = self._results(arena, device)
        forced: dict[str, Any] = {
            "out": out, "family": self.family, "use_fast_accum": self.fast,
            "config": fitting(None if self.forced is None else self.forced.config, a, b, out),
        }  # fmt: skip
        forced.update({"out_dtype": self.out_dtype} if out is None else {})
        amax = results.get("amax")

        def run() -> tuple[torch.Tensor, ...]:
            found = operations.scaled_gemm(a, b, scale_a, scale_b, **options, **forced, **results)
            assert out is None or found is out
            return (found,) if amax is None else (found, amax)

        def supports() -> str | None:
            return operations.scaled_gemm_supports(a, b, scale_a, scale_b, **options, **forced, **results)

        return Call(
            run=run,
            check=lambda found: self._check(found, (a, b, scale_a, scale_b), options, results),
            arguments=NAMES,
            supports=None if self.mode is Mode.GRAPH else supports,
            must_refuse=self.wrong,
            may_refuse=self.forced is not None,
        )

    def _results(self, arena: Arena, device: str) -> dict[str, torch.Tensor]:
        """Arguments for the result: its scale, and the place for its largest magnitude."""
        found = {}
        if self.scale_result is not None or self.wrong == "scale_result":
            factors = (1.0 if self.scale_result is None else self.scale_result, 2.0)
            found["scale_result"] = arena.input("scale_result", lambda g: torch.full((1,), factors[g]))
        if self.amax or self.wrong == "amax":
            size = 2 if self.wrong == "amax" else 1
            found["amax"] = arena.output("amax", (size,), torch.float32)
        return found

    def _epilogue(self, arena: Arena, seeds: Draw, device: str) -> dict[str, Any]:
        """The keywords of the epilogue."""
        dtype = self.out_dtype if self.out_dtype in WIDE else torch.bfloat16
        shapes = {"full": self.shape, "row": (self.n,), "column": (self.m, 1)}

        def tensor(name: str, shape: tuple[int, ...], of: torch.dtype = dtype) -> torch.Tensor:
            exact = self.contents != NORMAL
            return arena.input(name, filler(shape, of, seeds.value_seed(), device, exact))

        options: dict[str, Any] = {}
        for name, kind in self.tensors:
            if name == "bias":
                shape = (self.n,) if self.bias_axis == "n" else (self.m,)
                options |= {"bias": tensor(name, shape, torch.float32), "bias_axis": self.bias_axis}
            else:
                options[name] = tensor(name, shapes[kind])
        options |= {"alpha": self.alpha} if self.alpha != 1.0 else {}
        options |= {"beta": self.beta} if "c" in options else {}
        options |= {"activation": self.activation} if self.activation else {}
        if self.function is None:
            return options
        function = FUNCTIONS[self.function]
        values = tuple(
            0.5 if kind == "number" else tensor(f"epilogue_args[{i}]", shapes[kind])
            for i, kind in enumerate(function.arguments)
        )
        return {"epilogue": function.traced, "epilogue_args": values}

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        arguments: tuple[torch.Tensor, ...],
        options: dict[str, Any],
        results: dict[str, torch.Tensor],
    ) -> None:
        result = found[0]
        assert tuple(result.shape) == self.shape and result.dtype == self.out_dtype
        arguments = tuple(x.resolve_neg() for x in arguments)
        epilogue = {name: value for name, value in options.items() if not name.startswith("epilogue")}
        if epilogue.pop("bias_axis", "n") == "m":
            epilogue["bias"] = epilogue["bias"][:, None]

        def apply(product: torch.Tensor) -> torch.Tensor:
            if self.function is None:
                return product
            values = [
                x.to(product.dtype) if isinstance(x, torch.Tensor) else x for x in options["epilogue_args"]
            ]
            return FUNCTIONS[self.function].in_torch(product, *values)

        exact = apply(reference.scaled_gemm(*arguments, groups=self.groups, **epilogue)).expand(self.shape)
        if self.out_dtype not in WIDE:
            factor = results["scale_result"].double() if "scale_result" in results else 1.0
            expected = quantization.to_fp8(exact * factor, self.out_dtype)
            check_same(result, expected, "result", signed=False)
        elif self.contents != NORMAL:
            check_values(result, exact, "result")
        else:
            tolerance.check(result, exact, self._peer(arguments, epilogue, apply, exact))
        if self.amax:
            self._check_amax(found[1], exact, result)

    def _peer(
        self,
        arguments: tuple[torch.Tensor, ...],
        epilogue: dict[str, Any],
        apply: Callable[[torch.Tensor], torch.Tensor],
        exact: torch.Tensor,
    ) -> torch.Tensor:
        """The tensor cores' result: of each element the worse of one sum of all of K and of pieces.

        In one sum what is cut off before and after a large product of the other sign may cancel.
        """
        how = {"groups": self.groups, "fast": self.fast, "out_dtype": torch.float32}
        split = 1 if self.forced is None else self.forced.config.split_k
        pieces = {1, max(split, 2)} if self.fast and self.groups is None else {1}
        found = [
            apply(reference.as_tensor_cores(*arguments, **how, **epilogue, pieces=count)).expand(self.shape)
            for count in sorted(pieces)
        ]
        peer = found[0].to(self.out_dtype)
        for other in (x.to(self.out_dtype) for x in found[1:]):
            worse = (other.double() - exact).abs() > (peer.double() - exact).abs()
            peer = torch.where(worse, other, peer)
        return peer

    def _check_amax(self, amax: torch.Tensor, exact: torch.Tensor, result: torch.Tensor) -> None:
        """Of exact results to the bit; else as the result's own, which is rounded after it was taken."""
        if exact.numel() == 0:
            assert amax.item() == 0.0, f"amax is {amax.item()} of a result without elements"
        elif self.contents != NORMAL:
            check_values(amax, exact.abs().max().reshape(1), "amax")
        else:
            check_values(amax.to(self.out_dtype), result.abs().max().reshape(1), "amax")


def _extents(draw: Draw, contents: str) -> tuple[int, int, int]:
    """(M, N, K), as those of `gemm_dense`, smaller where the model of the tensor cores is compared with."""
    small = draw.settings.small
    along = SMALL_MN if small else LARGE_MN
    multiples = [draw.often(1, 8, 16, 2, 4, odds=0.4) for _ in range(2)]
    m, n = (draw.extent(along, multiple) for multiple in multiples)
    k = draw.extent(SMALL_K if small else LARGE_K, draw.often(16, 1, 4, 8, odds=0.6))
    while small and m * n * k > _MOST_SMALL_WORK:
        m, n, k = (size if size <= 64 else size // 2 for size in (m, n, k))
    if contents == NORMAL:
        k = min(k, 2048)
        while m * n > _MOST_MODELLED:
            m, n = (m // 2, n) if m > n else (m, n // 2)
    elif k > 2000:
        m, n = min(m, 320), min(n, 1001)
    return m, n, k


def _scale(draw: Draw, kind: str) -> Scale:
    modes = draw.kernel.choice((0, 1, 2))
    lead = draw.kernel.choice(("", "1", "l", "l"))
    rank = modes if kind == "tensor" else 3
    return Scale(kind, lead, modes, draw.layout(rank))


def _fit_layout(scale: Scale, batch: int | None, rows: int, k: int) -> Scale:
    """`scale` with the layout of the modes that it has."""
    rank = len(scale.shape(rows, k, batch))
    layout = scale.layout
    order = [mode for mode in layout.order if mode < rank]
    expanded = tuple(mode for mode in layout.expanded if mode < rank)
    return replace(scale, layout=replace(layout, order=tuple(order), expanded=expanded))


def _summing(draw: Draw, forced: Forced | None) -> tuple[tuple[str, str], bool]:
    """(kinds of both scales, use_fast_accum): what the configuration is for, or any."""
    pick = draw.kernel
    sums = forced.sums if forced is not None else pick.choice((FAST, "promoted", SCALED))
    if sums == SCALED:
        kinds = draw.often(("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "128x128"),
                           ("128x128", "1x128"), odds=0.4)  # fmt: skip
        return kinds, False
    plain = ("tensor", "matrix", "row", "row")
    return (pick.choice(plain), pick.choice(plain)), sums == FAST


def draw_scaled(draw: Draw, forced: Forced | None) -> ScaledCase:
    """A case of `scaled_gemm`, with a configuration or without."""
    pick, data = draw.kernel, draw.data
    kinds, fast = _summing(draw, forced)
    out_dtype = draw.often(torch.bfloat16, torch.float16, torch.float32, E4M3, E5M2, odds=0.3)
    contents = data.choice((INTEGERS, INTEGERS, NORMAL, PATTERNS))
    if contents == NORMAL and out_dtype not in WIDE:
        contents = INTEGERS
    function = pick.choice(tuple(FUNCTIONS)) if pick.random() < 0.12 else None
    bias_axis = pick.choice("nm")
    tensors = [("bias", bias_axis)] if pick.random() < 0.35 else []
    tensors += [(name, pick.choice(_SHAPES)) for name in ("c", "residual") if pick.random() < 0.25]
    activation = draw.often(None, *ACTIVATIONS, odds=0.6)
    if contents != NORMAL and activation not in (None, "relu"):
        contents = NORMAL if out_dtype in WIDE else contents
        activation = activation if out_dtype in WIDE else None
    alpha = data.choice((2.0, -0.5, 0.25)) if pick.random() < 0.3 else 1.0
    if function is not None:
        tensors, activation, alpha = [], None, 1.0
    config_change = pick.random()
    if forced is not None and contents != PATTERNS:
        forced = _changed(forced, config_change, pick.choice((2, 3, 4)))
    family = draw.family_of_kernels()
    if forced is not None:
        family = pick.choice((None, forced.config.family))
    batches = draw.often((None, None), (3, 3), (3, None), (None, 2), (1, 3), (2, 1), (0, 0), odds=0.65)
    ranks = [2 if size is None else 3 for size in batches]
    made = [_scale(draw, kind) for kind in kinds]
    a, b = (draw.layout(rank, negate=False) for rank in ranks)
    out = draw.layout(max(ranks), negate=False, expand=False) if pick.random() < 0.75 else None
    dtypes = (pick.choice((E4M3, E4M3, E5M2)), pick.choice((E4M3, E4M3, E5M2)))
    amax, result = pick.random() < 0.2, pick.random() < 0.7
    m, n, k = _extents(draw, contents)
    if forced is not None and forced.sums == "promoted" and 0 < k <= GROUP:
        k += GROUP
    forced = forced if forced is None else _with_whole_tiles(forced, k)
    wrong = data.choice(_WRONG) if data.random() < 0.03 and forced is None else None
    if k == 0 and contents == PATTERNS:
        contents = INTEGERS  # a scale that is NaN meets the sum of nothing: no product says what that gives
    if wrong is not None:
        m, n, k, out_dtype, contents = max(m, 2), max(n, 2), max(k, 1), torch.bfloat16, INTEGERS
    case = ScaledCase(
        draw, m, n, k, batches, dtypes, out_dtype, a=with_exact_sums(a, contents),
        b=with_exact_sums(b, contents), out=out, scales=(made[0], made[1]), fast=fast,
        scale_result=data.choice(_FACTORS) if result and out_dtype not in WIDE else None, amax=amax,
        tensors=tuple(tensors), bias_axis=bias_axis, alpha=alpha, beta=data.choice((1.0, 0.0, 2.0)),
        activation=activation, function=function, forced=forced, family=family, contents=contents,
        odd=data.randrange(2), wrong=wrong, mode=draw.mode(),
    )  # fmt: skip
    fitted = [_fit_layout(s, case.batch, rows, k) for s, rows in zip(case.scales, (m, n))]
    return replace(case, scales=(fitted[0], fitted[1]))


def _with_whole_tiles(forced: Forced, k: int) -> Forced:
    """Without a split of K into more parts than it has tiles."""
    config: Any = forced.config
    tile_k = config.tile_k or GROUP
    return forced if config.split_k <= -(-k // tile_k) else replace(forced, config=replace(config, split_k=1))


def _changed(forced: Forced, chance: float, split: int) -> Forced:
    """Now and then with K split, or with tiles cut along K."""
    config: Any = forced.config
    if chance < 0.12:
        return replace(forced, config=replace(config, split_k=split))
    if chance < 0.24 and config.family == "sm90":
        return replace(forced, config=replace(config, stream_k=True))
    return forced
