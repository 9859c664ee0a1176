"""`gemm(batch_invariant=True)`: a row has the same bits whatever M, the other rows and the alignments are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

import kernels_dsl
from kernels_dsl.config import gemm_table
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.order import Order, why_not_in_order
from kernels_dsl.config.problem import A100, H200, L40S, GemmProblem
from kernels_dsl.ops.gemm import gemm as gemm_module
from lowering import emulator

ROWS = (1, 2, 7, 16, 33, 64, 100, 129, 256)
ARCHES = ("sm_90a", "sm_80")
MANY = bool(os.environ.get("TEST_ALL_KERNELS"))


def _matrices(m: int, n: int, k: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in ((m, k), (k, n))]


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same elements two bytes after a multiple of 16, in rows of an odd pitch."""
    wide = torch.zeros(x.shape[0], x.shape[1] + 3, dtype=x.dtype)
    wide[:, 1 : 1 + x.shape[1]] = x
    return wide[:, 1 : 1 + x.shape[1]]


def _columns(x: torch.Tensor) -> torch.Tensor:
    """The same elements, column-major."""
    return x.mT.contiguous().mT


def _check_rows(a: torch.Tensor, b: torch.Tensor, rows: Sequence[int], **options: Any) -> None:
    """Products of some rows, from the middle, and of one row among others that hold NaN and infinities."""
    expected, size = kernels_dsl.gemm(a, b, batch_invariant=True, **options), a.shape[0]
    for m in rows:
        first = (size - m) // 2
        found = kernels_dsl.gemm(a[first : first + m].clone(), b, batch_invariant=True, **options)
        assert torch.equal(found, expected[first : first + m]), m
    others = a.clone()
    others[:20], others[21:] = torch.nan, torch.inf
    found = kernels_dsl.gemm(others, b, batch_invariant=True, **options)
    assert torch.equal(found[20], expected[20])


@pytest.mark.parametrize("arch", ARCHES)
def test_bits_of_rows(arch, seed):
    a, b = _matrices(256, 24, 264, seed)
    bias = torch.linspace(-1, 1, 24).bfloat16()
    with emulator.run(arch=arch, check=False):
        _check_rows(a, b, ROWS, bias=bias, activation="silu", alpha=0.3, out_dtype=torch.float32)


@pytest.mark.parametrize("arch", ARCHES)
def test_bits_with_other_tiles_and_layouts(arch, seed):
    """A split of K does change them."""
    a, b = _matrices(33, 40, 328, seed)  # the last K tile, which comes first, has 8, 8 or 72 elements of K
    configs: tuple[Any, ...] = (
        Sm80GemmConfig(128, 64, 32, 4, 2, 2), Sm80GemmConfig(32, 64, 64, 4, 2, 2, split_k=2),
    )  # fmt: skip
    if arch == "sm_90a":
        pingpong = Sm90GemmConfig(128, 64, cluster_m=2, schedule=Schedule.PINGPONG)
        configs = (Sm90GemmConfig(192, 128), pingpong, Sm90GemmConfig(64, 32, split_k=2))
    out = torch.empty(40, 33).mT
    exact: dict[str, Any] = {"out_dtype": torch.float32}  # bf16 would hide most of a difference
    with emulator.run(arch=arch, check=False):
        expected = kernels_dsl.gemm(a, b, batch_invariant=True, **exact)
        for config in configs:
            equal = torch.equal(kernels_dsl.gemm(a, b, config=config, **exact), expected)
            assert equal == (config.split_k == 1), config
        for left, right, place in (
            (_unaligned(a), _unaligned(b), None), (_columns(a), _columns(b), None), (a, b, out),
        ):  # fmt: skip
            found = kernels_dsl.gemm(left, right, out=place, batch_invariant=True, **exact)
            assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("family", [pytest.param("sm90", marks=pytest.mark.sm90), "sm80"])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (1536, 7168), (24576, 1536)])
