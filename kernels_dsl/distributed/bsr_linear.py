"""Tensor parallelism of block-sparse matrices: each rank has some block rows or block columns of one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from kernels_dsl.checks.options import instance, integer
from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.sparse.tensor import BsrTensor

_ROWS, _COLUMNS = 0, 1
_MODES = ("rows", "columns")


def shard_bsr(matrix: BsrTensor, rank: int, size: int, dim: int) -> BsrTensor:
    """The part of `matrix` that `rank` of `size` ranks has: of its rows (dim 0) or its columns (dim 1).

    The parts have as many block rows, or block columns, each, in the order of the ranks; how many blocks they
    keep depends on the pattern. Values are copied and differentiable, also those of a batch. Waits for the
    GPU, as the number of blocks is the extent of a tensor. Raises TypeError and ValueError that name the
    argument; ValueError where the ranks cannot have equal parts.
    """
    instance("matrix", matrix, BsrTensor)
    integer("size", size, 1)
    integer("rank", rank, 0, size - 1)
    integer("dim", dim, 0, 1)
    check_equal_parts("matrix", matrix, size, dim)
    stored = 1 - dim if matrix.transposed else dim
    blocks = matrix.shape[stored] // matrix.block[stored] // size
    crow, col = matrix.crow_indices, matrix.col_indices
    first, last = rank * blocks, (rank + 1) * blocks
    if stored == _ROWS:
        begin, end = crow[[first, last]].tolist()
        crow, col = crow[first : last + 1] - begin, col[begin:end].clone()
        values = matrix.values[..., begin:end, :, :].clone()
    else:
        kept = (col >= first) & (col < last)
        before = torch.cat([kept.new_zeros(1, dtype=crow.dtype), kept.cumsum(0, dtype=crow.dtype)])
        crow, col, values = before[crow.long()], col[kept] - first, matrix.values[..., kept, :, :]
    shape = list(matrix.shape)
    shape[stored] //= size
    return BsrTensor(crow, col, values, (shape[0], shape[1]), matrix.transposed)


def check_equal_parts(name: str, matrix: BsrTensor, size: int, dim: int) -> None:
    """ValueError where so many ranks cannot have equal parts of a matrix's block rows or block columns."""
    stored = 1 - dim if matrix.transposed else dim
    count = matrix.shape[stored] // matrix.block[stored]
    if count % size:
        raise ValueError(
            f"{name} has {count} block {_MODES[dim]}, must have a multiple of {size}: each rank gets as many"
        )


