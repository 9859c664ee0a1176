"""A stand-in for the compiled kernels, in PyTorch on the CPU: what the host functions promise, slowly.

It lets the op be tested without a GPU: checks, plans, copies, orientation, split-K, gradients, torch.compile.
It also checks what the real kernels rely on: alignment, contiguous modes, shapes that fit together.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.blocks.epilogue.gates import GATES, GatedEpilogue
from kernels_dsl.blocks.reduce.reductions import REDUCTIONS, ReducedEpilogue
from kernels_dsl.config.gemm import PARTIALS, WRITTEN, EntryLayout
from kernels_dsl.config.reductions import CHUNK
from kernels_dsl.ops.target import Target
from lowering.signature import tensor_class
from reference.gemm import activation_function, round_to_tf32


def _evaluate(epilogue: Any, acc: torch.Tensor, operands: tuple[Any, ...]) -> torch.Tensor:
    if not isinstance(epilogue, LinearEpilogue):
        return epilogue(acc, *operands)
    rest = list(operands)
    assert len(rest) == epilogue.num_operands
    value = acc * rest.pop(0) if epilogue.alpha else acc
    if epilogue.beta:
        beta, c = rest.pop(0), rest.pop(0)
        value = value + beta * c
    if epilogue.bias:
        value = value + rest.pop(0)
    value = activation_function(epilogue.activation)(value)
    return value + rest.pop(0) if epilogue.residual else value


def _operand(value: Any, modes: str, d_shape: torch.Size) -> Any:
    """An operand as (L, M, N) float32, by the modes that it is said to have."""
    if modes == "":
        assert isinstance(value, float)
        return value
    assert value.dim() == len(modes)
    shape = [value.shape[modes.index(mode)] if mode in modes else 1 for mode in "lmn"]
    full = d_shape if len(d_shape) == 3 else (1, *d_shape)
    assert all(size == whole for mode, size, whole in zip("lmn", shape, full) if mode in modes)
    return value.float().reshape(shape)


class ModelKernels:
    """Replaces `gemm_kernels.launcher`; `launches` lists (kernel, constexprs) of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, dict[str, Any]]] = []
        self.compiled: list[str] = []

    def launcher(self, name: str, target: Target, args: tuple[Any, ...], constexprs: dict[str, Any]) -> Any:
        self.compiled.append(name)
        classes = self._classes(args)

        def launch(*values: Any) -> None:
            if self._classes(values) != classes:  # as a launch refuses other addresses than it knows
                raise ValueError("Misaligned Tensor data: another signature than compiled for")
            self.launches.append((name, constexprs))
            if name == "reduce_parts":
                self._combine(*values, **constexprs)
            elif name == "gate_gradient":
                self._gate_gradient(*values, **constexprs)
            elif name == "splitk_reduce":
                self._reduce(*values, **constexprs)
            else:
                self._gemm(name, *values, **constexprs)

        return launch, None

    @staticmethod
    def _classes(args: tuple[Any, ...]) -> list[Any]:
        found: list[Any] = []
        for arg in args:
            values = arg if isinstance(arg, tuple) else (arg,)
            found.append([tensor_class("x", x) if isinstance(x, torch.Tensor) else type(x) for x in values])
        return found

    @staticmethod
    def _gate_gradient(gradient: Any, z: Any, d_z: Any, *, activation: str, vector: int, early: bool) -> None:
        assert gradient.is_contiguous() and 2 * gradient.numel() == z.numel() == d_z.numel()
        assert all(tensor_class("x", x).align == 16 for x in (gradient, z, d_z))
        d_z.copy_(GATES[activation].backward(gradient.float(), z.float()))

    def _gemm(
        self, name: str, a: Any, b: Any, d: Any, operands: Any, max_ctas: int, *, config: Any, epilogue: Any,
        layout: EntryLayout,
    ) -> None:  # fmt: skip
        assert config.family in name and max_ctas > 0
        for matrix in (a, b):
            kind = tensor_class("matrix", matrix)
            assert 1 in kind.strides[-2:], "a kernel needs a contiguous mode"
            if name == "gemm_sm90" or config.family == "sm90":
                assert kind.align == 16, "TMA needs 16-byte alignment"
        if config.family == "sm90" and a.dtype == torch.float32:
            assert a.stride(-1) == 1 and b.stride(-2) == 1, "tf32 WGMMA needs K contiguous"
        if config.family == "sm80":
            narrow = (
                (config.copy_bytes_b, config.copy_bytes_a)
                if layout.swap
                else (config.copy_bytes_a, config.copy_bytes_b)
            )
            assert narrow[0] <= tensor_class("a", a).align and narrow[1] <= tensor_class("b", b).align
        if a.dtype == torch.float32:
            a, b = round_to_tf32(a), round_to_tf32(b)
        a3, b3 = (x.float() if x.dim() == 3 else x.float()[None] for x in (a, b))
        splits = config.split_k
        if splits > 1:
            assert d.dtype == torch.float32 and not operands
            k = a3.shape[-1]
            for s in range(splits):
                lo, hi = k * s // splits, k * (s + 1) // splits
                part = torch.matmul(a3[:, :, lo:hi], b3[:, lo:hi])
                part = part.mT if layout.swap else part
                d[s::splits].zero_()  # rows end after 16 bytes: TMA stores zeros beyond N
                d[s::splits, : part.shape[1], : part.shape[2]].copy_(part)
            return
        if config.family == "sm90" and config.epi_tma:
            inner = d.mT if layout.swap else d
            assert inner.stride(-1) == 1 and tensor_class("d", d).align == 16
        acc = torch.matmul(a3, b3)
        self._store(acc, d, operands, epilogue, layout)

    def _reduce(
        self,
        workspace: Any,
        d: Any,
        operands: Any,
        *,
        split_k: int,
        epilogue: Any,
        layout: EntryLayout,
        early: bool,
    ) -> None:
        total = workspace[0::split_k].clone()
        for s in range(1, split_k):
            total += workspace[s::split_k]
        total = total.mT if layout.swap else total
        columns = d.shape[-1] * (2 if layout.gated else 1)
        self._store(total[:, : d.shape[-2], :columns], d, operands, epilogue, layout)

    @staticmethod
    def _store(acc: Any, d: Any, operands: Any, epilogue: Any, layout: EntryLayout) -> None:
        operands = operands or ()
        assert len(operands) == len(layout.operand_modes)
        if isinstance(epilogue, GatedEpilogue):
            ModelKernels._store_gated(acc, d, operands, epilogue, layout)
            return
        if isinstance(epilogue, ReducedEpilogue):
            ModelKernels._store_reduced(acc, d, operands, epilogue, layout)
            return
        values = tuple(_operand(x, modes, d.shape) for x, modes in zip(operands, layout.operand_modes))
        d.copy_(
            _evaluate(epilogue, acc, values).reshape(d.shape)
            if d.dim() == 2
            else _evaluate(epilogue, acc, values)
        )

    @staticmethod
    def _store_reduced(acc: Any, d: Any, operands: Any, epilogue: Any, layout: EntryLayout) -> None:
        *operands, partials = operands
        *modes, kept = layout.operand_modes
        assert kept == PARTIALS and partials.dtype == torch.float32
        values = tuple(_operand(x, m, d.shape) for x, m in zip(operands, modes))
        result = _evaluate(epilogue.inner, acc, values)
        d.copy_(result.reshape(d.shape))
        dim = -1 if (epilogue.over == "n") != layout.swap else -2
        row, result = REDUCTIONS[epilogue.reduction], result.expand(-1, *d.shape[-2:])
        # The first part has all of it: how lines are cut is the kernels' own.
        partials.fill_(float("-inf") if row.identity is None else row.identity)
        partials[:, 0] = row.exact(result.float(), dim)

    def _combine(self, partials: torch.Tensor, reduced: torch.Tensor, *, reduction: str) -> None:
        row = REDUCTIONS[reduction]
        for j, chunk in enumerate(partials.split(CHUNK, dim=1)):
            reduced[:, j] = chunk.sum(1) if row.summed else chunk.amax(1)
        assert reduced.shape[1] == -(-partials.shape[1] // CHUNK)

    @staticmethod
    def _store_gated(acc: Any, d: Any, operands: Any, epilogue: Any, layout: EntryLayout) -> None:
        assert layout.gated and not layout.swap
        modes = layout.operand_modes
        if epilogue.preact:
            *operands, preact = operands
            *modes, kept = modes
            assert kept == WRITTEN + "lmn"[3 - preact.dim() :]
        z = _evaluate(epilogue.inner, acc, tuple(_operand(x, m, acc.shape) for x, m in zip(operands, modes)))
        if epilogue.preact:
            preact.copy_(z.reshape(preact.shape))
        d.copy_(GATES[epilogue.activation].of_pairs(z).reshape(d.shape))
