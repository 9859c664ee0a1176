"""The block-sparse kernels for ahead-of-time use are the ones that calls look up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kernels_dsl
from kernels_dsl import BsrTensor
from kernels_dsl.aot.bsr import iter_bsr
from lowering import recording


def _sparse(rows: int, columns: int, block: int, dtype: torch.dtype) -> BsrTensor:
    """One block in each block row."""
    count = rows // block
    crow = torch.arange(count + 1, dtype=torch.int32)
    col = torch.arange(count, dtype=torch.int32) % (columns // block)
    return BsrTensor(crow, col, torch.zeros(count, block, block, dtype=dtype), (rows, columns))


def _scaled(left: bool) -> None:
    sparse = _sparse(640, 640, 64, torch.float8_e4m3fn)
    of_blocks, one = torch.ones(sparse.nnz, 1, 1), torch.ones(())
    dense = torch.zeros(2048, 640).to(torch.float8_e4m3fn)
    if left:
        kernels_dsl.bsr_scaled_gemm(dense, sparse.t(), one, of_blocks)
    else:
        kernels_dsl.bsr_scaled_gemm(sparse, dense.t(), of_blocks, one)


def _plain(left: bool) -> None:
    sparse = _sparse(320, 320, 32, torch.bfloat16)
    dense = torch.zeros(320, 320, dtype=torch.bfloat16)
    kernels_dsl.bsr_gemm(*((dense, sparse) if left else (sparse, dense)))


@pytest.mark.parametrize("call", [_scaled, _plain])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_calls_find_shipped_kernels(call: Callable[[bool], None], arch: str) -> None:
    shipped = [(f.signature(*args), constants) for _, f, args, constants in iter_bsr(arch)]
    for left in (False, True):
        with recording.record(arch) as calls:
            call(left)
        found = calls[-1]
        assert (found.function.signature(*found.args), found.constants) in shipped