class _BsrParallel(ParallelStyle):
    """Base of both styles: parts of the weight, and DTensors around the layer's own tensors."""

    _dim: int
    _wanted: Placement
    _made: Placement
    _output_layouts: Placement | None = None

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            instance(name, layout, Placement, type(None))
        self.input_layouts = input_layouts or self._wanted
        self.output_layouts = output_layouts or self._output_layouts
        if isinstance(self.output_layouts, Partial):
            raise ValueError("output_layouts is a partial sum, must be whole or sharded")
        self.use_local_output = use_local_output

    def _check(self, layer: Any, mesh: DeviceMesh) -> None:
        """TypeError or ValueError, before any communication, where the layer cannot be shared so."""
        if not isinstance(layer, BsrLinear):
            raise TypeError(f"module is a {type(layer).__name__}, must be a BsrLinear")
        if mesh.ndim != 1:
            raise ValueError(f"device_mesh has {mesh.ndim} dimensions, must have one: take mesh['tp']")
        check_equal_parts("weight", layer.weight, mesh.size(), self._dim)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self._check(module, device_mesh)
        assert isinstance(module, BsrLinear)
        if self.src_data_rank is not None:
            _copy_from(module, self.src_data_rank, device_mesh)
        self._share(module, device_mesh)
        module.register_forward_pre_hook(lambda layer, inputs: self._input(inputs, device_mesh))
        module.register_forward_hook(lambda layer, inputs, y: self._output(layer, y, device_mesh))
        return module

    def _share(self, layer: BsrLinear, mesh: DeviceMesh) -> None:
        """Leaves the layer this rank's part."""
        weight = layer.weight
        whole = weight.with_values(weight.values.detach())
        part = shard_bsr(whole, mesh.get_local_rank(), mesh.size(), self._dim)
        layer.values = torch.nn.Parameter(part.values, layer.values.requires_grad)
        layer.crow_indices, layer.col_indices = part.crow_indices, part.col_indices
        layer.out_features, layer.in_features = part.shape

    def _input(self, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        x = x.redistribute(mesh, [self._wanted])
        # Each rank's gradient of an input that all have is a part of a sum.
        gradient = [Partial()] if isinstance(self._wanted, Replicate) else None
        return (x.to_local(grad_placements=gradient), *inputs[1:])

    def _output(self, layer: Any, y: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        made = DTensor.from_local(y, mesh, [self._made], run_check=False)
        if self.output_layouts is not None:
            made = made.redistribute(mesh, [self.output_layouts])
        made = self._finish(layer, made, mesh)
        return made.to_local() if self.use_local_output else made

    def _finish(self, layer: BsrLinear, y: DTensor, mesh: DeviceMesh) -> DTensor:
        return y


class BsrColwiseParallel(_BsrParallel):
    """Style for `parallelize_module`: each rank computes some output features of a `BsrLinear`.

    It keeps block rows of the weight and their bias as plain parameters. The defaults are those of torch's
    `ColwiseParallel`: the input is replicated, the output sharded along its last mode and a plain tensor.
    """

    _dim, _wanted, _made = _ROWS, Replicate(), Shard(-1)

    def _share(self, layer: BsrLinear, mesh: DeviceMesh) -> None:
        super()._share(layer, mesh)
        if layer.bias is not None:
            part = layer.bias.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            layer.bias = torch.nn.Parameter(part, layer.bias.requires_grad)


class BsrRowwiseParallel(_BsrParallel):
    """Style for `parallelize_module`: each rank has some input features of a `BsrLinear`, and a partial sum.

    It keeps block columns of the weight as plain parameters, and the whole bias, which is added once, after
    the sum. The defaults are those of torch's `RowwiseParallel`: the input is sharded along its last mode,
    the output replicated and a plain tensor. ValueError for a layer with an activation: it is not linear.
    """

    _dim, _wanted, _made, _output_layouts = _COLUMNS, Shard(-1), Partial(), Replicate()

    def _check(self, layer: Any, mesh: DeviceMesh) -> None:
        """As of every style; ValueError for an activation."""
        super()._check(layer, mesh)
        if layer.activation is not None:
            raise ValueError(
                f"activation is {layer.activation!r}, must be None with BsrRowwiseParallel: it would be "
                "applied to partial sums"
            )

    def _share(self, layer: BsrLinear, mesh: DeviceMesh) -> None:
        super()._share(layer, mesh)
        layer._adds_bias = False

    def _finish(self, layer: BsrLinear, y: DTensor, mesh: DeviceMesh) -> DTensor:
        if layer.bias is None:
            return y
        bias = DTensor.from_local(layer.bias, mesh, [Replicate()], run_check=False)
        return y + bias


def _copy_from(layer: BsrLinear, source: int, mesh: DeviceMesh) -> None:
    """Gives all ranks the layer of one, as torch's styles do; patterns may have differed."""
    group = mesh.get_group()
    nnz = torch.tensor([layer.weight.nnz], device=layer.values.device)
    dist.broadcast(nnz, group=group, group_src=source)
    kept, block = int(nnz), layer.weight.block
    if kept != layer.weight.nnz:
        layer.col_indices = layer.col_indices.new_empty(kept)
        layer.values = torch.nn.Parameter(layer.values.new_empty(kept, *block), layer.values.requires_grad)
    layer.crow_indices, layer.col_indices = layer.crow_indices.clone(), layer.col_indices.clone()
    bias = [] if layer.bias is None else [layer.bias.data]
    for x in (layer.crow_indices, layer.col_indices, layer.values.data, *bias):
        dist.broadcast(x, group=group, group_src=source)
