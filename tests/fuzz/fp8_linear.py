"""Cases of `scaled_linear` and `ScaledLinear`: the output, and the gradients of all that can have one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from reference import quantize as quantization
from reference import scaled_gemm as reference
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_values import E4M3, E5M2, WIDE
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

NAMES = ("x", "weight", "bias", "recipe", "grad_dtype")
_LARGE = (1, 2, 7, 16, 33, 64, 100, 128, 129, 200, 256, 384, 513, 600)
_SMALL = (1, 7, 16, 33, 64, 129)
_BLOCK = {"output": 128, "dx": 128, "dw": 1}
"""Rows of the right operand that share a scale with the recipe "block"."""
Pair = tuple[torch.Tensor, torch.dtype]


def check_product(left: Pair, right: Pair, recipe: str, found: torch.Tensor, what: str, **rest: Any) -> None:
    """`found` is left @ rightᵀ + bias of quantised operands, by the tolerance rule. rest: bias, fast."""
    kinds = ("1x128", "1x128" if _BLOCK[what] == 1 else "128x128") if recipe == "block" else (recipe, recipe)
    (a, scale_a), (b, scale_b) = (
        quantization.quantize(x.contiguous(), dtype, scaling=kind)
        for (x, dtype), kind in zip((left, right), kinds)
    )
    arguments = (a, b.mT, scale_a, scale_b if recipe == "tensor" else scale_b.mT)
    groups = ((1, 128), (128, _BLOCK[what])) if recipe == "block" else None
    fast = rest.pop("fast", False)
    exact = reference.scaled_gemm(*arguments, groups=groups, **rest)
    peer = reference.as_tensor_cores(*arguments, groups=groups, fast=fast, out_dtype=found.dtype, **rest)
    tolerance.check(found, exact, peer, case=what)


@dataclass(frozen=True)
class LinearCase:
    """One call, and its backward pass if `gradients`. `lead`: of x; `grouped`: a weight for each matrix of x.
    `layer`: by `ScaledLinear`. `wrong`: the argument that is not what it must be."""

    draw: Draw = field(repr=False)
    lead: tuple[int, ...]
    k: int
    n: int
    grouped: bool
    dtypes: tuple[torch.dtype, torch.dtype]
    x: Layout
    weight: Layout
    bias: bool
    recipe: str
    grad_dtype: torch.dtype
    fast: bool
    gradients: bool
    layer: bool
    wrong: str | None
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        name = "ScaledLinear" if self.layer else "scaled_linear"
        names = [name, f"mode {self.mode.value}", f"scaled_linear {self.recipe}"]
        names += ["scaled_linear gradients"] if self.gradients else []
        return tuple(names + (["empty"] if 0 in (*self.lead, self.k, self.n) else []))

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, device = Draw("fp8 linear values", self.draw.number, self.draw.settings), settings.device
        operations = Operations(settings)

        def tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> torch.Tensor:
            return arena.input(name, filler(shape, dtype, seeds.value_seed(), device, False), layout)

        groups = self.lead[:1] if self.grouped else ()
        columns = self.k + (self.wrong == "x")
        x = tensor("x", (*self.lead, columns), self.dtypes[0], self.x)
        weight = tensor("weight", (*groups, self.n, self.k), self.dtypes[1], self.weight)
        gradient = tensor("gradient", (*self.lead, self.n), self.dtypes[0], Layout())
        size = self.n + (self.wrong == "bias")
        bias = tensor("bias", (size,), self.dtypes[1], Layout()) if self.bias else None
        options: dict[str, Any] = {
            "recipe": "column" if self.wrong == "recipe" else self.recipe, "grad_dtype": self.grad_dtype,
            "use_fast_accum": self.fast,
        }  # fmt: skip

        def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            if not self.layer:
                return operations.scaled_linear(x, weight, bias, **options)
            linear = operations.ScaledLinear(self.k, self.n, bias is not None, "meta", **options)
            state = {"weight": weight} | ({} if bias is None else {"bias": bias})
            return torch.func.functional_call(linear, state, (x,))

        def run() -> tuple[torch.Tensor, ...]:
            if not self.gradients:
                with torch.no_grad():
                    return (forward(x, weight, bias),)
            leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
            y = forward(leaves[0], leaves[1], leaves[2] if self.bias else None)
            return (y.detach(), *torch.autograd.grad(y, leaves, gradient))

        return Call(
            run=run,
            check=lambda found: self._check(found, (x, weight, gradient), bias),
            arguments=NAMES,
            must_refuse=self.wrong,
        )

    def _check(
        self, found: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], bias: torch.Tensor | None
    ) -> None:
        x, weight, gradient = (t.resolve_neg() for t in inputs)
        y = found[0]
        assert y.shape == (*self.lead, self.n) and y.dtype == self.dtypes[0]
        rows = math.prod(self.lead[1:] if self.grouped else self.lead)
        count = self.lead[0] if self.grouped else 1
        matrices = x.reshape(count, rows, self.k), weight.reshape(count, self.n, self.k)
        outputs = y.reshape(count, rows, self.n), gradient.reshape(count, rows, self.n)
        for group in range(count):
            of_x, of_w = (t[group] for t in matrices)
            of_y, of_g = (t[group] for t in outputs)
            rest = {"bias": bias, "fast": self.fast}
            check_product((of_x, E4M3), (of_w, E4M3), self.recipe, of_y, "output", **rest)
            if self.gradients:
                d_x = found[1].reshape(count, rows, self.k)[group]
                d_w = found[2].reshape(count, self.n, self.k)[group]
                own = self.grad_dtype
                check_product((of_g, own), (of_w.mT, E4M3), self.recipe, d_x, "dx")
                check_product((of_g.mT, own), (of_x.mT, E4M3), self.recipe, d_w, "dw")
        if self.gradients:
            assert found[1].dtype == self.dtypes[0] and found[2].dtype == self.dtypes[1]
        if self.gradients and bias is not None:
            flat = gradient.reshape(rows, self.n)
            tolerance.check(found[3], flat.double().sum(0), flat.sum(0).to(found[3].dtype), case="db")


def draw_linear(draw: Draw) -> LinearCase:
    """A case of `scaled_linear`."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    pool = _SMALL if small else _LARGE
    multiples = [draw.often(16, 1, 8, odds=0.5) for _ in range(2)]
    k, n = (draw.extent(pool, multiple, zero=0.02) for multiple in multiples)
    grouped = pick.random() < 0.25
    kinds: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3)) if not grouped else ((1,), (3,), (2,))
    lead = (*pick.choice(kinds), draw.extent(pool, zero=0.03))
    if small:
        lead = tuple(min(size, 40) for size in lead)
    layer = not grouped and pick.random() < 0.4
    gradients = pick.random() < 0.5
    dtypes = draw.often((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
                        (torch.float16, torch.float16), (torch.float32, torch.float32),
                        (WIDE[0], WIDE[1]), odds=0.5)  # fmt: skip
    layouts = draw.layout(len(lead) + 1), draw.layout(3 if grouped else 2)
    bias = not grouped and pick.random() < 0.6
    wrong = data.choice(("x", "bias" if bias else "recipe", "recipe")) if data.random() < 0.03 else None
    return LinearCase(
        draw, lead, k, n, grouped, dtypes, x=layouts[0], weight=layouts[1], bias=bias,
        recipe=pick.choice(("tensor", "row", "block")), grad_dtype=pick.choice((E5M2, E5M2, E4M3)),
        fast=pick.random() < 0.7, gradients=gradients, layer=layer, wrong=wrong,
        mode=draw.mode(graph=not gradients),
    )  # fmt: skip
