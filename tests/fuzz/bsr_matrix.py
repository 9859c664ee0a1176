"""Block-sparse matrices of cases: patterns, blocks of any size, indices of any kind, values in an arena."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels_dsl import BsrTensor
from reference.bsr import PATTERNS, Bsr, random_bsr
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena
from tests.fuzz.values import filler

BLOCKS = (16, 16, 32, 32, 48, 64, 64, 80, 96, 112, 128, 128, 144, 192, 256, 512)
SMALL_BLOCKS = (16, 32, 48, 64, 80, 128)
FORMS = ("a b", "at b", "b a", "b at")
"""Sparse on the left, its transpose on the left, and the same on the right."""


@dataclass(frozen=True)
class Matrix:
    """A drawn matrix of `grid` blocks. `seed`: of the pattern. `twice`: a block is listed twice in a row."""

    pattern: str
    grid: tuple[int, int]
    block: tuple[int, int]
    kept: int
    sorted_columns: bool
    index_dtype: torch.dtype
    twice: bool
    seed: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        return self.grid[0] * self.block[0], self.grid[1] * self.block[1]

    def indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(crow, col) on the CPU."""
        if 0 in self.grid:
            crow = torch.zeros(self.grid[0] + 1, dtype=self.index_dtype)
            return crow, torch.zeros(0, dtype=self.index_dtype)
        made = random_bsr(
            self.pattern, self.grid, (1, 1), min(self.kept, self.grid[1]), seed=self.seed,
            sorted_columns=self.sorted_columns, index_dtype=self.index_dtype,
        )  # fmt: skip
        crow, col = made.crow, made.col
        if self.twice and len(col):
            col = torch.cat([col[:1], col])
            first = int((crow > 0).nonzero()[0])
            crow = crow.clone()
            crow[first:] += 1
        return crow, col

    def lay_out(
        self, arena: Arena, dtype: torch.dtype, lead: tuple[int, ...], seed: int, exact: bool
    ) -> BsrTensor:
        """The matrix in `arena`: indices and values between poison."""
        crow, col = self.indices()
        fill = filler((*lead, len(col), *self.block), dtype, seed, str(arena.device), exact)
        return BsrTensor(
            arena.input("crow_indices", lambda generation: crow),
            arena.input("col_indices", lambda generation: col),
            arena.input("values", fill),
            self.shape,
        )


def plain(matrix: BsrTensor, values: torch.Tensor | None = None) -> Bsr:
    """The same for the references, as it is stored."""
    values = matrix.values if values is None else values
    return Bsr(matrix.crow_indices, matrix.col_indices, values, (matrix.shape[0], matrix.shape[1]))


def unread_columns(matrix: BsrTensor) -> torch.Tensor:
    """bool (columns,) of the stored matrix: those that no kept block has."""
    unread = torch.ones(matrix.shape[1] // matrix.block[1], dtype=torch.bool)
    unread[matrix.col_indices.long().cpu()] = False
    return unread.repeat_interleave(matrix.block[1])


def unread_rows(matrix: BsrTensor) -> torch.Tensor:
    """bool (rows,) of the stored matrix: those of empty block rows."""
    return (matrix.crow_indices.diff() == 0).cpu().repeat_interleave(matrix.block[0])


def draw_matrix(draw: Draw) -> Matrix:
    """A matrix: its block is the kernel's choice, all else the data's."""
    small, data = draw.settings.small, draw.data
    blocks = SMALL_BLOCKS if small else BLOCKS
    block = (draw.kernel.choice(blocks), draw.kernel.choice(blocks))
    most = (max(1, min(12, 200 // block[0])), max(1, min(12, 200 // block[1]))) if small else (
        max(2, min(70, 3000 // block[0])), max(2, min(70, 3000 // block[1])))  # fmt: skip
    grid = (data.randint(1, most[0]), data.randint(1, most[1]))
    if data.random() < 0.02:
        grid = data.choice(((0, grid[1]), (grid[0], 0)))
    matrix = Matrix(
        data.choice(sorted(PATTERNS)), grid, block, data.randint(1, max(grid[1], 1)),
        sorted_columns=data.random() < 0.7, index_dtype=draw.often(torch.int32, torch.int64), twice=False,
        seed=draw.value_seed(),
    )  # fmt: skip
    return replace(matrix, twice=data.random() < 0.03)
