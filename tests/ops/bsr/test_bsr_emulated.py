"""Block-sparse products through the real kernels, in the emulator: small ones, since it is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels_dsl.config.bsr import MatchRule, Sm90BsrConfig
from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.ops.bsr.bsr import bsr_gemm
from kernels_dsl.ops.bsr.sampled import bsr_sddmm
from kernels_dsl.ops.target import Target, target_of
from kernels_dsl.ops.tile_counter import tile_counter
from kernels_dsl.sparse.tensor import BsrTensor
from lowering import emulator
from reference.bsr import matmul, random_bsr, to_dense
from reference.inputs import integers
from tests.ops.bsr import bsr_cases
from tests.ops.bsr.bsr_cases import FORMS, Case

EXACT = [
    *(Case("uniform", (3, 4), (16, 16), 40, form=form) for form in FORMS),
    *(Case("power_law", (3, 4), (48, 80), 24, form=form, sorted_columns=False) for form in FORMS[::3]),
    Case("one_heavy_row", (4, 5), (32, 16), 136, index_dtype=torch.int64),
    Case("empty_rows", (4, 7), (64, 32), 21, linear=True),
    Case("none", (2, 3), (16, 32), 24, linear=True),
    Case("power_law", (2, 3), (64, 48), 264),
    Case("full", (2, 2), (128, 112), 16, dtype=torch.float16, out_dtype=torch.float32),
    Case("uniform", (2, 3), (16, 16), 13, columns_contiguous=True, pad=3),
    Case("uniform", (2, 3), (16, 16), 24, batch=(True, True)),
    Case("uniform", (2, 3), (16, 16), 24, batch=(False, True), form="b at"),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_integers_match_bit_for_bit(case: Case) -> None:
    with emulator.run(arch="sm_89") as session:
        bsr_cases.run(case, "cpu")
    assert not session.reports


HOPPER = [
    Case("power_law", (3, 4), (16, 16), 40, linear=True),
    Case("empty_rows", (2, 5), (64, 48), 72, form="b a", linear=True),
    Case("uniform", (2, 3), (128, 64), 24, form="at b", out_dtype=torch.float32),
    Case("one_heavy_row", (3, 4), (32, 80), 21, form="b at", pad=3, sorted_columns=False),
    Case("full", (40, 1), (16, 16), 24, columns_contiguous=True),  # the dense factor goes through a copy
    Case("empty_rows", (3, 4), (48, 80), 264, linear=True),  # loads of a whole block
    Case("power_law", (3, 3), (96, 96), 24, form="at b"),
    Case("one_heavy_row", (2, 3), (112, 112), 264),  # loads of 16 along K, warpgroups share a tile
    Case("power_law", (2, 4), (128, 80), 136, sorted_columns=False),
    Case("uniform", (3, 4), (64, 64), 8),
    Case("power_law", (3, 4), (64, 64), 328, batch=(False, True)),
    Case("empty_rows", (3, 4), (64, 64), 40, form="b at"),
    Case("uniform", (3, 4), (32, 32), 40),
]


@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_integers_match_bit_for_bit_on_hopper(case: Case) -> None:
    with emulator.run(arch="sm_90a") as session:
        bsr_cases.run(replace(case, family="sm90"), "cpu")
    assert not session.reports


@pytest.mark.parametrize(
    ("case", "ctas", "wide"),
    [
        # Warpgroups share along N; kept blocks have a ring of their own, in which each takes two stages.
        # Of three lists two are a pair, with two blocks in common of two and three, and one is alone.
        (Case("power_law", (3, 3), (80, 64), 520, form="at b", linear=True), 2, True),
        (Case("power_law", (3, 3), (64, 80), 520), 2, True),  # in parts of 16 along K
        (Case("power_law", (5, 4), (48, 80), 264, linear=True), 4, True),  # pairs of lists on WGMMA's N
        (Case("power_law", (4, 5), (64, 64), 600), 4, False),  # pairs of CTAs, ping-pong
        (Case("one_heavy_row", (3, 36), (128, 16), 264, kept=33), 2, False),  # one pair, lists of two fetches
        (Case("power_law", (4, 5), (32, 80), 300, form="b at", batch=(True, True)), 4, True),  # pairs again
    ],
    ids=str,
)
def test_clusters_take_items_until_there_are_none(
    case: Case, ctas: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far fewer CTAs than items; the counter is 0 again at the end, ready for the next launch."""
    counters: list[torch.Tensor] = []

    def few(tensor: torch.Tensor, name: str) -> Target:
        target = target_of(tensor, name)
        return replace(target, device=replace(target.device, sm_count=ctas))

    def counter(index: int) -> torch.Tensor:
        counters.append(tile_counter(index))
        return counters[-1]

    if wide:
        monkeypatch.setattr("kernels_dsl.config.bsr.WIDE_ITEMS", 1)
        monkeypatch.setattr("kernels_dsl.config.bsr.PAIRED_ITEMS", {True: 1, False: 1})
        monkeypatch.setattr("kernels_dsl.sparse.lists.RULE", MatchRule(cost=0))
    monkeypatch.setattr("kernels_dsl.ops.operation.target_of", few)
    monkeypatch.setattr("kernels_dsl.ops.bsr.plan.tile_counter", counter)
    with emulator.run(arch="sm_90a", seed=ctas) as session:
        bsr_cases.run(replace(case, family="sm90"), "cpu")
    assert not session.reports
    assert [int(x) for x in counters] == [0]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sums of pieces cost nothing; the memory of each launch."""
    monkeypatch.setattr("kernels_dsl.config.bsr.PIECE_K", 0)
    monkeypatch.setattr("kernels_dsl.config.bsr.SUM_ELEMENTS", 1 << 20)
    return bsr_cases.memory_of_pieces(monkeypatch)


@pytest.mark.parametrize(
    ("case", "wide"),
    [
        (Case("full", (5, 1), (32, 64), 264, form="at b", batch=(False, True)), False),  # pairs of CTAs
        (Case("one_heavy_row", (1, 3), (64, 64), 520), True),  # warpgroups share along N
    ],
    ids=str,
)
def test_long_lists_come_in_pieces(
    case: Case, wide: bool, pieces: list[tuple[torch.Tensor, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr("kernels_dsl.config.bsr.WIDE_ITEMS", 1)
    with emulator.run(arch="sm_90a", seed=1) as session:
        bsr_cases.run(replace(case, family="sm90"), "cpu")
    assert not session.reports
    bsr_cases.check_pieces(pieces)


def test_tiles_of_more_than_256_rows_of_the_dense_matrix() -> None:
    """For a caller's configuration: each of two warpgroups has 192 or 256 of them."""
    matrix = random_bsr("power_law", (3, 4), (48, 80), 2, seed=1)
    b = integers((320, 520), torch.bfloat16, seed=2)
    for rows, unit_k in ((384, 80), (512, 16)):
        config = Sm90BsrConfig(48, rows, False, unit_k)
        with emulator.run(arch="sm_90a") as session:
            found = bsr_gemm(bsr_cases.sparse_of(matrix), b, config=config)
        assert not session.reports
        assert torch.equal(found, matmul(matrix, b).bfloat16())


