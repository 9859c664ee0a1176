"""Cases of `gemm_reduce`: every reduction of rows and columns, any epilogue, and calls that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.blocks.reduce.reductions import REDUCTIONS
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.epilogues import FUNCTIONS
from tests.fuzz.gemm_beside import Operands, Product, draw_product
from tests.fuzz.memory import PLAIN, Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import FEW, at_worst, filler, scaled_draws

NAMES = ("a", "b", "reduce", "dim", "c", "bias", "bias_axis", "residual", "alpha", "beta", "activation",
         "epilogue", "epilogue_args", "out", "reduced_out", "out_dtype", "config", "family")  # fmt: skip
WRONG = {"reduce": "reduce", "dim": "dim", "shape": "reduced_out", "dtype": "reduced_out",
         "itself": "reduced_out", "an input": "reduced_out"}  # fmt: skip
"""A mistake -> the argument that the error must name."""
_EXACT = 1 << 22
"""Sums of halves up to here are exact in float32."""


@dataclass(frozen=True)
class ReducedCase:
    """One call. `out`, `place`: layouts of the result and its reduction; None: the call makes them. `place`
    has a mode of size 1 at the end. `function`: of `FUNCTIONS`, an epilogue; `named`: it is registered, and
    given by its name. `wrong`: of `WRONG`."""

    draw: Draw = field(repr=False)
    product: Product
    reduce: str
    dim: int
    out: Layout | None
    place: Layout | None
    activation: str | None
    function: str | None
    named: bool
    wrong: str | None
    mode: Mode

    def __str__(self) -> str:
        return "reduced " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        rows = "rows" if self.dim == -1 else "columns"
        names = ["gemm_reduce", f"mode {self.mode.value}", f"{self.reduce} of {rows}"]
        own = ["own epilogue", *(["register_epilogue"] if self.named else [])] if self.function else []
        return (*names, *self.product.features, *own)

    @property
    def lines(self) -> tuple[int, ...]:
        """The reduction's shape."""
        return (*self.product.lead, self.product.m if self.dim == -1 else self.product.n)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("reduced values", self.draw.number, settings), Operations(settings)
        p, operands = self.product, self.product.lay_out(arena, seeds)
        out = None if self.out is None else arena.output("out", p.shape, p.out_dtype, self.out)
        place = None
        if self.place is not None:
            place = arena.output("reduced_out", (*self.lines, 1), torch.float32, self.place)[..., 0]
        options = {**operands.options, "reduce": self.reduce, "dim": self.dim}
        options.update({"activation": self.activation} if self.activation else {})
        values: tuple[Any, ...] = ()
        if self.function is not None:
            values = self._function_values(arena, seeds)
            epilogue: Any = FUNCTIONS[self.function].traced
            if self.named:
                operations.register_epilogue(f"fuzz {self.function}", epilogue)
                epilogue = f"fuzz {self.function}"
            options.update(epilogue=epilogue, epilogue_args=values)
        options.update(reduced_out=place, **operands.forced(out))
        self._spoil(options, operands)
        identity = REDUCTIONS[self.reduce].identity
        nothing = identity is None and p.shape[self.dim] == 0
        named = WRONG[self.wrong] if self.wrong else "reduce" if nothing else None
        a, b = operands.a, operands.b
        return Call(
            run=lambda: tuple(operations.gemm_reduce(a, b, **options)),
            check=lambda found: self._check(found, operands, values),
            arguments=NAMES,
            supports=None
            if self.mode is Mode.GRAPH
            else lambda: operations.gemm_reduce_supports(a, b, **options),
            must_refuse=named,
            may_refuse=p.config is not None,
        )

    def _function_values(self, arena: Arena, seeds: Draw) -> tuple[Any, ...]:
        p = self.product
        shapes = {"full": p.shape, "row": (p.n,), "column": (p.m, 1)}

        def value(index: int, kind: str) -> Any:
            if kind == "number":
                return 0.5
            fill = filler(shapes[kind], p.out_dtype, seeds.value_seed(), seeds.settings.device, p.exact)
            return arena.input(f"epilogue_args[{index}]", fill)

        assert self.function is not None
        return tuple(value(i, kind) for i, kind in enumerate(FUNCTIONS[self.function].arguments))

    def _spoil(self, options: dict[str, Any], operands: Operands) -> None:
        """Make the argument wrong that is to be."""
        device = operands.a.device
        if self.wrong == "reduce":
            options["reduce"] = "mean"
        elif self.wrong == "dim":
            options["dim"] = 0
        elif self.wrong == "shape":
            options["reduced_out"] = torch.empty((*self.lines, 2), device=device)
        elif self.wrong == "dtype":
            options["reduced_out"] = torch.empty(self.lines, dtype=torch.bfloat16, device=device)
        elif self.wrong == "itself":
            options["reduced_out"] = torch.empty(1, device=device).expand(self.lines)
        elif self.wrong == "an input":
            options["bias"] = torch.ones(self.lines[-1], device=device)
            options["bias_axis"] = "m" if self.dim == -1 else "n"
            options["reduced_out"] = options["bias"]

    def _check(self, found: tuple[torch.Tensor, ...], operands: Operands, values: tuple[Any, ...]) -> None:
        out, reduced = found
        assert tuple(out.shape) == self.product.shape and out.dtype == self.product.out_dtype
        assert tuple(reduced.shape) == self.lines and reduced.dtype == torch.float32
        exact, like = (
            self._result(operands.exact, torch.float64, values),
            self._result(operands.like, torch.float32, values),
        )
        if self.product.exact:
            tolerance.check_exact(out, exact)
        else:
            tolerance.check(out, exact, like.to(out.dtype))
        if not reduced.numel():
            return
        row = REDUCTIONS[self.reduce]
        right = (
            row.exact(exact, self.dim) if exact.shape[self.dim] else torch.full_like(reduced, row.identity)
        )
        if self.product.exact and self._is_exact(exact):
            tolerance.check_exact(reduced, right, case="reduced")
            return
        as_rows = (-1, self.lines[-1])
        peer = row.exact(like, self.dim) if like.shape[self.dim] else right.float()
        x, y, z = (t.reshape(as_rows) for t in (reduced, right, peer))
        if x.numel() < FEW and not tolerance.measure(x, y, z).ok:
            z = at_worst(y, z, self._worst(operands, values, right).reshape(as_rows))
        # Equal elements are rounded the same way at each addition, in whatever order: errors do not average.
        repeated = self.product.a.expanded or self.product.b.expanded
        tolerance.check(x, y, z, ulps=4.0 if repeated else 1.0, case="reduced")

    def _result(
        self, product: Callable[..., torch.Tensor], dtype: torch.dtype, values: tuple[Any, ...]
    ) -> torch.Tensor:
        """The result, of a product by `product`."""
        if self.function is not None:
            given = [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in values]
            return FUNCTIONS[self.function].in_torch(product(), *given).expand(self.product.shape)
        return product(activation=self.activation)

    def _is_exact(self, exact: torch.Tensor) -> bool:
        """True if every partial sum is a number that float32 has."""
        if not exact.numel() or not REDUCTIONS[self.reduce].summed:
            return True
        sizes = exact.abs() if self.reduce == "sum" else exact.square()
        return float(sizes.sum(self.dim).max()) < _EXACT

    def _worst(self, operands: Operands, values: tuple[Any, ...], right: torch.Tensor) -> torch.Tensor:
        """The largest errors of PyTorch's reduction in several draws."""
        row, error = REDUCTIONS[self.reduce], torch.zeros_like(right)
        tensors = {"a": operands.a.resolve_neg(), "b": operands.b.resolve_neg()}
        numbered = {str(i): x for i, x in enumerate(values)}
        for factors, options, others in scaled_draws(tensors, operands.options, numbered):
            drawn = replace(operands, **factors, options=options)
            given = tuple(others.values())
            exact, like = (
                row.exact(self._result(drawn.exact, torch.float64, given), self.dim),
                row.exact(self._result(drawn.like, torch.float32, given), self.dim),
            )
            error = torch.maximum(error, (like - exact).abs())
        return error


