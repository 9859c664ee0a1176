"""Cases of the makers of `BsrTensor`, of gradients of `bsr_gemm`, and of `BsrLinear`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from reference import tolerance
from reference.bsr import to_dense
from tests.fuzz.bsr_matrix import Matrix, draw_matrix, plain
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

MAKERS = ("from_dense", "top_k", "by_magnitude")


@dataclass(frozen=True)
class LayerCase:
    """A product and its gradients, of a matrix made of a dense one by `maker`; `layer`: by `BsrLinear`."""

    draw: Draw = field(repr=False)
    matrix: Matrix
    maker: str
    rows: int
    dtype: torch.dtype
    layer: bool
    bias: bool
    mode: Mode

    def __str__(self) -> str:
        return "layer " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        what = "BsrLinear" if self.layer else "gradient of bsr_gemm"
        return what, f"BsrTensor.{self.maker}", f"mode {self.mode.value}"

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`; integers, so that output and gradients are exact."""
        seeds, device = Draw("layer values", self.draw.number, self.draw.settings), settings.device
        out_features, in_features = self.matrix.shape
        dense = arena.input(
            "dense", filler((out_features, in_features), self.dtype, seeds.value_seed(), device, True)
        )
        x = arena.input("x", filler((self.rows, in_features), self.dtype, seeds.value_seed(), device, True))
        gradient = arena.input(
            "gradient", filler((self.rows, out_features), self.dtype, seeds.value_seed(), device, True)
        )
        bias = arena.input("bias", filler((out_features,), self.dtype, seeds.value_seed(), device, True))
        operations = Operations(settings)
        weight = self._make(operations, dense)
        return Call(
            run=lambda: self._run(operations, weight, x, gradient, bias),
            check=lambda results: self._check(results, weight, x, gradient, bias),
            arguments=("a", "b", "x", "weight", "values"),
        )

    def _make(self, operations: Operations, dense: torch.Tensor) -> Any:
        make = getattr(operations.BsrTensor, self.maker)
        if self.maker == "top_k":
            return make(dense, self.matrix.block, min(self.matrix.kept, self.matrix.grid[1]))
        if self.maker == "by_magnitude":
            return make(dense, self.matrix.block, 0.3)
        cells = torch.Generator().manual_seed(self.matrix.seed)
        mask = torch.rand(self.matrix.grid, generator=cells) < 0.4
        return make(dense, mask.to(dense.device), self.matrix.block)

    def _run(
        self, operations: Operations, weight: Any, x: torch.Tensor, gradient: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        if self.layer:
            linear = operations.BsrLinear(weight, bias if self.bias else None)
            y = linear(x)
            values = linear.values
        else:
            values = weight.values.detach().clone().requires_grad_()
            options = {"bias": bias} if self.bias else {}
            y = operations.bsr_gemm(x, weight.with_values(values).t(), **options)
        y.backward(gradient)
        assert x.grad is not None and values.grad is not None
        return y.detach(), x.grad, values.grad

    def _check(
        self,
        results: tuple[torch.Tensor, ...],
        weight: Any,
        x: torch.Tensor,
        gradient: torch.Tensor,
        bias: torch.Tensor,
    ) -> None:
        full = to_dense(plain(weight))
        y = x.double() @ full.mT + (bias.double() if self.bias else 0.0)
        tolerance.check_exact(results[0], y, case="y")
        tolerance.check_exact(results[1], gradient.double() @ full, case="gradient of x")
        bm, bk = weight.block
        whole = gradient.double().mT @ x.double()
        blocks = whole.unflatten(1, (-1, bk)).unflatten(0, (-1, bm)).transpose(1, 2)
        rows = torch.repeat_interleave(
            torch.arange(full.shape[0] // bm, device=full.device), weight.crow_indices.long().diff()
        )
        tolerance.check_exact(results[2], blocks[rows, weight.col_indices.long()], case="gradient of values")


def draw_layer(draw: Draw) -> LayerCase:
    """A case of gradients or of a layer."""
    maker, layer, bias = draw.kernel.choice(MAKERS), draw.kernel.random() < 0.5, draw.kernel.random() < 0.5
    dtype = draw.kernel.choice((torch.bfloat16, torch.float16))
    matrix = draw_matrix(draw)
    while 0 in matrix.grid:
        matrix = draw_matrix(draw)
    rows = draw.data.choice((1, 8, 33, 64) if draw.settings.small else (1, 8, 33, 64, 200, 513))
    mode = Mode.STREAM if draw.settings.device == "cuda" and draw.data.random() < 0.2 else Mode.PLAIN
    return LayerCase(draw, matrix, maker, rows, dtype, layer, bias, mode)
