"""A common call: an operation and how its arguments are made, on a GPU or where nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kernels_dsl.config.problem import Device
from kernels_dsl.sparse.tensor import BsrTensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
DTYPES = {"bf16": BF16, "fp16": FP16}


Arguments = dict[str, Any]


class Source:
    """Makes the tensors of calls: here on the CPU, values unwritten, for calls that are recorded."""

    device = torch.device("cpu")

    def values(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """A tensor whose values do not count."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def integers(self, values: Iterable[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A vector of these numbers."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def factors(self, *shape: int) -> torch.Tensor:
        """Float32 scales, not far from 1."""
        return torch.ones(shape, device=self.device)

    def scores(self, *shape: int) -> torch.Tensor:
        """Float32 scores that choose blocks: written, since lists are made of them."""
        return torch.zeros(shape, device=self.device)


class Call(NamedTuple):
    """A call of `operation`, a public name's function or one that uses it.

    words: a text that sets it apart, such as "bf16 nt 64x4096x4096". arguments: makes its keywords.
    gradients: the arguments whose gradients are wanted too, of a block-sparse matrix or layer those of its
    values. fp8: it needs fp8 instructions.
    """

    name: str
    operation: Callable[..., Any]
    words: str
    arguments: Callable[[Source], Arguments]
    gradients: tuple[str, ...] = ()
    fp8: bool = False

    @property
    def label(self) -> str:
        """ "gemm bf16 nt 64x4096x4096 gradients"."""
        return f"{self.name} {self.words}" + " gradients" * bool(self.gradients)

    def served(self, device: Device) -> bool:
        """Says whether GPUs of this kind have kernels for it."""
        if "attention_fp8" in self.name:
            return device.has_fp8 and (device.has_wgmma or not device.widens_fp8)
        return device.has_fp8 or not self.fp8

    def run(self, source: Source) -> Result:
        """Makes the arguments, calls the operation, and asks for the gradients."""
        arguments = self.arguments(source)
        if not self.gradients:
            with torch.no_grad():
                return Result(arguments, tensors_of(self.operation(**arguments)))
        leaves = [leaf(arguments[name]).requires_grad_() for name in self.gradients]
        with torch.enable_grad():
            outputs = tensors_of(self.operation(**arguments))
        wanted = [x for x in outputs if x.requires_grad]
        upstream = [source.values(*x.shape, dtype=x.dtype) for x in wanted]
        gradients = torch.autograd.grad(wanted, leaves, upstream)
        return Result(arguments, [x.detach() for x in outputs], upstream, gradients)


class Result(NamedTuple):
    """A call's arguments and outputs; the outputs' gradients that were made, and those of the arguments."""

    arguments: Arguments
    outputs: Sequence[torch.Tensor]
    upstream: Sequence[torch.Tensor] = ()
    gradients: Sequence[torch.Tensor] = ()


def leaf(value: Any) -> torch.Tensor:
    """The tensor of an argument that has a gradient: itself, or a block-sparse matrix' or layer's values."""
    tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else value.values
    return tensor


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors that an operation returned."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, BsrTensor):
        return [value.values]
    parts = value.values() if isinstance(value, dict) else value or ()
    return [x for part in parts for x in tensors_of(part)]