def draw_reduced(draw: Draw) -> ReducedCase:
    """A case of `gemm_reduce`."""
    pick, planted = draw.kernel, draw.settings.plant is not None
    function = pick.choice(tuple(FUNCTIONS)) if pick.random() < 0.2 and not planted else None
    activation = pick.choice((None, None, *ACTIVATIONS))
    product = draw_product(draw, ("c", "residual"))
    if function is not None:
        activation = None
        product = replace(product, extras=(), alpha=1.0)
    product = replace(product, exact=product.exact and activation in (None, "relu"))
    rank = len(product.shape)
    out = draw.layout(rank, negate=False, expand=False)
    place = draw.layout(rank, negate=False, expand=False)
    with_out, with_place = (planted or pick.random() < 0.6 for _ in range(2))
    wrong = draw.data.choice(tuple(WRONG)) if draw.data.random() < 0.05 and not planted else None
    if wrong is not None:  # what else is wrong with such a call must not come first
        extents = {name: max(getattr(product, name), 1) for name in "mnk"}
        product = replace(product, extras=(), config=None, batches=(None, None), **extents)
        with_out, with_place, function, activation = False, False, None, None
        product = replace(product, a=PLAIN, b=PLAIN, m=max(product.m, 2), n=max(product.n, 2))
    return ReducedCase(
        draw, product, pick.choice(tuple(REDUCTIONS)), pick.choice((-1, -2)), out if with_out else None,
        place if with_place else None, activation, function, pick.random() < 0.7, wrong, draw.mode(),
    )  # fmt: skip
