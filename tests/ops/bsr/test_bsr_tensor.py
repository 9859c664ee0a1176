"""`BsrTensor`: builders, conversions, lists, and what is refused with which words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree

from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.ops.bsr.bsr import bsr_gemm, bsr_supports
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.sparse.lists import HEAVY_LENGTH
from kernels_dsl.sparse.pattern import Pattern, pattern_of
from kernels_dsl.sparse.tensor import BsrTensor
from lowering import emulator
from reference.bsr import PATTERNS, random_bsr, to_dense
from tests.ops.bsr import bsr_cases


def _sparse(pattern: str = "power_law") -> BsrTensor:
    return bsr_cases.sparse_of(random_bsr(pattern, (4, 6), (16, 32), 2, sorted_columns=False))


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_dense_and_back(pattern: str) -> None:
    matrix = random_bsr(pattern, (4, 6), (16, 32), 2, sorted_columns=False, index_dtype=torch.int64)
    sparse = bsr_cases.sparse_of(matrix).check()
    dense = sparse.to_dense()
    assert torch.equal(dense.double(), to_dense(matrix))
    assert torch.equal(sparse.t().to_dense(), dense.mT) and sparse.t().size == (192, 64)
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[torch.repeat_interleave(torch.arange(4), matrix.crow.diff()), matrix.col] = True
    again = BsrTensor.from_dense(dense, mask, (16, 32)).check()
    assert again.nnz == sparse.nnz and torch.equal(again.to_dense(), dense)
    torch_again = BsrTensor.from_torch(again.to_torch())
    assert torch.equal(torch_again.to_dense(), dense) and torch_again.density == sparse.nnz / 24


def test_pruning_keeps_the_largest_blocks() -> None:
    dense = torch.randn(48, 64).bfloat16()
    norms = dense.float().view(3, 16, 4, 16).square().sum((1, 3))
    kept = BsrTensor.top_k(dense, (16, 16), 2).check()
    assert torch.equal(kept.crow_indices, torch.tensor([0, 2, 4, 6], dtype=torch.int32))
    best = norms.topk(2, dim=1).indices.sort(dim=1).values
    assert torch.equal(kept.col_indices.long(), best.flatten())
    pruned = BsrTensor.by_magnitude(dense, (16, 16), 0.25).check()
    assert pruned.nnz == 3
    found = pruned.values.float().square().sum((1, 2)).sort(descending=True).values
    torch.testing.assert_close(found, norms.flatten().topk(3).values)


def test_gradients_of_conversions() -> None:
    sparse = _sparse()
    values = sparse.values.float().bfloat16().requires_grad_()
    weight = torch.randn(64, 192).bfloat16()
    (sparse.with_values(values).to_dense() * weight).sum().backward()
    expected = BsrTensor.from_dense(weight, torch.ones(4, 6, dtype=torch.bool), (16, 32)).values.view(
        4, 6, 16, 32
    )
    rows = torch.repeat_interleave(torch.arange(4), sparse.crow_indices.diff())
    assert torch.equal(values.grad, expected[rows, sparse.col_indices])


def test_pytree() -> None:
    sparse = _sparse()
    leaves, spec = pytree.tree_flatten(sparse)
    assert [leaf.data_ptr() for leaf in leaves[:2]] == [
        sparse.crow_indices.data_ptr(), sparse.col_indices.data_ptr()
    ]  # fmt: skip
    doubled = pytree.tree_map(lambda x: x * 2 if x.is_floating_point() else x, sparse.t())
    assert doubled.transposed and torch.equal(doubled.values, sparse.values * 2)
    assert len(leaves) == 3 and torch.equal(pytree.tree_unflatten(leaves, spec).to_dense(), sparse.to_dense())


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_lists(pattern: str) -> None:
    """Each list has its blocks, by row and by column, and the longest come first."""
    matrix = random_bsr(pattern, (5, 7), (16, 16), 2, sorted_columns=False)
    found = Pattern(matrix.crow, matrix.col, 5, 7)
    cells = []
    for row in range(5):
        cells += [
            (row, int(matrix.col[e]), e) for e in range(int(matrix.crow[row]), int(matrix.crow[row + 1]))
        ]
    for lists, mode, count in ((found.by_row, 0, 5), (found.by_column, 1, 7)):
        lengths = lists.first.diff()
        assert lengths.sum() == len(cells) and lists.table.shape == (count, 4)
        order = lists.table[:, 0]
        assert sorted(order.tolist()) == list(range(count)) and not lists.table[:, 3].any()
        assert torch.equal(lists.table[:, 1:3], torch.stack((lists.first[order], lists.first[order + 1]), 1))
        assert lengths[order].diff().le(0).all()
        heavy = int((lengths > HEAVY_LENGTH * lengths.double().mean()).sum())
        head = torch.tensor([heavy, 0, 0, 0], dtype=torch.int32)
        across, kept = (
            x if len(x) else torch.zeros(1, dtype=torch.int32) for x in (lists.across, lists.kept)
        )
        assert torch.equal(lists.packed, torch.cat((head, lists.table.flatten(), across, kept)))
        for number in range(count):
            entries = range(int(lists.first[number]), int(lists.first[number + 1]))
            got = [(int(lists.across[e]), int(lists.kept[e])) for e in entries]
            want = [(cell[1 - mode], cell[2]) for cell in cells if cell[mode] == number]
            assert got == want


@pytest.mark.parametrize("units", [1, 3, 8])
@pytest.mark.parametrize("pattern", ["power_law", "empty_rows", "one_heavy_row", "full"])
def test_chunks_cover_every_kept_block_once(pattern: str, units: int) -> None:
    matrix = random_bsr(pattern, (5, 7), (16, 16), 2)
    rows, entries, columns, first = Pattern(matrix.crow, matrix.col, 5, 7).chunks(units)
    assert torch.equal(columns, matrix.col) and torch.equal(first, matrix.crow)
    covered = []
    for row, entry in zip(rows.tolist(), entries.tolist()):
        end = min(entry + units, int(first[row + 1]))
        assert end <= entry or int(first[row]) <= entry
        covered += range(entry, end)
    assert sorted(covered) == list(range(len(matrix.col)))


@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("pattern", ["power_law", "empty_rows"])
def test_chunks_of_several_block_rows(pattern: str, group: int) -> None:
    """Every kept block is in one chunk of its pair of block rows, at its row and column."""
    matrix = random_bsr(pattern, (5, 7), (16, 16), 2)
    nnz = len(matrix.col)
    rows, entries, columns, first, kept = Pattern(matrix.crow, matrix.col, 5, 7).chunks(3, group, 2)
    found = {}
    for row, entry in zip(rows.tolist(), entries.tolist()):
        assert 0 <= row < 3
        for e in range(entry, min(entry + 3, int(first[row + 1]))):
            found.update({int(kept[i, e]): (2 * row + i, int(columns[e])) for i in range(2)})
    found.pop(nnz)
    row_of = torch.repeat_interleave(torch.arange(5), matrix.crow.diff().long()).tolist()
    assert found == {e: (row_of[e], int(matrix.col[e])) for e in range(nnz)}


def test_lists_are_kept_and_renewed() -> None:
    matrix = random_bsr("uniform", (5, 7), (16, 16), 2)
    first = pattern_of(matrix.crow, matrix.col, 5, 7)
    assert pattern_of(matrix.crow, matrix.col, 5, 7) is first
    assert pattern_of(matrix.crow.clone(), matrix.col, 5, 7) is not first
    matrix.col.add_(0)
    changed = pattern_of(matrix.crow, matrix.col, 5, 7)
    assert changed is not first
    address = matrix.col.data_ptr()
    matrix.col.data = matrix.col.clone()  # the pattern holds what was there: nobody else gets its address
    assert matrix.col.data_ptr() != address == changed.col.data_ptr()


BROKEN = {
    "crow_indices goes from 1 to 8": ("crow_indices", [1, 2, 4, 6, 8]),
    "crow_indices goes from 0 to 9, must go from 0 to the number of blocks, 8": (
        "crow_indices",
        [0, 2, 4, 6, 9],
    ),
    "crow_indices decreases": ("crow_indices", [0, 4, 2, 6, 8]),
    "col_indices has values from -1": ("col_indices", [-1, 1, 0, 1, 0, 1, 0, 1]),
    "from 0 to 6, must be from 0 to 5": ("col_indices", [0, 6, 0, 1, 0, 1, 0, 1]),
    "has 1 twice in block row 3": ("col_indices", [0, 1, 0, 1, 0, 1, 1, 1]),
}


@pytest.mark.parametrize("words", BROKEN)
def test_checked_mode(words: str) -> None:
    name, values = BROKEN[words]
    broken = replace(_sparse("uniform"), **{name: torch.tensor(values)})
    with pytest.raises(ValueError, match=words):
        broken.check()
    with pytest.raises(ValueError, match=words):
        bsr_gemm(broken, torch.zeros(192, 8).bfloat16(), check=True)


def _wrong_parts() -> list:
    index = torch.tensor([0, 1])
    values = torch.zeros(1, 16, 16).bfloat16()
    return [
        (TypeError, "values has dtype torch.float32", (index, index[:1], values.float(), (16, 16))),
        (
            ValueError,
            r"blocks of \(16, 24\)",
            (index, index[:1], torch.zeros(1, 16, 24).bfloat16(), (16, 24)),
        ),
        (ValueError, "blocks of", (index, index[:1], torch.zeros(1, 16, 528).bfloat16(), (16, 528))),
        (ValueError, r"shape is \(16, 24\)", (index, index[:1], values, (16, 24))),
        (ValueError, "crow_indices has 2 entries, must have 3", (index, index[:1], values, (32, 16))),
        (ValueError, "with nnz 2", (index, index, values, (16, 16))),
        (ValueError, "crow_indices has shape", (index.float(), index[:1], values, (16, 16))),
    ]


@pytest.mark.parametrize(("kind", "words", "parts"), _wrong_parts(), ids=range(7))
def test_parts_that_do_not_fit(kind, words: str, parts: tuple) -> None:
    with pytest.raises(kind, match=words):
        BsrTensor(*parts)


def _wrong_calls() -> dict:
    b = torch.zeros(192, 8).bfloat16()
    return {
        "b has shape .* must have 192 rows": (b[:64], {}),
        "b has dtype torch.float16": (b.half(), {}),
        "out_dtype has dtype torch.int8": (b, {"out_dtype": torch.int8}),
        "bias has shape": (b, {"bias": b[0, :3]}),
        "out has shape": (b, {"out": b}),
        "activation is 'tanh'": (b, {"activation": "tanh"}),
        "family is 'sm70'": (b, {"family": "sm70"}),
        "out shares memory with b": (b, {"out": b[:64]}),
        "out has strides .* must not overlap itself": (b, {"out": b[:1].expand(64, 8)}),
    }


@pytest.mark.parametrize("words", _wrong_calls())
def test_calls_that_do_not_fit(words: str) -> None:
    b, options = _wrong_calls()[words]
    with emulator.run(arch="sm_89"):
        if "shares" not in words:
            assert re.search(words, bsr_supports(_sparse(), b, **options) or "")
        else:
            options = {"out": b[:64]}
        with pytest.raises((TypeError, ValueError), match=words):
            bsr_gemm(_sparse(), b, **options)
        assert bsr_supports(_sparse(), torch.zeros(192, 8).bfloat16()) is None


def test_other_refusals() -> None:
    sparse, b = _sparse(), torch.zeros(192, 8).bfloat16()
    with pytest.raises(TypeError, match="one must be a BsrTensor"):
        bsr_gemm(b, b)
    with pytest.raises(ValueError, match="on cpu, must be on a CUDA device"):
        bsr_gemm(sparse, b)
    with pytest.raises(ValueError, match=r"must be \(M, K\) and \(K, N\)"):
        bsr_sddmm(b, b.mT, sparse)
    with pytest.raises(TypeError, match="pattern must be"):
        bsr_sddmm(b, b.mT, b)
    with pytest.raises(ValueError, match="exactly one"):
        BsrLinear.from_linear(torch.nn.Linear(16, 16), (16, 16))
    with pytest.raises(ValueError, match="transposed"):
        BsrLinear(sparse.t())
    with pytest.raises(ValueError, match="must be neither"):
        sparse.t().to_torch()
    with pytest.raises(ValueError, match="out is given and a tensor requires grad"):
        values = sparse.values.clone().requires_grad_()
        bsr_gemm(sparse.with_values(values), b, out=torch.zeros(64, 8).bfloat16())


def test_builders_know_how_long_lists_are() -> None:
    """Products without a list that is cut take the kernel that knows nothing of pieces."""
    dense = torch.randn(64, 48)
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[1] = mask[:, 2] = True
    found = []
    for made in (
        BsrTensor.from_dense(dense.bfloat16(), mask, (16, 16)),
        BsrTensor.top_k(dense.bfloat16(), (16, 16), 2),
        BsrTensor(torch.tensor([0, 1]), torch.tensor([1]), torch.zeros(1, 16, 16).bfloat16(), (16, 32)),
    ):
        grid = made.shape[0] // 16, made.shape[1] // 16
        found.append(pattern_of(made.crow_indices, made.col_indices, *grid).longest)
    assert found == [(3, 4), (2, None), (None, None)]
