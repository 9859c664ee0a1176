"""The scale of an operand: of all of it, of its rows, of its columns, or of 128 elements of K."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernels_dsl.checks.eager_path import check_tensor
from kernels_dsl.config.gemm import NUMBER
from kernels_dsl.config.promotion import GROUP
from kernels_dsl.ops.gemm.arguments import BLOCK_SCALE, OperandSpec, check_device, check_dtype
from lowering.records import frozen


@frozen
class OperandScale:
    """The scale of an operand with `extent` rows (of a, on the left) or columns (of b), and `groups` of 128
    along K."""

    name: str
    left: bool
    shape: tuple[int, ...]
    extent: int
    groups: int
    batch: int | None

    def _oriented(self, along: int, across: int) -> tuple[int, int]:
        return (along, across) if self.left else (across, along)

    @property
    def _has_fitting_batch(self) -> bool:
        lead = self.shape[:-2]
        return len(self.shape) >= 2 and lead in ((), (1,), (self.batch,))

    def broadcast(self) -> OperandSpec | None:
        """The scale as an operand of the epilogue, by its own modes; None where it is none."""
        rank, wanted = len(self.shape), self._oriented(self.extent, 1)
        if math.prod(self.shape) == 1:
            return OperandSpec(self.name, NUMBER)
        if not self._has_fitting_batch or self.shape[-2:] not in (wanted, (1, 1)):
            return None
        modes = "11" if self.shape[-2:] == (1, 1) else "m1" if self.left else "1n"
        lead = "" if rank == 2 else "1" if self.shape[0] == 1 else "l"
        return OperandSpec(self.name, lead + modes)

    def by_blocks(self) -> tuple[OperandSpec, int] | None:
        """The scale as one of 128 elements of K, and of how many rows; None where it is none."""
        if not self._has_fitting_batch:
            return None
        for rows in (1, GROUP):
            if self.shape[-2:] == self._oriented(-(-self.extent // rows), self.groups):
                count = 1 if self.batch is None else self.batch
                one_for_all = len(self.shape) == 3 and self.shape[0] == 1 != count
                expand = (count, *self.shape[1:]) if one_for_all else None
                return OperandSpec(self.name, BLOCK_SCALE, expand=expand), rows
        return None

    def error(self) -> ValueError:
        """An error that says what the scale must be."""
        single, block, large = (
            self._oriented(*pair)
            for pair in (
                (self.extent, 1),
                (self.extent, self.groups),
                (-(-self.extent // GROUP), self.groups),
            )
        )
        lead = "" if self.batch is None else f", with a batch of {self.batch} before it or without"
        return ValueError(
            f"{self.name} has shape {self.shape}, must be one element, {single} for a scale a "
            f"{'row' if self.left else 'column'}, or for 128 elements of K {block} or {large}, both "
            f"scales then{lead}"
        )


def check_scale(name: str, scale: Any, device: torch.device) -> None:
    """TypeError or ValueError where a scale is no float32 tensor on `device`."""
    check_tensor(name, scale)
    check_dtype(name, scale.dtype, (torch.float32,))
    check_device(name, scale, device)
