"""`BsrTensor`: a block-sparse matrix as plain tensors, which is what operators and torch.compile see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kernels_dsl.checks.eager_path import check_tensor, watched, written_out
from kernels_dsl.checks.options import integer, real, shown
from kernels_dsl.sparse.pattern import Pattern, pattern_of
from lowering.records import frozen

BLOCK_STEP = 16
MAX_BLOCK = 512
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@frozen(eq=False)
class BsrTensor:
    """A (rows, columns) matrix of which some blocks are kept, in block compressed sparse rows.

    crow_indices (R + 1,) and col_indices (nnz,), int32 or int64: block row r keeps the entries
    crow_indices[r] .. crow_indices[r + 1] - 1, entry e stands in block column col_indices[e]. values
    (nnz, bm, bk), or (L, nnz, bm, bk) for L matrices of one pattern; bf16 or fp16, or e4m3 or e5m2 for
    `bsr_scaled_gemm`; bm and bk multiples of 16 up to 512. shape: (rows, columns) = (R · bm, C · bk).
    `transposed`: the object stands for the transpose of that, of shape (columns, rows), without a copy: what
    `t()` makes.

    Columns of a row may be in any order. Blocks that occur twice in a row are summed in products and in
    `to_dense`, and each gets the gradient. Indices must not be changed in place: what products derive from
    them is kept with the object. `check()` finds indices that break these rules; without it they give wrong
    results, but products touch no memory that is not the matrix'.

    Raises TypeError or ValueError for shapes and dtypes that do not fit together.
    """

    crow_indices: torch.Tensor
    col_indices: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, int]
    transposed: bool = False
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        why = _why_not(self.crow_indices, self.col_indices, self.values, self.shape)
        if why is not None:
            raise why
        if not isinstance(self.transposed, bool):
            raise TypeError(f"transposed is {shown(self.transposed)}, must be True or False")
        tensors = self.crow_indices, self.col_indices, self.values
        if not watched() and any(x.is_neg() for x in tensors):
            for name, x in zip(("crow_indices", "col_indices", "values"), written_out(tensors) or ()):
                object.__setattr__(self, name, x)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies, without what was made for calls on this machine."""
        return {**self.__dict__, "_kept": {}}

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block as it is stored."""
        return self.values.shape[-2], self.values.shape[-1]

    @property
    def nnz(self) -> int:
        """Number of kept blocks."""
        return self.col_indices.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """(rows, columns) of the matrix that the object stands for: `shape`, or swapped where transposed."""
        return (self.shape[1], self.shape[0]) if self.transposed else (self.shape[0], self.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    @property
    def density(self) -> float:
        """Kept blocks by all blocks; 0 for an empty matrix."""
        cells = self.shape[0] * self.shape[1]
        return self.nnz * self.block[0] * self.block[1] / cells if cells else 0.0

    def t(self) -> BsrTensor:
        """The transpose, on the same tensors."""
        tensors = (self.crow_indices, self.col_indices, self.values)
        if torch.compiler.is_compiling():
            return BsrTensor(*tensors, self.shape, not self.transposed)
        return unchecked(tensors, (self.shape, not self.transposed), self._kept)

    def with_values(self, values: torch.Tensor) -> BsrTensor:
        """The same pattern with other values (nnz, bm, bk) or (L, nnz, bm, bk)."""
        return BsrTensor(self.crow_indices, self.col_indices, values, self.shape, self.transposed)

    def check(self) -> BsrTensor:
        """ValueError where crow_indices is not monotone from 0 to nnz, or an index is out of range or twice
        in a row. Waits for the GPU. Returns the object.
        """
        rows, columns = self.shape[0] // self.block[0], self.shape[1] // self.block[1]
        crow, col = self.crow_indices.long(), self.col_indices.long()
        if int(crow[0]) != 0 or int(crow[-1]) != self.nnz:
            raise ValueError(
                f"crow_indices goes from {int(crow[0])} to {int(crow[-1])}, must go from 0 to the number of "
                f"blocks, {self.nnz}"
            )
        if bool((crow.diff() < 0).any()):
            raise ValueError("crow_indices decreases, must be monotone")
        if self.nnz and (int(col.min()) < 0 or int(col.max()) >= columns):
            raise ValueError(
                f"col_indices has values from {int(col.min())} to {int(col.max())}, must be from 0 to "
                f"{columns - 1}"
            )
        row = torch.repeat_interleave(torch.arange(rows, device=col.device), crow.diff())
        cells = (row * columns + col).sort().values
        if bool((cells.diff() == 0).any()):
            cell = int(cells[:-1][cells.diff() == 0][0])
            raise ValueError(
                f"col_indices has {cell % columns} twice in block row {cell // columns}, must have it once"
            )
        return self

    def to_dense(self) -> torch.Tensor:
        """The matrix (or L of them) with zeros where no block is kept. Differentiable in the values.

        TypeError for fp8 values, whose scales are not part of the matrix.
        """
        if self.dtype.itemsize == 1:
            raise TypeError(f"values has dtype {self.dtype}, must be torch.bfloat16 or torch.float16")
        rows, columns = self.shape[0] // self.block[0], self.shape[1] // self.block[1]
        lead = self.values.shape[:-3]
        pattern = Pattern(self.crow_indices, self.col_indices, rows, columns)
        cells = pattern.row_of.long() * columns + pattern.column_of
        zeros = self.values.new_zeros(*lead, rows * columns, *self.block)
        full = zeros.index_add(len(lead), cells, self.values)
        full = full.unflatten(len(lead), (rows, columns)).transpose(-3, -2)
        full = full.reshape(*lead, *self.shape)
        return full.mT if self.transposed else full

    def to_torch(self) -> torch.Tensor:
        """As a torch.sparse_bsr tensor on the same memory; ValueError where transposed or batched."""
        if self.transposed or self.values.dim() != 3:
            raise ValueError("the matrix is transposed or has batched values, must be neither")
        return torch.sparse_bsr_tensor(
            self.crow_indices, self.col_indices, self.values, self.shape, check_invariants=False
        )

    @staticmethod
    def from_torch(matrix: torch.Tensor) -> BsrTensor:
        """From a two-dimensional torch.sparse_bsr tensor, sharing memory; gradients reach its values."""
        if not isinstance(matrix, torch.Tensor) or matrix.layout != torch.sparse_bsr:
            found = matrix.layout if isinstance(matrix, torch.Tensor) else type(matrix).__name__
            raise TypeError(f"matrix is {found}, must be a torch.sparse_bsr tensor")
        if matrix.dim() != 2:
            raise ValueError(
                f"matrix has {matrix.dim()} dimensions, must have 2: batched values of one pattern go as a "
                "BsrTensor with values (L, nnz, bm, bk)"
            )
        return BsrTensor(
            matrix.crow_indices(), matrix.col_indices(), matrix.values(), (matrix.shape[0], matrix.shape[1])
        )

    @staticmethod
    def from_dense(dense: torch.Tensor, mask: torch.Tensor, block: tuple[int, int]) -> BsrTensor:
        """The blocks of dense (M, N) or (L, M, N) that mask (M / bm, N / bk), bool, keeps.

        Waits for the GPU, as the number of blocks is the extent of a tensor. Differentiable in `dense`.
        """
        rows, columns = _grid(dense, block)
        check_tensor("mask", mask)
        if tuple(mask.shape) != (rows, columns) or mask.dtype != torch.bool:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, must be {(rows, columns)}, bool"
            )
        if mask.device != dense.device:
            raise ValueError(f"mask is on {mask.device}, must be on dense's device, {dense.device}")
        if mask.is_meta:
            raise ValueError("mask is on meta, must have values: how many blocks are kept depends on them")
        row, col = mask.nonzero(as_tuple=True)
        crow = torch.zeros(rows + 1, dtype=torch.int32, device=dense.device)
        crow[1:] = mask.sum(1).cumsum(0)
        values = _blocks(dense, block)[..., row, col, :, :].contiguous()
        made = BsrTensor(crow, col.to(torch.int32), values, (dense.shape[-2], dense.shape[-1]))
        if mask.numel() and not watched():
            by_row, by_column = torch.stack([mask.sum(mode).amax() for mode in (1, 0)]).tolist()
            pattern_of(crow, made.col_indices, rows, columns).longest = (by_row, by_column)
        return made

    @staticmethod
    def top_k(dense: torch.Tensor, block: tuple[int, int], k: int) -> BsrTensor:
        """The k blocks of largest norm of each block row of dense (M, N). Never waits for the GPU."""
        rows, columns = _grid(dense, block, single=True)
        integer("k", k, 0, columns)
        kept = block_norms(dense, block).topk(k, dim=1).indices.sort(dim=1).values  # (rows, k)
        crow = torch.arange(rows + 1, dtype=torch.int32, device=dense.device) * k
        at = torch.arange(rows, device=dense.device)[:, None]
        values = _blocks(dense, block)[at, kept].reshape(rows * k, *block)
        made = BsrTensor(crow, kept.reshape(-1).to(torch.int32), values, (dense.shape[0], dense.shape[1]))
        if not watched():
            pattern_of(crow, made.col_indices, rows, columns).longest = (k, None)
        return made

    @staticmethod
    def by_magnitude(dense: torch.Tensor, block: tuple[int, int], density: float) -> BsrTensor:
        """Magnitude pruning: the blocks of largest norm of dense (M, N), `density` (0 to 1) of all."""
        return BsrTensor.from_dense(dense, magnitude_mask(dense, block, density), block)


def block_norms(dense: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Frobenius norms (M / bm, N / bk), float32, of the blocks of dense (M, N)."""
    _grid(dense, block, single=True)
    return _blocks(dense.detach(), block).float().square().sum((-2, -1)).sqrt()


