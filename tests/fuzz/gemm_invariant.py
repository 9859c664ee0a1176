"""Cases of products with `batch_invariant`: rows have the same bits in any batch of rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from kernels_dsl.blocks.epilogue.gates import GATES
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_beside import Operands, Product, draw_product
from tests.fuzz.memory import Arena, Layout, same_bits
from tests.fuzz.planted import Operations

OPERATIONS = ("gemm", "gemm_gated", "gemm_reduce")
NAMES = ("a", "b", "c", "bias", "out_dtype", "family", "reduce", "activation")


@dataclass(frozen=True)
class InvariantCase:
    """One call of `operation`, and one of `rows` rows of a from `first` on, copied to the layout `again`."""

    draw: Draw = field(repr=False)
    operation: str
    product: Product
    first: int
    rows: int
    again: Layout
    mode: Mode

    def __str__(self) -> str:
        return "invariant " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return (f"{self.operation} batch_invariant", f"mode {self.mode.value}", *self.product.features)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("invariant values", self.draw.number, settings), Operations(settings)
        operands = self.product.lay_out(arena, seeds)
        kept = slice(self.first, self.first + self.rows)

        def of_rows(generation: int) -> torch.Tensor:
            fresh = Arena(settings.device)
            again = Draw("invariant values", self.draw.number, settings)
            a = self.product.lay_out(fresh, again).a
            fresh.freeze()
            fresh.refill(generation)
            return a.resolve_neg()[..., kept, :].clone()

        part = arena.input("rows", of_rows, self.again)
        options = {**operands.options, "batch_invariant": True, **operands.forced(None)}
        function = getattr(operations, self.operation)

        def call(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found = function(a, operands.b, **options)
            return found if isinstance(found, tuple) else (found,)

        def run() -> tuple[torch.Tensor, ...]:
            return (*call(operands.a), *call(part))

        return Call(run, lambda found: self._check(found, operands), NAMES)

    def _check(self, found: tuple[torch.Tensor, ...], operands: Operands) -> None:
        whole, part = found[: len(found) // 2], found[len(found) // 2 :]
        rows = slice(self.first, self.first + self.rows)
        for index, (x, y) in enumerate(zip(whole, part)):
            own = x[..., rows] if index else x[..., rows, :]  # reductions of rows have no columns
            assert same_bits(own, y), f"rows {rows} have other bits alone, in result {index}"
        exact, like = operands.exact(), operands.like()
        if self.operation == "gemm_gated":
            gate = GATES["swiglu"]
            exact, like = gate.of_pairs(exact), gate.of_pairs(like)
        tolerance.check(whole[0], exact, like.to(whole[0].dtype))


def draw_invariant(draw: Draw) -> InvariantCase:
    """A case of `gemm`, `gemm_gated` or `gemm_reduce`."""
    pick, data = draw.kernel, draw.data
    operation = pick.choice(OPERATIONS)
    product = draw_product(draw, ("c",))
    extras = tuple((name, "n" if name == "bias" else "row") for name, _ in product.extras)
    m, n = max(product.m, 1), product.n + product.n % 2 * (operation == "gemm_gated")
    product = replace(
        product, m=m, n=n, extras=extras, exact=False, spoiled=-1, config=None, beta=2.0, family=None
    )
    first = data.randrange(m)
    rows = data.randint(1, m - first)
    again = draw.layout(2 if product.batches[0] is None else 3, expand=False)
    return InvariantCase(draw, operation, product, first, rows, again, draw.mode(graph=False))
