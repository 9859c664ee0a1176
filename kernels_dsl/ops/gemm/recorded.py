"""Plans of products that autograd records: a repeated call that wants gradients costs a launch and a node.

The operator's own way, through PyTorch's dispatcher, costs ten times the host time; torch.compile, modes and
transforms still take it. The nodes are in `nodes`, which calls without gradients do not import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from kernels_dsl.ops.gemm.arguments import ProductArguments
from lowering.records import NamedTuple, frozen

_NONE_GIVEN = (None, None, None)


if TYPE_CHECKING:
    from typing import Protocol

    class ProductPlan(Protocol):
        """The common part of all products' plans: see `gemm.plan.Plan`."""

        @property
        def run(self) -> Callable[..., torch.Tensor]: ...

        @property
        def operands(self) -> Callable[[tuple[Any, ...]], Any] | None: ...


@frozen(eq=False)
class Recorded:
    """The plan of a product whose calls autograd records.

    `node`: class of the node. `indices`: the operator's arguments before the factors. `like`: shapes and
    dtypes of c, bias and residual. `keywords`: those of the operator, alpha and beta apart. `products`: makes
    the products of the backward pass, by the operators' names, of the call cache that they use. `operator`:
    registers the operators. `kept`: makes the place of the product itself, the plan's last operand, where the
    backward pass has it from the forward pass. `factors`: makes the function from (gradient, left, right)
    to gradients of the factors, for tensors like some. `gradients`: a call cache of backward passes.
    """

    node: Any
    plan: ProductPlan
    indices: tuple[torch.Tensor, ...]
    like: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    keywords: dict[str, Any]
    products: Callable[[dict[Any, Any]], Any]
    operator: Callable[[], Any]
    kept: Callable[[], torch.Tensor] | None = None
    factors: Callable[..., Callable[..., Any] | None] | None = None
    gradients: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def again(self) -> bool:
        """True if the backward pass computes the product again."""
        return self.keywords["activation"] is not None

    @cached_property
    def linear(self) -> bool:
        """True if gradients of the factors and of a bias are all there can be, products and a sum."""
        like_c, _, like_residual = self.like
        return not self.again and self.kept is None and like_c is like_residual is None

    def run(
        self,
        calls: dict[Any, Any],
        factors: Sequence[torch.Tensor],
        alpha: float,
        beta: float,
        extras: tuple[Any, ...],
    ) -> torch.Tensor:
        """The product of the first two tensors of `factors`. `extras`: c, bias and residual, or nothing."""
        call = RecordedCall(self, calls, float(alpha), float(beta))
        # `Function.apply` looks for transforms besides, which such a call has none of.
        apply: Any = super(torch.autograd.Function, self.node).apply  # type: ignore[misc]
        result: torch.Tensor = apply(call, factors[0], factors[1], *(extras or _NONE_GIVEN))
        return result

    def of_call(self, call: ProductArguments, calls: dict[Any, Any]) -> torch.Tensor:
        """The product of a call's record."""
        alpha, beta, *extras = call.operand_values()
        return self.run(calls, call.factors, alpha, beta, tuple(extras))


class RecordedCall(NamedTuple):
    """A call beside its tensors. `calls`: the call cache of products like it."""

    recorded: Recorded
    calls: dict[Any, Any]
    alpha: float
    beta: float