def magnitude_mask(dense: torch.Tensor, block: tuple[int, int], density: float) -> torch.Tensor:
    """The bool mask (M / bm, N / bk) of the blocks of largest norm, `density` (0 to 1) of them, rounded."""
    if not 0 <= real("density", density) <= 1:
        raise ValueError(f"density is {density}, must be from 0 to 1")
    norms = block_norms(dense, block)
    mask = torch.zeros(norms.numel(), dtype=torch.bool, device=dense.device)
    mask[norms.flatten().topk(round(density * norms.numel())).indices] = True
    return mask.view(norms.shape)


def _good_block(block: Sequence[Any]) -> bool:
    """True if these are the extents of a block that kernels take."""
    return len(block) == 2 and all(
        not isinstance(x, (bool, float, str)) and 0 < x <= MAX_BLOCK and x % BLOCK_STEP == 0 for x in block
    )


def _grid(dense: torch.Tensor, block: tuple[int, int], single: bool = False) -> tuple[int, int]:
    """Block rows and block columns; ValueError where blocks do not tile the matrix. `single`: no batch."""
    check_tensor("dense", dense)
    if not isinstance(block, tuple | list | torch.Size) or not _good_block(block):
        raise ValueError(f"block is {block}, must be two multiples of {BLOCK_STEP} up to {MAX_BLOCK}")
    if dense.dim() not in ((2,) if single else (2, 3)):
        wanted = "two dimensions" if single else "two dimensions, or three with a batch"
        raise ValueError(f"dense has shape {tuple(dense.shape)}, must have {wanted}")
    if dense.shape[-2] % block[0] or dense.shape[-1] % block[1]:
        raise ValueError(f"dense has shape {tuple(dense.shape)}, must be matrices of whole blocks of {block}")
    return dense.shape[-2] // block[0], dense.shape[-1] // block[1]


