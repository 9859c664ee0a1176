"""The product that `gemm_reduce` and `gemm_gated` write more than the result of: drawn, and laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.config.gemm_table import TABLES
from reference import gemm as reference
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_dense import DTYPES, draw_extents, fitting, table_name
from tests.fuzz.memory import PLAIN, Arena, Layout
from tests.fuzz.values import filler, peer

_FORCED_ODDS = 0.4
_SHAPES = ("full", "row", "column")


@dataclass(frozen=True)
class Product:
    """alpha · a @ b + beta · c + bias, and perhaps a residual. `extras`: kind of each extra tensor, as in
    `DenseCase`. `spoiled`: a row of a that holds NaN; -1: none."""

    m: int
    n: int
    k: int
    batches: tuple[int | None, int | None]
    dtype: torch.dtype
    out_dtype: torch.dtype
    a: Layout
    b: Layout
    extras: tuple[tuple[str, str], ...]
    alpha: float
    beta: float
    config: GemmConfig | None
    family: str | None
    exact: bool
    spoiled: int

    @property
    def features(self) -> list[str]:
        """For coverage."""
        names = ["empty"] if 0 in (self.m, self.n, self.k) else []
        names += ["negated"] if self.a.negated or self.b.negated else []
        names += ["stride 0"] if self.a.expanded or self.b.expanded else []
        return names + ([f"beside {table_name(self.config)}"] if self.config is not None else [])

    @property
    def lead(self) -> tuple[int, ...]:
        """The result's batch mode, if it has one."""
        sizes = [size for size in self.batches if size is not None]
        return (max(sizes),) if sizes else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The product's shape."""
        return (*self.lead, self.m, self.n)

    def lay_out(self, arena: Arena, seeds: Draw) -> Operands:
        """The operands in `arena`."""

        def tensor(
            name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout = PLAIN
        ) -> torch.Tensor:
            fill = filler(shape, dtype, seeds.value_seed(), seeds.settings.device, self.exact)
            spoiled = self.spoiled if name == "a" and 0 <= self.spoiled < self.m else None

            def contents(generation: int) -> torch.Tensor:
                values = fill(generation)
                if spoiled is not None:
                    values[..., spoiled, :] = torch.nan
                return values

            return arena.input(name, contents, layout)

        first, second = (() if size is None else (size,) for size in self.batches)
        a = tensor("a", (*first, self.m, self.k), self.dtype, self.a)
        b = tensor("b", (*second, self.k, self.n), self.dtype, self.b)
        shapes = {"full": self.shape, "row": (self.n,), "column": (self.m, 1), "n": (self.n,), "m": (self.m,)}
        options: dict[str, Any] = {}
        for name, kind in self.extras:
            dtype = torch.float32 if name == "bias" else self.out_dtype
            options[name] = tensor(name, shapes[kind], dtype)
            options.update({"bias_axis": kind} if name == "bias" else {})
        options.update({"alpha": self.alpha} if self.alpha != 1.0 else {})
        options.update({"beta": self.beta} if "c" in options else {})
        return Operands(self, a, b, options)


@dataclass(frozen=True)
class Operands:
    """A product's tensors, and the options that say what is added to it."""

    product: Product
    a: torch.Tensor
    b: torch.Tensor
    options: dict[str, Any]

    def forced(self, out: torch.Tensor | None) -> dict[str, Any]:
        """The family and configuration that the call asks for, and its result's place or dtype."""
        p = self.product
        found = {"family": p.family, "config": fitting(p.config, self.a, self.b), "out": out}
        return found if out is not None else {**found, "out_dtype": p.out_dtype}

    def exact(self, **more: Any) -> torch.Tensor:
        """The product in float64. more: activation, residual."""
        a, b = self.a.resolve_neg(), self.b.resolve_neg()
        return reference.gemm(a, b, **self._plain(), **more).expand(self.product.shape)

    def like(self, **more: Any) -> torch.Tensor:
        """PyTorch's in float32."""
        a, b = self.a.resolve_neg(), self.b.resolve_neg()
        return peer(a, b, torch.float32, **self._plain(), **more).expand(self.product.shape)

    def _plain(self) -> dict[str, Any]:
        options = dict(self.options)
        if options.pop("bias_axis", "n") == "m":
            options["bias"] = options["bias"][:, None]
        return options


def draw_product(draw: Draw, extras: tuple[str, ...]) -> Product:
    """A product with some of these extra tensors, of "c" and "residual", and a bias."""
    pick, data = draw.kernel, draw.data
    dtype = pick.choice(DTYPES)
    batches = draw.often((None, None), (3, 3), (3, None), (None, 2), (1, 3), (0, 0), odds=0.65)
    ranks = [2 if size is None else 3 for size in batches]
    family, config = draw.family_of_kernels(), None
    if pick.random() < _FORCED_ODDS and draw.settings.plant is None:
        families = [family] if family else (["sm90", "sm80"] if draw.arch() == "sm_90a" else ["sm80"])
        config = pick.choice(TABLES[pick.choice(families)]).config
        family = pick.choice((None, config.family))
    chosen = [("bias", pick.choice("nm"))] if pick.random() < 0.35 else []
    chosen += [(name, pick.choice(_SHAPES)) for name in extras if pick.random() < 0.3]
    m, n, k = draw_extents(draw, few=config is None)
    exact = data.random() < 0.5
    return Product(
        m, n, k, batches, dtype, draw.often(dtype, *DTYPES, odds=0.6), draw.layout(ranks[0]),
        draw.layout(ranks[1]), tuple(chosen),
        alpha=data.choice((1.0, 2.0, -0.5)) if pick.random() < 0.4 else 1.0,
        beta=data.choice((1.0, 0.0, 2.0)), config=config, family=family, exact=exact,
        spoiled=data.randrange(64) if not exact and data.random() < 0.15 else -1,
    )  # fmt: skip
