"""Cases of the gradients of `gemm`, `gemm_gated`, `gemm_reduce` and `grouped_gemm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.blocks.reduce.reductions import REDUCTIONS
from reference import gemm as reference
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_beside import Operands, Product, draw_product
from tests.fuzz.gemm_jumps import JUMPS, at_jumps
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations
from tests.fuzz.values import FEW, at_worst, filler, scaled_draws

OPERATIONS = ("gemm", "gemm_gated", "gemm_reduce")
NAMES = ("a", "b", "c", "bias", "residual", "alpha", "beta", "activation")
_LEAVES = ("a", "b", "c", "bias", "residual")
_CHOICES = {"gemm": (None, "relu", "silu", "gelu"), "gemm_gated": tuple(GATES), "gemm_reduce": (None, "silu")}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class GradientCase:
    """One call and its backward pass. asked: the tensors whose gradients are asked for."""

    draw: Draw = field(repr=False)
    operation: str
    product: Product
    activation: str | None
    reduce: str
    dim: int
    asked: tuple[str, ...]
    mode: Mode

    def __str__(self) -> str:
        return "gradient " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return (f"gradient of {self.operation}", f"mode {self.mode.value}", *self.product.features)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("gradient values", self.draw.number, settings), Operations(settings)
        operands, p = self.product.lay_out(arena, seeds), self.product
        gated = self.operation == "gemm_gated"
        shapes = [((*p.shape[:-1], p.n // 2) if gated else p.shape, p.out_dtype)]
        if self.operation == "gemm_reduce":
            shapes.append(((*p.lead, p.m if self.dim == -1 else p.n), torch.float32))
        received = [
            arena.input(f"gradient {i}", filler(shape, dtype, seeds.value_seed(), settings.device, False))
            for i, (shape, dtype) in enumerate(shapes)
        ]
        given = {"a": operands.a, "b": operands.b, **operands.options}
        function = getattr(operations, self.operation)
        options = {**self._options(), "family": p.family, "out_dtype": p.out_dtype}

        def run() -> tuple[torch.Tensor, ...]:
            def result(tensors: dict[str, Any]) -> Any:
                return function(**tensors, **options)

            return self._gradients(result, given, received)

        return Call(run, lambda found: self._check(found, operands, received), NAMES)

    def _options(self) -> dict[str, Any]:
        options = {} if self.activation is None else {"activation": self.activation}
        return {**options, "reduce": self.reduce, "dim": self.dim} if self._reduces else options

    @property
    def _reduces(self) -> bool:
        return self.operation == "gemm_reduce"

    def _gradients(
        self,
        result: Callable[[dict[str, Any]], Any],
        given: dict[str, Any],
        received: list[torch.Tensor],
        unused: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients. unused: a tensor that has no part, such as c with a beta of 0, has zeros."""
        tensors = dict(given)
        for name in self._leaves(given):
            tensors[name] = given[name].detach().requires_grad_()
        found = result(tensors)
        found = found if isinstance(found, tuple) else (found,)
        leaves = [tensors[name] for name in self._leaves(given)]
        given_back = [x.to(y.dtype) for x, y in zip(received, found)]
        return torch.autograd.grad(found, leaves, given_back, materialize_grads=unused)

    def _leaves(self, given: dict[str, Any]) -> list[str]:
        """The tensors that have a gradient; a's, where none of those asked for is there."""
        return [name for name in self.asked if name in given] or ["a"]

    def _check(
        self, found: tuple[torch.Tensor, ...], operands: Operands, received: list[torch.Tensor]
    ) -> None:
        given = {"a": operands.a.resolve_neg(), "b": operands.b.resolve_neg(), **operands.options}
        exact, like = self._references(given, received)
        if self.activation in JUMPS:
            wide = _wide(given)
            like = tuple(
                y + (z.double() - y).abs() + slack
                for y, z, slack in zip(exact, like, self._slack(wide, received))
            )
        for name, x, y, z in zip(self._leaves(given), found, exact, like):
            assert x.shape == given[name].shape and x.dtype == given[name].dtype
            if 0 < x.numel() < FEW and not tolerance.measure(x, y, z, ulps=4.0).ok:
                z = at_worst(y, z, self._worst(given, received)[name])
            tolerance.check(x, y, z, ulps=4.0, tile=self._tile(x.shape), case=f"gradient of {name}")

    def _references(
        self, given: dict[str, Any], received: list[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The gradients in float64, and PyTorch's."""
        wide = [x.double() for x in received]
        exact = self._gradients(self._by(reference.gemm), _wide(given), wide, unused=True)
        return exact, self._gradients(self._by(self._same_dtype), given, received, unused=True)

    def _worst(self, given: dict[str, Any], received: list[torch.Tensor]) -> Tensors:
        """The largest errors of PyTorch's gradients in several draws."""
        worst: Tensors = {}
        numbered = {str(i): x for i, x in enumerate(received)}
        for tensors, others in scaled_draws(given, numbered):
            found = self._references(tensors, list(others.values()))
            for name, exact, like in zip(self._leaves(given), *found):
                error = (like.double() - exact).abs()
                worst[name] = torch.maximum(error, worst.get(name, error))
        return worst

    def _by(self, product: Callable[..., torch.Tensor]) -> Callable[[dict[str, Any]], Any]:
        """The operation, of a product by PyTorch."""

        def result(tensors: dict[str, Any]) -> Any:
            gated = self.operation == "gemm_gated"
            z = self._before_gate(product, tensors, **({} if gated else {"activation": self.activation}))
            if gated:
                assert self.activation is not None
                z = GATES[self.activation].of_pairs(z)
            return (z, REDUCTIONS[self.reduce].exact(z, self.dim)) if self._reduces else z

        return result

    def _tile(self, shape: Sequence[int]) -> tuple[int, int]:
        """The whole gradient, if an operand's rows or columns are all the same: so are the errors in them."""
        repeated = self.product.a.expanded or self.product.b.expanded
        return (max(shape[-2:]), shape[-1]) if repeated else (64, 64)

    def _before_gate(
        self, product: Callable[..., torch.Tensor], tensors: dict[str, Any], **more: Any
    ) -> torch.Tensor:
        tensors = dict(tensors)
        if tensors.pop("bias_axis", "n") == "m":
            tensors["bias"] = tensors["bias"][:, None]
        return product(**tensors, **more).expand(self.product.shape)

    def _slack(self, wide: dict[str, Any], received: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Sums of what elements near a jump of the derivative may be off by, for each gradient."""
        assert self.activation is not None

        def before(tensors: dict[str, Any]) -> torch.Tensor:
            kept = {name: x for name, x in tensors.items() if name != "residual"}
            return self._before_gate(reference.gemm, kept)

        sizes = {n: x if isinstance(x, str) else abs(x) for n, x in wide.items()}
        given = self.activation, before(wide), before(sizes), received[0].double(), self.product.dtype
        return self._gradients(before, sizes, [at_jumps(*given)], unused=True)

    def _same_dtype(self, **tensors: Any) -> torch.Tensor:
        return reference.gemm_same_dtype(**tensors, out_dtype=self.product.out_dtype)


def _wide(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def draw_gradient(draw: Draw) -> GradientCase:
    """A case of gradients."""
    pick = draw.kernel
    operation = pick.choice(OPERATIONS)
    product = draw_product(draw, ("c",) if operation == "gemm_gated" else ("c", "residual"))
    n = product.n + (product.n % 2 if operation == "gemm_gated" else 0)
    small = {name: min(getattr(product, name), 96) for name in "mk"} if draw.settings.small else {}
    product = replace(
        product, **{"n": n, **small}, config=None, exact=False, spoiled=-1, out_dtype=product.dtype
    )
    asked = pick.choice((_LEAVES, ("a",), ("b",), ("a", "b"), ("c", "bias"), ("b", "residual")))
    reduce = pick.choice([name for name, row in REDUCTIONS.items() if row.backward is not None])
    return GradientCase(
        draw, operation, product, pick.choice(_CHOICES[operation]), reduce, pick.choice((-1, -2)), asked,
        draw.mode(graph=False),
    )  # fmt: skip