def test_sums_of_pieces_repeat_and_the_epilogue_comes_once(
    pieces: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Whichever piece is the last to arrive. Other rows are empty."""
    matrix = random_bsr("one_heavy_row", (3, 12), (16, 16), 0, seed=1)
    b, c = integers((192, 40), torch.bfloat16, seed=2), integers((48, 40), torch.bfloat16, seed=3)
    options = {"c": c, "beta": 2.0, "bias": c[0], "residual": c, "family": "sm90"}
    with emulator.run(arch="sm_90a"):
        found = bsr_gemm(bsr_cases.sparse_of(matrix), b, **options)
    assert torch.equal(found, (matmul(matrix, b) + 3 * c.double() + c[0].double()).bfloat16())
    bsr_cases.check_pieces(pieces)
    matrix.values.normal_()
    results = []
    for seed in range(2):
        with emulator.run(arch="sm_90a", seed=seed):
            results.append(bsr_gemm(bsr_cases.sparse_of(matrix), b, **options))
    assert torch.equal(*results)


@pytest.mark.parametrize("block", [(16, 16), (48, 64), (128, 32)], ids=str)
def test_sampled_products_match_bit_for_bit(block: tuple[int, int]) -> None:
    case = Case("power_law", (3, 4), block, 0, columns_contiguous=block == (16, 16), pad=block[0] // 16)
    with emulator.run(arch="sm_89") as session:
        bsr_cases.run_sampled(case, 72, "cpu")
    assert not session.reports


@pytest.mark.parametrize(
    "case",
    [
        Case("power_law", (4, 9), (64, 64), 0, kept=4, pad=8),  # ping-pong, four blocks a tile, A for two
        Case("power_law", (3, 4), (128, 112), 0, columns_contiguous=True, pad=8),  # two a tile
        Case("power_law", (2, 3), (256, 320), 0),  # several tiles a block
        Case("power_law", (6, 19), (16, 16), 0, columns_contiguous=True, pad=8),  # four block rows a tile
        Case("empty_rows", (5, 7), (32, 48), 0, columns_contiguous=True, batch=(False, True)),  # two
    ],
    ids=str,
)
def test_sampled_products_match_bit_for_bit_on_hopper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels_dsl.config.bsr_sampled.SHARING_TILES", 0.5)
    monkeypatch.setattr("kernels_dsl.config.bsr_sampled.MANY_TILES", 0.5)
    monkeypatch.setattr("kernels_dsl.config.bsr_sampled.WASTE", 2.0)
    with emulator.run(arch="sm_90a") as session:
        bsr_cases.run_sampled(case, 136, "cpu")
    assert not session.reports


@pytest.mark.parametrize("form", ["a b", "b at"])
def test_gradients(form: str) -> None:
    """Gradients of values, dense factor and bias against autograd in float64 on the dense matrix."""
    matrix = random_bsr("uniform", (3, 2), (16, 32), 1, seed=3)
    left, transposed = form.startswith("b"), form.startswith("at") or form.endswith("t")
    rows, columns = matrix.shape[::-1] if transposed else matrix.shape
    values = matrix.values.clone().requires_grad_()
    dense = integers((8, rows) if left else (columns, 8), torch.bfloat16, seed=4).requires_grad_()
    bias = integers((columns if left else 8,), torch.bfloat16, seed=5).requires_grad_()
    with emulator.run(arch="sm_89"):
        sparse = BsrTensor(matrix.crow, matrix.col, values, matrix.shape)
        factor = sparse.t() if transposed else sparse
        out = bsr_gemm(
            *((dense, factor) if left else (factor, dense)), bias=bias, alpha=2.0, activation="relu"
        )
        weight = integers(tuple(out.shape), torch.bfloat16, seed=6)
        out.backward(weight)
    exact = [x.detach().double().requires_grad_() for x in (to_dense(matrix), dense, bias)]
    full = exact[0].mT if transposed else exact[0]
    product = exact[1] @ full if left else full @ exact[1]
    torch.relu(2.0 * product + exact[2]).backward(weight.double())
    d_full = exact[0].grad.unflatten(1, (2, 32)).unflatten(0, (3, 16)).transpose(1, 2)
    rows_of = torch.repeat_interleave(torch.arange(3), matrix.crow.diff())
    assert torch.equal(values.grad.double(), d_full[rows_of, matrix.col.long()])
    assert torch.equal(dense.grad.double(), exact[1].grad)
    assert torch.equal(bias.grad.double(), exact[2].grad)
    assert values.grad.abs().max() > 0


def test_gradients_of_batches_and_of_the_sampled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampled product goes past the dispatcher where no gradient is asked for."""
    matrix = random_bsr("uniform", (2, 3), (16, 16), 2, seed=3)
    values = matrix.values.clone().requires_grad_()
    b = integers((2, 48, 8), torch.bfloat16, seed=4)
    a = integers((32, 8), torch.bfloat16, seed=5).requires_grad_()
    with emulator.run(arch="sm_89"):
        bsr_gemm(BsrTensor(matrix.crow, matrix.col, values, matrix.shape), b).sum().backward()
        kept = bsr_sddmm(a, b[0].mT, BsrTensor(matrix.crow, matrix.col, matrix.values, matrix.shape))
        kept.values.sum().backward()
        monkeypatch.setattr(torch.ops.kernels_dsl, "bsr_sddmm", None)
        direct = bsr_sddmm(a.detach(), b[0].mT, BsrTensor(matrix.crow, matrix.col, kept.values, matrix.shape))
    assert torch.equal(direct.values, kept.values)
    d_full = (torch.ones(2, 32, 8) @ b.float().mT).sum(0)
    blocks = d_full.unflatten(1, (3, 16)).unflatten(0, (2, 16)).transpose(1, 2)
    rows_of = torch.repeat_interleave(torch.arange(2), matrix.crow.diff())
    assert torch.equal(values.grad.float(), blocks[rows_of, matrix.col.long()])
    ones = random_bsr("uniform", (2, 3), (16, 16), 2, seed=3)
    ones.values.fill_(1.0)
    assert torch.equal(a.grad.double(), matmul(ones, b[0]))


@pytest.mark.parametrize(("grid", "n"), [((2, 3), 0), ((0, 3), 8), ((2, 0), 8)], ids=str)
def test_nothing_to_multiply(grid: tuple[int, int], n: int) -> None:
    """Extents of 0, forward and backward, and the sampled product of them."""
    rows, columns = grid
    crow, col = torch.arange(rows + 1) * columns, torch.arange(columns).repeat(rows)
    values = torch.ones(len(col), 16, 32, dtype=torch.bfloat16, requires_grad=True)
    b = torch.ones(32 * columns, n, dtype=torch.bfloat16, requires_grad=True)
    sparse = BsrTensor(crow, col, values, (16 * rows, 32 * columns))
    with emulator.run(arch="sm_89"):
        d = bsr_gemm(sparse, b)
        assert d.shape == (16 * rows, n) and not d.any()
        assert bsr_gemm(b.mT, sparse.t()).shape == (n, 16 * rows)
        d.sum().backward()
        sampled = bsr_sddmm(d.detach(), b.detach().mT, sparse)
    assert sampled.values.shape == values.shape and not sampled.values.any()
    assert values.grad is not None and values.grad.shape == values.shape and not values.grad.any()
    assert b.grad is not None and b.grad.shape == b.shape and not b.grad.any()


def test_linear_forward_and_backward() -> None:
    linear = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    layer = BsrLinear.from_linear(linear, (16, 32), density=0.5, activation="gelu")
    x = torch.randn(2, 5, 64).bfloat16().requires_grad_()
    with emulator.run(arch="sm_89"):
        y = layer(x)
        assert not y._is_view()  # FSDP2 warns of a layer's output that is one
        y.float().square().sum().backward()
    weight = layer.weight.to_dense().detach().float()
    expected = torch.nn.functional.gelu(x.detach().float() @ weight.mT + linear.bias.detach().float())
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    assert layer.values.grad.shape == (3, 16, 32) and layer.bias.grad.shape == (48,)
    assert x.grad.abs().max() > 0 and "density=0.500" in repr(layer)


def test_torch_sparse_bsr_and_duplicates() -> None:
    """A torch tensor goes straight in; blocks that occur twice are summed, as the documentation says."""
    matrix = random_bsr("uniform", (2, 3), (16, 16), 2, seed=3)
    b = integers((48, 8), torch.bfloat16, seed=4)
    sparse = bsr_cases.sparse_of(matrix)
    twice = BsrTensor(matrix.crow, torch.zeros_like(matrix.col), matrix.values, matrix.shape)
    with emulator.run(arch="sm_89"):
        assert torch.equal(bsr_gemm(sparse.to_torch(), b).double(), matmul(matrix, b))
        summed = bsr_gemm(twice, b)
        with pytest.raises(ValueError, match="col_indices has 0 twice in block row 0"):
            bsr_gemm(twice, b, check=True)
    assert torch.equal(summed.float(), twice.to_dense().float() @ b.float())


def test_compiled_with_everything_in_one_graph() -> None:
    matrix = random_bsr("uniform", (2, 3), (16, 16), 2, seed=3)
    sparse, b = bsr_cases.sparse_of(matrix), integers((48, 8), torch.bfloat16, seed=4)
    function = torch.compile(
        lambda s, x: bsr_gemm(s, x * 2, activation="relu") + 1, backend="eager", fullgraph=True
    )
    with emulator.run(arch="sm_89"):
        assert torch.equal(function(sparse, b).double(), (matmul(matrix, b) * 2).relu() + 1)


@pytest.mark.parametrize("left", [False, True])
def test_opcheck(left: bool) -> None:
    from kernels_dsl.ops.bsr import register as bsr_register  # noqa: F401

    matrix = random_bsr("uniform", (2, 3), (16, 16), 2, seed=3)
    dense = integers((8, 32) if left else (48, 8), torch.bfloat16, seed=4).requires_grad_()
    arguments = (matrix.crow, matrix.col, matrix.values.requires_grad_(), dense)
    with emulator.run(arch="sm_89"):
        torch.library.opcheck(
            torch.ops.kernels_dsl.bsr_gemm.default, arguments,
            {"shape": list(matrix.shape), "dense_left": left},
        )  # fmt: skip
        if left:
            return
        keywords = {"shape": list(matrix.shape), "out": torch.zeros(32, 8).bfloat16()}
        plain = [x.detach() for x in arguments]
        torch.library.opcheck(torch.ops.kernels_dsl.bsr_gemm_out.default, plain, keywords)
        factors = [integers(size, torch.bfloat16, seed=4).requires_grad_() for size in ((32, 16), (16, 48))]
        torch.library.opcheck(
            torch.ops.kernels_dsl.bsr_sddmm.default, (*arguments[:2], *factors),
            {"shape": list(matrix.shape), "block": [16, 16]},
            test_utils=("test_autograd_registration", "test_faketensor"),
        )  # fmt: skip
