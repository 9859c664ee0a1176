"""Cases of `gemm`: any layout, option, configuration and degenerate extent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.config.gemm import GemmConfig, Sm80GemmConfig
from kernels_dsl.config.gemm_table import TABLES
from reference import gemm as reference
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.epilogues import FUNCTIONS
from tests.fuzz.memory import PLAIN, Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler, peer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE_MN = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 47, 63, 64, 65, 77, 96, 127, 128, 129, 191, 255, 257, 320, 513,
            1000, 1001, 1537, 2304)  # fmt: skip
LARGE_K = (1, 2, 3, 7, 8, 15, 16, 31, 63, 64, 65, 100, 127, 128, 129, 255, 256, 511, 768, 1025, 4096, 8200)
SMALL_MN = (1, 2, 7, 15, 17, 33, 47, 64, 65, 127, 129, 200)
SMALL_K = (1, 3, 8, 15, 17, 33, 64, 65, 100, 130, 200)
_MOST_SMALL_WORK = 129 * 129 * 200
_FEW_SHAPES = 3
_ACTIVATIONS = (None, None, *ACTIVATIONS)
_SHAPES = ("full", "row", "column")
NAMES = ("a", "b", "c", "bias", "bias_axis", "residual", "alpha", "beta", "activation", "epilogue",
         "epilogue_args", "out", "out_dtype", "config", "family")  # fmt: skip


def table_name(config: GemmConfig) -> str:
    """A configuration of a table, by the fields that tell it from others there."""
    if isinstance(config, Sm80GemmConfig):
        return f"sm80 {config.tile_m}x{config.tile_n}x{config.warps_m}x{config.warps_n}"
    turned = " turned" if config.turned else ""
    cluster = f"{config.cluster_m}x{config.cluster_n}"
    return f"sm90 {config.tile_m}x{config.tile_n} {cluster} {config.schedule.value}{turned}"


@dataclass(frozen=True)
class DenseCase:
    """One call of `gemm`. `tensors`: kind of each extra tensor ("full", "row", "column", "self" for one that
    is `out` itself) by argument. `out`: None where the call makes the result. `overlap`: out shares memory
    with a, which must be refused. `shared`: b is a's own memory, transposed."""

    draw: Draw = field(repr=False)
    m: int
    n: int
    k: int
    batches: tuple[int | None, int | None]
    dtype: torch.dtype
    out_dtype: torch.dtype
    a: Layout
    b: Layout
    out: Layout | None
    extras: tuple[tuple[str, str], ...]
    bias_axis: str
    alpha: float
    beta: float
    activation: str | None
    function: str | None
    config: GemmConfig | None
    family: str | None
    exact: bool
    overlap: bool
    shared: bool
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["gemm", f"mode {self.mode.value}"]
        if self.config is not None:
            base = replace(self.config, split_k=1)
            names += [table_name(base)] + (["split K"] if self.config.split_k > 1 else [])
            names += ["stream K"] if getattr(self.config, "stream_k", False) else []
        names += ["empty"] if 0 in (self.m, self.n, self.k) else []
        names += ["negated"] if self.a.negated or self.b.negated else []
        names += ["stride 0"] if self.a.expanded or self.b.expanded else []
        names += ["own epilogue"] if self.function else []
        return tuple(names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape."""
        sizes = [size for size in self.batches if size is not None]
        return (max(sizes), self.m, self.n) if sizes else (self.m, self.n)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds = Draw("gemm values", self.draw.number, self.draw.settings)
        operations = Operations(settings)

        def tensor(
            name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout = PLAIN
        ) -> torch.Tensor:
            fill = filler(shape, dtype, seeds.value_seed(), settings.device, self.exact)
            return arena.input(name, fill, layout)

        lead = [() if size is None else (size,) for size in self.batches]
        a = tensor("a", (*lead[0], self.m, self.k), self.dtype, self.a)
        b = a.mT if self.shared else tensor("b", (*lead[1], self.k, self.n), self.dtype, self.b)
        out = None if self.out is None else arena.output("out", self.shape, self.out_dtype, self.out)
        if self.overlap:
            out = a[..., : self.n] if self.n <= self.k else a
        shapes = {"full": self.shape, "row": (self.n,), "column": (self.m, 1)}
        options: dict[str, Any] = {}
        for name, kind in self.extras:
            dtype = torch.float32 if name == "bias" else self.out_dtype
            shape = ((self.n,) if kind == "n" else (self.m,)) if name == "bias" else shapes[kind]
            options[name] = tensor(name, shape, dtype)
        if "bias" in options:
            options["bias_axis"] = self.bias_axis
        options.update({"alpha": self.alpha} if self.alpha != 1.0 else {})
        options.update({"beta": self.beta} if "c" in options else {})
        options.update({"activation": self.activation} if self.activation else {})
        function = FUNCTIONS[self.function] if self.function else None
        if function is not None:
            values = tuple(
                0.5 if kind == "number" else tensor(f"epilogue_args[{i}]", shapes[kind], self.out_dtype)
                for i, kind in enumerate(function.arguments)
            )
            options = {"epilogue": function.traced, "epilogue_args": values}
        config = fitting(self.config, a, b)
        forced: dict[str, Any] = {"out": out, "family": self.family, "config": config}
        if out is None:
            forced["out_dtype"] = self.out_dtype
        return Call(
            run=lambda: (operations.gemm(a, b, **options, **forced),),
            check=lambda results: self._check(results[0], a, b, options),
            arguments=NAMES,
            supports=None
            if self.mode is Mode.GRAPH
            else lambda: operations.supports(a, b, **options, **forced),
            must_refuse="out" if self.overlap else None,
            may_refuse=self.config is not None,
        )

    def _check(self, result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, options: dict[str, Any]) -> None:
        assert tuple(result.shape) == self.shape and result.dtype == self.out_dtype
        a, b = a.resolve_neg(), b.resolve_neg()
        if self.function is not None:
            apply = FUNCTIONS[self.function].in_torch
            values = [x.double() if isinstance(x, torch.Tensor) else x for x in options["epilogue_args"]]
            exact = apply(reference.gemm(a, b), *values)
            values = [x.float() if isinstance(x, torch.Tensor) else x for x in values]
            like = apply(peer(a, b, torch.float32), *values).to(self.out_dtype)
        else:
            options = dict(options)
            if options.pop("bias_axis", "n") == "m":
                options["bias"] = options["bias"][:, None]
            exact = reference.gemm(a, b, **options)
            like = peer(a, b, self.out_dtype, **options)
        exact, like = exact.expand(self.shape), like.expand(self.shape)
        if self.exact:
            tolerance.check_exact(result, exact)
        else:
            tolerance.check(result, exact, like)


def fitting(config: GemmConfig | None, a: torch.Tensor, b: torch.Tensor) -> GemmConfig | None:
    """`config` with loads as wide as the operands' rows are aligned, where it says how wide they are."""
    if not isinstance(config, Sm80GemmConfig):
        return config
    tile_k = config.tile_k * 2 // a.element_size()
    return replace(config, tile_k=tile_k, copy_bytes_a=_aligned(a), copy_bytes_b=_aligned(b))


def _aligned(x: torch.Tensor) -> int:
    """Bytes, at most 16, that divide the address of every row of an operand."""
    size = x.element_size()
    strides = [stride * size for stride, extent in zip(x.stride(), x.shape) if extent > 1 and stride != 1]
    return math.gcd(16, x.data_ptr(), *strides)


def forced_in_turn(draw: Draw) -> bool:
    """True if the cases of this block have a configuration of the tables."""
    return draw.block % 2 == 1


def _config(draw: Draw) -> GemmConfig | None:
    """A configuration of the tables, each in its turn, with K split or cut now and then."""
    if not forced_in_turn(draw):
        return None
    able = ("sm90", "sm80") if draw.arch() == "sm_90a" else ("sm80",)
    configs = [candidate.config for name in able for candidate in TABLES[name]]
    config = configs[draw.block // 2 % len(configs)]
    split = draw.often(1, 2, 4, 3, odds=0.8)
    if split > 1:
        return replace(config, split_k=split)
    if not isinstance(config, Sm80GemmConfig) and not config.turned and draw.kernel.random() < 0.15:
        return replace(config, stream_k=True)
    return config


def draw_extents(draw: Draw, few: bool) -> tuple[int, int, int]:
    """(M, N, K). Their multiples are the kernel's choices, so that cases of a block share alignments.

    few: a block of cases has a few shapes, as the operation chooses a configuration for each.
    """
    small = draw.settings.small
    along = SMALL_MN if small else LARGE_MN
    multiples = [draw.often(1, 8, 16, 2, 4, odds=0.4) for _ in range(3)]
    pools = (along, along, SMALL_K if small else LARGE_K)
    if few:
        chosen = [tuple(draw.kernel.choice(pool) for pool in pools) for _ in range(_FEW_SHAPES)]
        pools = [(extent,) for extent in draw.data.choice(chosen)]
    m, n, k = (draw.extent(pool, multiple) for pool, multiple in zip(pools, multiples))
    while small and m * n * k > _MOST_SMALL_WORK:
        m, n, k = (size if size <= 64 else size // 2 for size in (m, n, k))
    if k > 2000:
        m, n = min(m, 320), min(n, 1001)
    return m, n, k


def draw_dense(draw: Draw) -> DenseCase:
    """A case of `gemm`."""
    pick, planted = draw.kernel, draw.settings.plant is not None
    dtype = pick.choice(DTYPES)
    out_dtype = draw.often(dtype, *DTYPES, odds=0.6)
    batches = draw.often((None, None), (3, 3), (3, None), (None, 2), (1, 3), (2, 1), (0, 0), odds=0.65)
    rank_a, rank_b = (2 if size is None else 3 for size in batches)
    rank = max(rank_a, rank_b)
    exact = draw.data.random() < 0.5
    function = pick.choice(tuple(FUNCTIONS)) if pick.random() < 0.12 and not planted else None
    extras = []
    bias_axis = pick.choice("nm")
    if function is None:
        extras += [("bias", bias_axis)] if pick.random() < 0.35 else []
        extras += [(name, pick.choice(_SHAPES)) for name in ("c", "residual") if pick.random() < 0.3]
    family = draw.family_of_kernels()
    config = None if planted else _config(draw)
    if config is not None:
        family = pick.choice((None, config.family))
    # What activations other than relu do to integers is no longer exact: such a kernel gets normal values.
    activation = pick.choice(_ACTIVATIONS) if function is None else None
    exact = exact and activation in (None, "relu")
    m, n, k = draw_extents(draw, few=config is None)
    out = draw.layout(rank, negate=False, expand=False) if planted or pick.random() < 0.75 else None
    a, b = draw.layout(rank_a), draw.layout(rank_b)
    shared = rank_a == rank_b and pick.random() < 0.04 and batches[0] == batches[1]
    overlap = out is not None and not planted and pick.random() < 0.02 and out_dtype == dtype
    mode = draw.mode()
    if shared:
        n = m
    if overlap:
        out = PLAIN
        m, n, k = max(m, 1), max(n, 1), max(k, n, 1)
        n, a, batches, extras, config = min(n, k), Layout(), (None, None), [], None
        function, b, shared = None, Layout(), False
    return DenseCase(
        draw, m, n, k, batches, dtype, out_dtype, a=a, b=b, out=out, extras=tuple(extras),
        bias_axis=bias_axis,
        alpha=draw.data.choice((1.0, 2.0, -0.5)) if function is None and pick.random() < 0.4 else 1.0,
        beta=draw.data.choice((1.0, 0.0, 2.0)), activation=activation, function=function, config=config,
        family=family, exact=exact, overlap=overlap, shared=shared, mode=mode,
    )  # fmt: skip