def _blocks(dense: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """dense (.., M, N) as (.., M / bm, N / bk, bm, bk), a view."""
    return dense.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).transpose(-3, -2)


def _why_not(crow: torch.Tensor, col: torch.Tensor, values: torch.Tensor, shape: object) -> Exception | None:
    """The error for wrong parts of a matrix, as far as shapes and dtypes tell; None if they are right."""
    for name, value in (("crow_indices", crow), ("col_indices", col), ("values", values)):
        check_tensor(name, value)
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        return TypeError(f"shape is {shape!r}, must be (rows, columns)")
    for extent in shape:
        integer("shape", extent)
    for name, index in (("crow_indices", crow), ("col_indices", col)):
        if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
            return ValueError(
                f"{name} has shape {tuple(index.shape)} and dtype {index.dtype}, must be one-dimensional, "
                "int32 or int64"
            )
    if values.dtype not in VALUE_DTYPES:
        return TypeError(
            f"values has dtype {values.dtype}, must be one of {', '.join(map(str, VALUE_DTYPES))}"
        )
    if values.dim() not in (3, 4) or values.shape[-3] != col.shape[0]:
        return ValueError(
            f"values has shape {tuple(values.shape)}, must be (nnz, bm, bk) or (L, nnz, bm, bk) with nnz "
            f"{col.shape[0]}"
        )
    block = values.shape[-2], values.shape[-1]
    if not _good_block(block):
        return ValueError(f"values has blocks of {block}, must have multiples of 16 up to {MAX_BLOCK}")
    if min(shape) < 0 or shape[0] % block[0] or shape[1] % block[1]:
        return ValueError(f"shape is {shape}, must be two multiples of the block's {block}")
    if crow.shape[0] != shape[0] // block[0] + 1:
        return ValueError(
            f"crow_indices has {crow.shape[0]} entries, must have {shape[0] // block[0] + 1} for {shape} "
            f"and blocks of {block}"
        )
    if not values.device == crow.device == col.device:
        return ValueError(
            f"crow_indices, col_indices, values are on {crow.device}, {col.device}, {values.device}, must be "
            "on one device"
        )
    return None


def _flatten(matrix: BsrTensor) -> tuple[list[torch.Tensor], Any]:
    return [matrix.crow_indices, matrix.col_indices, matrix.values], (matrix.shape, matrix.transposed)


def unchecked(tensors: Iterable[Any], form: tuple[tuple[int, int], bool], kept: dict[Any, Any]) -> BsrTensor:
    """The matrix of checked parts: (crow, col, values), (shape, transposed), what is kept of its calls."""
    made = object.__new__(BsrTensor)
    names = ("crow_indices", "col_indices", "values", "shape", "transposed", "_kept")
    made.__dict__.update(zip(names, (*tensors, *form, kept)))
    return made


def _unflatten(tensors: Iterable[Any], context: Any) -> BsrTensor:
    """Unchecked: transformations put other things than tensors in the leaves' places."""
    return unchecked(tensors, context, {})


pytree.register_pytree_node(BsrTensor, _flatten, _unflatten, serialized_type_name="kernels_dsl.BsrTensor")
