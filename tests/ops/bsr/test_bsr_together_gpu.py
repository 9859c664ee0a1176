"""Products of block rows that share tiles, on a Hopper GPU: large ones, as the library chooses them."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config.bsr import BsrProblem
from kernels_dsl.config.bsr_together import choose_together
from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.sparse.tensor import BsrTensor
from reference.inputs import integers

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]
BF16 = torch.bfloat16


def _matrix(extent: int, size: tuple[int, int], density: float = 0.6, seed: int = 1) -> BsrTensor:
    """Integers; a third of the block rows have half of the density, some have none."""
    rows, columns = size[0] // extent, size[1] // extent
    made = torch.Generator(device="cuda").manual_seed(seed)
    mask = torch.rand(rows, columns, generator=made, device="cuda") < density
    mask[::3] &= torch.rand(mask[::3].shape, generator=made, device="cuda") < 0.5
    mask[5::97] = False
    return BsrTensor.from_dense(integers(size, BF16, seed=seed, device="cuda"), mask, (extent, extent))


@pytest.mark.parametrize("extent", [16, 32])
@pytest.mark.parametrize("form", ["a b", "at b", "b a", "b at"])
def test_large_products_are_exact(extent: int, form: str) -> None:
    """All four forms, the last tile of rows and of columns ragged; bit for bit the same again."""
    size = (8192 - 3 * extent, 1024)
    size = size[::-1] if form in ("at b", "b a") else size
    matrix = _matrix(extent, size)
    sparse = matrix.t() if "t" in form else matrix
    left = form[0] == "b"
    inner = sparse.size[0 if left else 1]
    panel = integers((inner, 7936), BF16, seed=3, device="cuda")
    blocked, n = sparse.size[1 if left else 0], panel.shape[1]
    problem = BsrProblem(n if left else blocked, blocked if left else n, inner, matrix.nnz, extent, extent)
    assert choose_together(problem, 132) is not None
    dense = sparse.to_dense().double()
    expected = panel.mT.double() @ dense if left else dense @ panel.double()
    factors = (panel.mT, sparse) if left else (sparse, panel)
    found = [bsr_gemm(*factors, out_dtype=torch.float32) for _ in range(3)]
    assert torch.equal(found[0].double(), expected)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_what_is_not_finite_stays_where_it_belongs_in_graphs_too() -> None:
    matrix = _matrix(16, (8192, 512), density=0.4)
    b = integers((512, 4096), BF16, seed=3, device="cuda")
    wrong = b.clone()
    wrong[7, 100], wrong[300, 4000], wrong[511, 5] = float("inf"), float("nan"), float("-inf")
    used, out = b.clone(), torch.empty(8192, 4096, device="cuda")
    bsr_gemm(matrix, used, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bsr_gemm(matrix, used, out=out)
    kept = (matrix.to_dense() != 0).float()
    touched = kept @ (~wrong.isfinite()).float() > 0  # by an element that is not 0
    finite = matrix.to_dense().double() @ b.double()
    for source in (wrong, b, wrong, wrong, b):
        used.copy_(source)
        graph.replay()
        if source is b:
            assert torch.equal(out.double(), finite)
        else:
            # A 0 in a block that is kept makes NaN, too.
            blocks = torch.nn.functional.max_pool2d(kept[None], 16)[0].repeat_interleave(16, 0)
            near = blocks.repeat_interleave(16, 1) @ (~wrong.isfinite()).float() > 0
            assert not out[touched].isfinite().any() and torch.equal(out[~near].double(), finite[~near])


def test_calls_on_two_streams_at_a_time() -> None:
    matrices = [_matrix(16, (8192, 512), density=0.4, seed=seed) for seed in (1, 2)]
    b = integers((512, 4096), BF16, seed=3, device="cuda")
    expected = [bsr_gemm(matrix, b) for matrix in matrices]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in matrices], []
    for _ in range(10):
        for stream, matrix in zip(streams, matrices):
            with torch.cuda.stream(stream):
                found.append(bsr_gemm(matrix, b))
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected[i % 2]) for i, x in enumerate(found))
