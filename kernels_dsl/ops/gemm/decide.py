"""The choice of the kernel for a call of `gemm`: family, configuration, copies, orientation."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernels_dsl.checks.layout import MatrixLayout
from kernels_dsl.config import few_rows, gemm_table
from kernels_dsl.config.budget import why_not
from kernels_dsl.config.family import FAMILIES
from kernels_dsl.config.gemm import GemmConfig, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.config.order import Order, order_of, why_not_in_order
from kernels_dsl.config.problem import GemmProblem
from kernels_dsl.ops.gemm.arguments import DTYPE_NAMES, GemmCall
from kernels_dsl.ops.target import Target
from lowering import cache
from lowering.records import frozen

if TYPE_CHECKING:
    from kernels_dsl.config.tuned import TunedRecord


@frozen
class Decision:
    """The kernel to run: the problem, its configuration, orientation, and the copies of a and b.

    `problem` is in the kernel's orientation before the configuration turns it; `swap` after.
    `copy_a`, `copy_b`: the contiguous mode ("row" or "column") of the copy, None to use the tensor itself.
    """

    problem: GemmProblem
    config: GemmConfig
    swap: bool
    copy_a: str | None
    copy_b: str | None

    @property
    def family(self) -> str:
        """The kernel family, "sm90" or "sm80"."""
        return self.config.family


def copy_needed(layout: MatrixLayout, k_mode: str, dtype: torch.dtype, family: str) -> str | None:
    """The contiguous mode of the copy that `family` needs of an operand; None if it can read it as it is.

    `k_mode` is the mode ("row" or "column") that is contiguous when K is.
    """
    by_tma = FAMILIES[family].uses_tma
    # fp8 matrix instructions read their operands along K only, and so does WGMMA with tf32.
    if layout.contiguous != k_mode and (dtype.itemsize == 1 or (dtype.itemsize == 4 and by_tma)):
        return k_mode
    if not by_tma:
        enough = dtype.itemsize > 1 or layout.align >= 4  # cp.async; without it go pairs of 16-bit elements
        return None if layout.contiguous and enough else k_mode
    return None if layout.contiguous and layout.align >= 16 else (layout.contiguous or k_mode)


THIN_M = 32
"""Rows of a thin result; from one more on, a WGMMA tile of 64 rows is full enough."""


def transposed(call: GemmCall, d: MatrixLayout, family: str) -> bool:
    """True if the kernel computes D^T = B^T A^T: for a column-major D, and for a thin one on SM90.

    WGMMA's M is 64 rows at least and its N 8 columns at least, so a D of few rows wastes less as columns.
    """
    if call.groups is not None or call.batch_invariant or call.gated:
        return False  # groups are along the kernel's M; the operands' places in an instruction are fixed
    wide = FAMILIES[family].least_rows > THIN_M
    return d.contiguous == "column" or (wide and call.m <= THIN_M < call.n)


def _problem(
    call: GemmCall,
    layouts: tuple[MatrixLayout, MatrixLayout, MatrixLayout],
    copies: tuple[str | None, str | None],
    swap: bool,
) -> GemmProblem:
    """The problem in the kernel's orientation, after the copies."""
    a, b, d = layouts
    copy_a, copy_b = copies
    a_k_major = (copy_a or a.contiguous) == "row"  # a (M, K): rows run along K
    b_k_major = (copy_b or b.contiguous) == "column"  # b (K, N): columns run along K
    a_align, b_align = 16 if copy_a else a.align, 16 if copy_b else b.align
    m, n, d_align = call.m, call.n, d.align
    if call.groups is not None:
        m = -(-m // call.groups)
    # A thin result may be stored contiguous along the kernel's M.
    thin = swap and d.contiguous == "row" and not call.batch and call.reduction is None
    thin = thin and few_rows.thin_by_tma(call.m, call.n, call.k, call.ab_dtype.itemsize)
    if swap != (d.contiguous == "column") and not thin:
        d_align = call.d_dtype.itemsize  # not contiguous along the kernel's N
    if swap:
        m, n = n, m
        a_k_major, b_k_major, a_align, b_align = b_k_major, a_k_major, b_align, a_align
    # A TMA store cuts rows at 16 bytes: where a row of D ends between, as in a slice of a wider tensor, it
    # would overwrite what lies beside it.
    row_bytes = (call.d_shape[-1] if call.gated else m if thin else n) * call.d_dtype.itemsize
    d_align = min(d_align, row_bytes & -row_bytes) if row_bytes else d_align
    promotion = call.promotion.swapped() if swap and call.promotion is not None else call.promotion
    elementwise = sum(2 for spec in call.operands if spec.modes in ("mn", "lmn") and spec.expand is None)
    return GemmProblem(
        m, n, call.k, call.groups or call.batch or 1, DTYPE_NAMES[call.ab_dtype], DTYPE_NAMES[call.d_dtype],
        a_k_major=a_k_major, b_k_major=b_k_major, a_align=a_align, b_align=b_align, d_align=d_align,
        operand_bytes=elementwise, promotion=promotion, grouped=call.groups is not None, gated=call.gated,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _record_at(path: Path) -> TunedRecord:
    from kernels_dsl.config.tuned import TunedRecord

    return TunedRecord(path)


def _record_path() -> Path:
    return cache.dir() / "tuned_gemm.json"


def tuned_record() -> TunedRecord:
    """The tuner's record, beside the kernel cache."""
    return _record_at(_record_path())


def _pick(problem: GemmProblem, target: Target, family: str, order: Order) -> GemmConfig:
    """The measured winner if there is one that still fits, else the model's choice."""
    if not target.emulated and _record_path().exists():
        config = tuned_record().get(problem, target.device, family)
        if config is not None and why_not(config, problem, target.device) is None:
            if why_not_in_order(config, order, problem.ab_bytes) is None:
                return config
    return gemm_table.choose(problem, target.device, family, order)


def fit_to_problem(config: GemmConfig, problem: GemmProblem, target: Target) -> GemmConfig:
    """A caller's configuration, with TMA stores switched off where D's alignment forbids them.

    ValueError says why it cannot compute the problem.
    """
    if config.epi_tma and problem.d_align < 16 and config.split_k == 1:
        config = config.with_plain_stores()
    reason = why_not(config, problem, target.device)
    if reason is not None:
        raise ValueError(f"config is {config}, must be one that fits: {reason}")
    return config


def _check_order(config: GemmConfig, order: Order, family: str, ab_bytes: int) -> None:
    """ValueError where sums with `config` run in another order than without it, which `family` computes."""
    reason = why_not_in_order(config, order, ab_bytes)
    if reason is None and config.family != family:
        reason = f"its family is {config.family!r}, must be {family!r} with batch_invariant, or family given"
    if reason is not None:
        raise ValueError(f"config is {config}, must be one that fits: {reason}")


def families(dtype: torch.dtype, target: Target, forced: str | None) -> tuple[str, ...]:
    """Kernel families for operands of `dtype` on `target`, the fastest first; ValueError if none."""
    found = target.families(forced)
    if dtype.itemsize > 1:
        return found
    if not target.device.has_fp8:
        major, minor = target.device.capability
        raise ValueError(
            f"a is fp8, must be 16 bits or more on {target.device.name} of compute capability {major}.{minor}"
            ": fp8 matrix instructions need 8.9"
        )
    # Where there is WGMMA, mma.sync of fp8 runs at the speed of fp16 at most: a copy for TMA costs less.
    return found[:1]


def decide(
    call: GemmCall,
    layouts: tuple[MatrixLayout, MatrixLayout, MatrixLayout],
    target: Target,
    config: GemmConfig | None,
    family: str | None,
) -> Decision:
    """Choose family, configuration and copies for a call with a, b and d of these layouts.

    ValueError where a forced `family` or `config` cannot compute it.
    """
    order = order_of(call.batch_invariant, call.reduction)
    if config is not None:
        if not isinstance(config, (Sm90GemmConfig, Sm80GemmConfig)):
            kind = type(config).__name__
            raise TypeError(f"config is a {kind}, must be a Sm90GemmConfig or a Sm80GemmConfig")
        if call.batch_invariant:
            _check_order(config, order, families(call.ab_dtype, target, family)[0], call.ab_dtype.itemsize)
        family = config.family
    names = families(call.ab_dtype, target, family)
    if call.batch_invariant:
        names = names[:1]  # whatever the alignment: the other family has other instructions
    options = {}
    for name in names:
        copies = (
            copy_needed(layouts[0], "row", call.ab_dtype, name),
            copy_needed(layouts[1], "column", call.ab_dtype, name),
        )
        if call.groups is not None and layouts[0].contiguous != "row":
            copies = ("row", copies[1])  # a group may start at any row
        swap = transposed(call, layouts[2], name)
        options[name] = (copies, _problem(call, layouts, copies, swap))
    name = next(iter(options))
    if len(options) == 2 and any(options["sm90"][0]) and not any(options["sm80"][0]):
        copies, problem = options["sm90"]
        copied = [size for size, copy in zip((call.m * call.k, call.n * call.k), copies) if copy]
        copied_bytes = sum(copied) * problem.ab_bytes * problem.l
        if not gemm_table.copying_pays(options["sm80"][1], problem, copied_bytes, len(copied), target.device):
            name = "sm80"
    copies, problem = options[name]
    if config is None:
        chosen = _pick(problem, target, name, order)
    else:
        chosen = fit_to_problem(config, problem, target)
    swap = transposed(call, layouts[2], name) != chosen.turned
    return Decision(problem, chosen, swap, *copies)