def test_bits_of_rows_on_a_gpu(family, n, k, seed):
    """Of tiles of every size that the table has for these: tensor cores sum an element in one order."""
    a, b = (x.cuda() for x in _matrices(4096, n, k, seed))
    _check_rows(a, b, (*ROWS, 1000, 2048), family=family, out_dtype=torch.float32)


GRID = list(
    product(
        (1, 2, 8, 16, 33, 100, 256, 1000, 8192), (8, 72, 1024, 4096, 28672), (16, 520, 4096, 16384),
        ("bf16", "fp32"), (2, 4, 16),
    )
)  # fmt: skip


def test_no_choice_of_a_configuration_changes_the_order():
    """The choice without the option does, for each of the reasons that there are."""
    changed = set()
    for m, n, k, kind, align in GRID if MANY else GRID[::7]:
        for device, family in ((H200, "sm90"), (H200, "sm80"), (L40S, "sm80"), (A100, "sm80")):
            aligned = 16 if family == "sm90" else max(align, 4 if kind == "fp32" else 2)
            problem = GemmProblem(
                m, n, k, ab_type=kind, a_align=aligned, b_align=aligned, d_align=align,
                b_k_major=family == "sm90",
            )  # fmt: skip
            for order in (Order.SUMS, Order.ROW_SUMS):
                config = gemm_table.choose(problem, device, family, order)
                assert why_not_in_order(config, order, problem.ab_bytes) is None, problem
            chosen = gemm_table.choose(problem, device, family)
            usual = why_not_in_order(chosen, Order.SUMS, problem.ab_bytes)
            changed |= {(family, usual and usual.split()[0])}
    expected = {
        ("sm90", "split_k"),
        ("sm90", "turned"),
        ("sm80", "split_k"),
        ("sm80", "tile_k"),
        ("sm90", None),
    }
    assert expected <= changed


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_family_and_orientation_do_not_depend_on_m_or_alignment(arch):
    b = torch.empty(520, 72, dtype=torch.bfloat16)
    found = set()
    with emulator.run(arch=arch):
        for m in (*ROWS, 4096):
            a = torch.empty(m, 520, dtype=torch.bfloat16)
            for left, right in product((a, _unaligned(a)), (b, _unaligned(b), _columns(b))):
                for out in (None, torch.empty(72, m, dtype=a.dtype).mT):
                    decision = gemm_module.plan_for(left, right, out=out, batch_invariant=True).decision
                    found.add((decision.family, decision.swap, decision.config.split_k))
    assert found == {("sm90" if arch == "sm_90a" else "sm80", False, 1)}


def test_configurations_that_change_the_order_are_refused():
    a, b = _matrices(64, 64, 1024, 0)
    with emulator.run(arch="sm_90a"):
        for config, words in (
            (Sm90GemmConfig(64, 64, split_k=2), "split_k is 2"),
            (Sm90GemmConfig(64, 64, turned=True), "turned is True"),
            (Sm90GemmConfig(64, 64, stream_k=True), "stream_k is True"),
            (Sm90GemmConfig(64, 64, cluster_k=2), "cluster_k is 2"),
            (Sm80GemmConfig(64, 64, 64, 4, 2, 2), "tile_k is 64, must be 32"),
            (Sm80GemmConfig(128, 64, 32, 4, 2, 2), "its family is 'sm80', must be 'sm90'"),
        ):
            with pytest.raises(ValueError, match=r"^config is ") as caught:
                gemm_module.plan_for(a, b, config=config, batch_invariant=True)
            assert words in str(caught.value)
        assert kernels_dsl.supports(a, b, config=Sm90GemmConfig(64, 64), batch_invariant=True) is None
        own = Sm80GemmConfig(128, 64, 32, 4, 2, 2)
        assert kernels_dsl.supports(a, b, config=own, family="sm80", batch_invariant=True) is None
        with pytest.raises(ValueError, match=r"^batch_invariant is given"):
            kernels_dsl.autotune_gemm(a, b, batch_invariant=True)
