"""Products whose index tensors say nonsense stay within their tensors, for both families."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.sparse.tensor import BsrTensor
from lowering import emulator

BLOCK, ROWS, COLUMNS = 16, 3, 4
INDICES = {
    "starts and columns outside": ([-3, 2, 900, 4], [-1, 4, 2**31 - 1, 1]),
    "starts that fall": ([0, 4, 1, 4], [3, 2, 1, 0]),
}


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize(("starts", "columns"), INDICES.values(), ids=INDICES)
def test_products_of_nonsense_stay_inside(starts, columns, arch):
    values = torch.ones(len(columns), BLOCK, BLOCK, dtype=torch.bfloat16)
    crow, col = (torch.tensor(x, dtype=torch.int32) for x in (starts, columns))
    a = BsrTensor(crow, col, values, (ROWS * BLOCK, COLUMNS * BLOCK))
    x, y = (torch.ones(BLOCK * n, 24, dtype=torch.bfloat16) for n in (COLUMNS, ROWS))
    with emulator.run(arch=arch) as session:  # an access outside raises
        results = bsr_gemm(a, x), bsr_gemm(a.t(), y), bsr_sddmm(y, x.mT, a).values
    assert not session.reports
    assert all(result.isfinite().all() for result in results)
