"""`BsrLinear`: a linear layer whose weight keeps some blocks only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.checks.eager_path import PLAIN_TYPES, check_tensor
from kernels_dsl.checks.options import instance, one_of
from kernels_dsl.ops.bsr.arguments import BsrArguments
from kernels_dsl.ops.bsr.product import BSR_GEMM
from kernels_dsl.ops.gemm.repeated import repeated
from kernels_dsl.sparse.pattern import version
from kernels_dsl.sparse.tensor import BsrTensor, magnitude_mask
from lowering.records import NamedTuple

_is_compiling = torch.compiler.is_compiling


class _Kept(NamedTuple):
    """A layer's weight and its transpose, of these tensors with these versions of the indices."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    versions: tuple[int, int]
    weights: tuple[BsrTensor, BsrTensor]


class BsrLinear(torch.nn.Module):
    """y = activation(x Wᵀ + bias) with a block-sparse W (out_features, in_features).

    weight: a `BsrTensor`; its values (nnz, bm, bk) become the parameter `values`, its indices buffers. bias:
    (out_features,) or None. activation: as in `bsr_gemm`. Gradients and optimizer state are those of the
    kept blocks alone; `load_state_dict` brings another pattern with as many blocks, too. Under autocast the
    input is cast to the values' dtype.
    """

    crow_indices: torch.Tensor
    col_indices: torch.Tensor
    _adds_bias = True
    """False where the bias is added to a sum over ranks, later (`kernels_dsl.distributed`)."""

    def __init__(
        self, weight: BsrTensor, bias: torch.Tensor | None = None, activation: str | None = None
    ) -> None:
        super().__init__()
        if not isinstance(weight, BsrTensor):
            raise TypeError(f"weight is a {type(weight).__name__}, must be a BsrTensor")
        if weight.transposed or weight.values.dim() != 3:
            raise ValueError("weight is transposed or has batched values, must be neither")
        one_of("activation", activation, (None, *sorted(ACTIVATIONS)))
        if bias is not None and tuple(check_tensor("bias", bias).shape) != (weight.shape[0],):
            raise ValueError(f"bias has shape {tuple(bias.shape)}, must be ({weight.shape[0]},)")
        self.out_features, self.in_features = weight.shape
        self.activation = activation
        self.values = torch.nn.Parameter(weight.values.detach().clone())
        self.register_buffer("crow_indices", weight.crow_indices)
        self.register_buffer("col_indices", weight.col_indices)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach().clone())
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies, without what `weight` keeps."""
        return {**self.__dict__, "_kept": None}

    def _load_from_state_dict(self, *args: Any, **keywords: Any) -> None:
        # Values are copied into tensors that are there; other matrices may have these indices, too.
        self.crow_indices, self.col_indices = self.crow_indices.clone(), self.col_indices.clone()
        super()._load_from_state_dict(*args, **keywords)

    @staticmethod
    def from_linear(
        linear: torch.nn.Linear,
        block: tuple[int, int],
        *,
        mask: torch.Tensor | None = None,
        density: float | None = None,
        activation: str | None = None,
    ) -> BsrLinear:
        """From a trained layer: the blocks that `mask` (out / bm, in / bk), bool, keeps, or `density` (0 to
        1) of all that have the largest norm. ValueError unless exactly one of the two is given.
        """
        instance("linear", linear, torch.nn.Linear)
        if (mask is None) == (density is None):
            raise ValueError("mask and density: exactly one must be given")
        if mask is None:
            assert density is not None
            mask = magnitude_mask(linear.weight, block, density)
        weight = BsrTensor.from_dense(linear.weight.detach(), mask, block)
        return BsrLinear(weight, linear.bias, activation)

    @property
    def weight(self) -> BsrTensor:
        """The weight as a `BsrTensor` on the module's tensors."""
        return self._both_weights()[0]

    def _both_weights(self) -> tuple[BsrTensor, BsrTensor]:
        """The weight and its transpose."""
        kept, buffers = self._kept, self._buffers
        if kept is not None and not _is_compiling():
            crow, col, values = kept.tensors
            same = buffers["crow_indices"] is crow and buffers["col_indices"] is col
            # A broadcast may have changed indices in place.
            if same and self.values is values and kept.versions == (version(crow), version(col)):
                return kept.weights
        crow, col, values = tensors = (self.crow_indices, self.col_indices, self.values)
        if _is_compiling():
            made = BsrTensor(*tensors, (self.out_features, self.in_features))
            return made, made.t()
        versions = version(crow), version(col)
        made = BsrTensor(*tensors, (self.out_features, self.in_features))
        self._kept = _Kept(tensors, versions, (made, made.t()))
        return self._kept.weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in_features) to (..., out_features)."""
        weight, bias = self._both_weights()[1], self.bias if self._adds_bias else None
        if x.__class__ in PLAIN_TYPES and x.dim() == 2 and not x.is_nested:
            if x.shape[1] == self.in_features and x.dtype is weight.values.dtype:
                return _product(x, weight, bias, self.activation)
        check_tensor("x", x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}, must end on in_features, {self.in_features}")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(self.values.dtype)
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y = _product(flat, weight, bias, self.activation)
        # No view, as torch.nn.Linear's is none: modules around it may change the output in place.
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], self.out_features))

    def extra_repr(self) -> str:
        """The text that `print` shows."""
        weight = self.weight
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block={weight.block}, "
            f"density={weight.density:.3f}, bias={self.bias is not None}"
        )


def _product(
    x: torch.Tensor, weight: BsrTensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """`bsr_gemm(x, weight, bias=bias, activation=activation)` of a matrix x; repeated calls take a shorter
    way than any with all arguments."""
    values = weight.values
    tensors: tuple[Any, ...] = (values, x) if bias is None else (values, x, bias)
    key: Any = None
    if type(x) in PLAIN_TYPES:
        key = ("linear", x.shape, activation, bias is None)
        extras = () if bias is None else (None, bias, None)
        y = repeated(weight._kept, key, tensors, None, 1.0, 1.0, extras)
        if y is not None:
            return y
    call = BsrArguments(
        weight.crow_indices, weight.col_indices, values, check_tensor("x", x), bias=bias, shape=weight.shape,
        transposed=weight.transposed, dense_left=True, activation=activation, matrix=weight,
    )  # fmt: skip
    return BSR_GEMM.first(call, key, tensors, _operator)


def _operator() -> Callable[[BsrArguments], torch.Tensor]:
    from kernels_dsl.ops.bsr import register

    return register.BSR_GEMM_OPERATOR
