"""Block-sparse products in float64, and the patterns to try them on. Slow and obvious."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference.inputs import integers, normal


@dataclass(frozen=True)
class Bsr:
    """A block-sparse matrix: crow (R + 1,), col (nnz,), values (nnz, bm, bk), shape (R · bm, C · bk)."""

    crow: torch.Tensor
    col: torch.Tensor
    values: torch.Tensor
    shape: tuple[int, int]


def to_dense(matrix: Bsr) -> torch.Tensor:
    """The matrix in float64, or L of them for values (L, nnz, bm, bk); blocks that occur twice are summed."""
    bm, bk = matrix.values.shape[-2:]
    dense = torch.zeros(
        *matrix.values.shape[:-3], *matrix.shape, dtype=torch.float64, device=matrix.col.device
    )
    crow, col = matrix.crow.tolist(), matrix.col.tolist()
    for row in range(len(crow) - 1):
        for entry in range(crow[row], crow[row + 1]):
            at = dense[..., row * bm : (row + 1) * bm, col[entry] * bk : (col[entry] + 1) * bk]
            at += matrix.values[..., entry, :, :].double()
    return dense


def matmul(matrix: Bsr, b: torch.Tensor) -> torch.Tensor:
    """matrix @ b in float64, block by block: rows of b that meet no block do not matter, whatever they hold.

    b (K, N), or (L, K, N).
    """
    bm, bk = matrix.values.shape[-2:]
    lead = torch.broadcast_shapes(matrix.values.shape[:-3], b.shape[:-2])
    d = torch.zeros(*lead, matrix.shape[0], b.shape[-1], dtype=torch.float64, device=b.device)
    crow, col = matrix.crow.tolist(), matrix.col.tolist()
    for row in range(len(crow) - 1):
        for entry in range(crow[row], crow[row + 1]):
            panel = b[..., col[entry] * bk : (col[entry] + 1) * bk, :].double()
            d[..., row * bm : (row + 1) * bm, :] += matrix.values[..., entry, :, :].double() @ panel
    return d


def sampled(a: torch.Tensor, b: torch.Tensor, matrix: Bsr) -> torch.Tensor:
    """The blocks of a @ b in float64 that the matrix keeps: (nnz, bm, bk), or with L first."""
    bm, bk = matrix.values.shape[-2:]
    crow, col = matrix.crow.tolist(), matrix.col.tolist()
    blocks = []
    for row in range(len(crow) - 1):
        for entry in range(crow[row], crow[row + 1]):
            rows = a[..., row * bm : (row + 1) * bm, :].double()
            blocks.append(rows @ b[..., col[entry] * bk : (col[entry] + 1) * bk].double())
    if blocks:
        return torch.stack(blocks, dim=-3)
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return torch.zeros(*lead, 0, bm, bk, dtype=torch.float64, device=a.device)


def uniform(rows: int, columns: int, kept: int, generator: torch.Generator) -> torch.Tensor:
    """Mask (rows, columns) with `kept` random blocks in each row."""
    scores = torch.rand(rows, columns, generator=generator)
    return _first(scores, torch.full((rows,), kept))


def power_law(rows: int, columns: int, kept: int, generator: torch.Generator) -> torch.Tensor:
    """Row lengths proportional to 1 / sqrt(rank), in random order, `kept` (1 at least) on average."""
    weight = 1 / torch.arange(1, rows + 1, dtype=torch.float64).sqrt()
    lengths = (weight * (kept * rows / weight.sum())).round().clamp(1, columns).long()
    missing, place = kept * rows - int(lengths.sum()), 0
    while missing:  # what rounding and the limits took goes to others: the work is that of `uniform`
        step = 1 if missing > 0 else -1
        if 1 <= lengths[place] + step <= columns:
            lengths[place] += step
            missing -= step
        place = (place + 1) % rows
    lengths = lengths[torch.randperm(rows, generator=generator)]
    return _first(torch.rand(rows, columns, generator=generator), lengths)


def one_heavy_row(rows: int, columns: int, kept: int, generator: torch.Generator) -> torch.Tensor:
    """One full row among rows of `kept` blocks."""
    mask = uniform(rows, columns, kept, generator)
    mask[rows // 2] = True
    return mask


def empty_rows(rows: int, columns: int, kept: int, generator: torch.Generator) -> torch.Tensor:
    """Every other row empty, columns too."""
    mask = uniform(rows, columns, kept, generator)
    mask[::2] = False
    mask[:, ::3] = False
    return mask


def full(rows: int, columns: int, kept: int, generator: torch.Generator) -> torch.Tensor:
    """All blocks."""
    return torch.ones(rows, columns, dtype=torch.bool)


def none(rows: int, columns: int, kept: int, generator: torch.Generator) -> torch.Tensor:
    """No block."""
    return torch.zeros(rows, columns, dtype=torch.bool)


PATTERNS: dict[str, Callable[[int, int, int, torch.Generator], torch.Tensor]] = {
    "uniform": uniform,
    "power_law": power_law,
    "one_heavy_row": one_heavy_row,
    "empty_rows": empty_rows,
    "full": full,
    "none": none,
}


def _first(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mask of the places with the `lengths[r]` lowest scores of each row r."""
    ranks = scores.argsort(dim=1).argsort(dim=1)
    return ranks < lengths[:, None]


def random_bsr(
    pattern: str,
    grid: tuple[int, int],
    block: tuple[int, int],
    kept: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    exact: bool = True,
    sorted_columns: bool = True,
    index_dtype: torch.dtype = torch.int32,
    device: str = "cpu",
) -> Bsr:
    """A matrix of grid (R, C) blocks with a pattern of `PATTERNS`.

    exact: values are small integers, so that float32 sums are exact in any order; else normal ones.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = PATTERNS[pattern](*grid, kept, generator)
    crow = torch.zeros(grid[0] + 1, dtype=torch.int64)
    crow[1:] = mask.sum(1).cumsum(0)
    order = torch.arange(grid[1]).expand(grid)
    if not sorted_columns:
        order = torch.rand(grid, generator=generator).argsort(dim=1)
    col = torch.cat([row[kept_in[row]] for row, kept_in in zip(order, mask)]) if mask.any() else order[0][:0]
    make = integers if exact else normal
    values = make((len(col), *block), dtype, seed=seed + 1, device=device)
    return Bsr(
        crow.to(device, index_dtype), col.to(device, index_dtype), values,
        (grid[0] * block[0], grid[1] * block[1]),
    )  # fmt: skip
