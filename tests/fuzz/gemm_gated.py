"""Cases of `gemm_gated`: every gate, with and without the product beside it, and calls that are wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.gates import GATES
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_beside import Operands, Product, draw_product
from tests.fuzz.memory import PLAIN, Arena, Layout
from tests.fuzz.planted import Operations

NAMES = ("a", "b", "activation", "c", "bias", "bias_axis", "alpha", "beta", "return_preact", "out",
         "preact_out", "out_dtype", "config", "family")  # fmt: skip
WRONG = {"odd": "b", "activation": "activation", "shape": "preact_out", "dtype": "preact_out",
         "an input": "preact_out", "itself": "preact_out"}  # fmt: skip
"""A mistake -> the argument that the error must name."""


@dataclass(frozen=True)
class GatedCase:
    """One call. `kept`: "no", "made" by the call, or "given": to a place of layout `place`. `wrong`: a key of
    `WRONG`."""

    draw: Draw = field(repr=False)
    product: Product
    activation: str
    out: Layout | None
    kept: str
    place: Layout
    wrong: str | None
    mode: Mode

    def __str__(self) -> str:
        return "gated " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["gemm_gated", f"mode {self.mode.value}", f"gate {self.activation}", f"preact {self.kept}"]
        return (*names, *self.product.features)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("gated values", self.draw.number, settings), Operations(settings)
        p, operands = self.product, self.product.lay_out(arena, seeds)
        halved = (*p.shape[:-1], p.n // 2)
        out = None if self.out is None else arena.output("out", halved, p.out_dtype, self.out)
        options: dict[str, Any] = {**operands.options, "activation": self.activation, **operands.forced(out)}
        if self.kept == "given":
            options["preact_out"] = arena.output("preact_out", p.shape, p.out_dtype, self.place)
        elif self.kept == "made":
            options["return_preact"] = True
        self._spoil(options, operands)
        a, b = operands.a, operands.b

        def run() -> tuple[torch.Tensor, ...]:
            found = operations.gemm_gated(a, b, **options)
            return (found,) if self.kept == "no" else tuple(found)

        return Call(
            run=run,
            check=lambda found: self._check(found, operands),
            arguments=NAMES,
            supports=None
            if self.mode is Mode.GRAPH
            else lambda: operations.gemm_gated_supports(a, b, **options),
            must_refuse=WRONG[self.wrong] if self.wrong else None,
            may_refuse=p.config is not None,
        )

    def _spoil(self, options: dict[str, Any], operands: Operands) -> None:
        """Make the argument wrong that is to be; "odd" is, by the columns of b."""
        p, device = self.product, operands.a.device
        if self.wrong == "activation":
            options["activation"] = "relu"
        elif self.wrong == "shape":
            options["preact_out"] = torch.empty((p.m, p.n // 2), dtype=p.out_dtype, device=device)
        elif self.wrong == "dtype":
            options["preact_out"] = torch.empty(p.shape, dtype=torch.float64, device=device)
        elif self.wrong == "itself":
            options["preact_out"] = torch.empty(1, dtype=p.out_dtype, device=device).expand(p.shape)
        elif self.wrong == "an input":
            options.update(c=torch.ones(p.shape, dtype=p.out_dtype, device=device), beta=1.0)
            options["preact_out"] = options["c"]

    def _check(self, found: tuple[torch.Tensor, ...], operands: Operands) -> None:
        p, gate = self.product, GATES[self.activation]
        assert tuple(found[0].shape) == (*p.shape[:-1], p.n // 2)
        assert all(x.dtype == p.out_dtype for x in found)
        exact, like = operands.exact(), operands.like()
        tolerance.check(found[0], gate.of_pairs(exact), gate.of_pairs(like).to(p.out_dtype))
        if self.kept == "no":
            return
        if p.exact:
            tolerance.check_exact(found[1], exact, case="preact")
        else:
            tolerance.check(found[1], exact, like.to(p.out_dtype), case="preact")


def draw_gated(draw: Draw) -> GatedCase:
    """A case of `gemm_gated`."""
    pick = draw.kernel
    activation = pick.choice(tuple(GATES))
    product = draw_product(draw, ("c",))
    product = replace(product, n=product.n + product.n % 2)
    rank = len(product.shape)
    out, place = (draw.layout(rank, negate=False, expand=False) for _ in range(2))
    given = pick.random() < 0.6
    kept = pick.choice(("no", "made", "given"))
    wrong = draw.data.choice(tuple(WRONG)) if draw.data.random() < 0.05 else None
    if wrong is not None:
        extents = {name: max(getattr(product, name), 2) for name in "mnk"}
        product = replace(product, a=PLAIN, b=PLAIN, extras=(), config=None, batches=(None, None), **extents)
        product = replace(product, n=product.n + (wrong == "odd"))
        given, kept = False, "no"
    return GatedCase(draw, product, activation, out if given else None, kept, place, wrong, draw.mode())
