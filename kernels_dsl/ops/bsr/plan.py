"""From a call of a block-sparse product to a plan: what the next such call only has to launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import lowering
from kernels_dsl.checks.layout import MatrixLayout
from kernels_dsl.checks.overlap import byte_extent
from kernels_dsl.config.bsr import (
    ALIGN,
    BsrLayout,
    BsrProblem,
    PiecesRule,
    Sm90BsrConfig,
    choose,
    pieces_memory,
    pieces_rule,
    reads_other_order,
    unpaired,
)
from kernels_dsl.config.bsr_budget import fitted, why_not
from kernels_dsl.config.bsr_sm80 import check_grid, choose_sm80
from kernels_dsl.config.bsr_together import choose_together
from kernels_dsl.config.family import FAMILIES
from kernels_dsl.ops import allocate
from kernels_dsl.ops.bsr.arguments import CONFIGS, BsrConfig, BsrProductArguments
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.arguments import DTYPE_NAMES, GemmCall
from kernels_dsl.ops.gemm.layouts import contiguous_layout, matrix_layout
from kernels_dsl.ops.gemm.steps import operand_maker, preparation
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import counter_and_workspace, tile_counter
from kernels_dsl.sparse import together
from kernels_dsl.sparse.lists import check_pairs
from kernels_dsl.sparse.steps import one_block, values_step
from lowering.records import frozen

_FOLDER = "kernels_dsl.kernels.bsr"
FUNCTIONS = {
    "sm90": lowering.jit(f"{_FOLDER}.entry_sm90:bsr_sm90_entry", name="bsr_sm90"),
    "sm80": lowering.jit(f"{_FOLDER}.entry_sm80:bsr_sm80_entry", name="bsr_sm80"),
}
MMA_K_FP8 = 32
"""Elements of K of an fp8 mma.sync."""


@frozen
class Plan:
    """`run(values, dense, out, operands)` returns D, allocated where `out` is None.

    `operands`, `extents`: as in `kernels_dsl.ops.gemm.plan.Plan`, of out, values, dense and the others.
    `config` is None where nothing is launched.
    """

    run: Callable[..., torch.Tensor]
    operands: Callable[[tuple[Any, ...]], Any] | None
    config: Any
    extents: tuple[int, ...]


def _problem(call: GemmCall, arguments: BsrProductArguments, dense_k_major: bool, d_align: int) -> BsrProblem:
    block = arguments.sparse.block
    block_mn, block_k = block[::-1] if arguments.by_column else block
    elementwise = sum(2 for spec in call.operands if spec.modes in ("mn", "lmn") and spec.expand is None)
    return BsrProblem(
        call.m, call.n, call.k, arguments.sparse.nnz, block_mn, block_k, call.batch or 1,
        dtype=DTYPE_NAMES[call.ab_dtype], d_dtype=DTYPE_NAMES[call.d_dtype],
        # Blocks of fp8 are transposed beforehand where the lists are those of columns.
        sparse_k_major=not arguments.by_column or arguments.scaled,
        dense_k_major=dense_k_major, dense_left=arguments.dense_left,
        d_align=d_align, operand_bytes=elementwise,
    )  # fmt: skip


def _output_align(d_shape: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor | None) -> int:
    """Bytes that divide D's address and row pitch, 16 at most; an element's where columns are contiguous."""
    if out is None:
        layout = contiguous_layout(d_shape, dtype.itemsize)
    else:
        layout = matrix_layout(out)
    return layout.align if layout.contiguous == "row" else dtype.itemsize


_CHOOSE: dict[str, Callable[[BsrProblem], BsrConfig | None]] = {"sm90": choose, "sm80": choose_sm80}


def _pick(problem: BsrProblem, families: tuple[str, ...]) -> BsrConfig:
    """The configuration of the fastest family that can compute the problem."""
    found = (_CHOOSE[family](problem) for family in families)
    return next((config for config in found if config is not None), None) or choose_sm80(problem)


def _fitted(config: BsrConfig, problem: BsrProblem, target: Target) -> BsrConfig:
    """A caller's configuration for the problem; ValueError says why it cannot compute it."""
    config = fitted(config, problem)
    reason = why_not(config, problem, target.device)
    if reason is not None:
        raise ValueError(f"config is {config}, must be one that fits: {reason}")
    return config


def _fp8_families(
    arguments: BsrProductArguments, target: Target, families: tuple[str, ...]
) -> tuple[str, ...]:
    """The family for fp8 blocks; ValueError where there is none."""
    sparse = arguments.sparse
    if not target.device.has_fp8:
        major, minor = target.device.capability
        raise ValueError(
            f"the sparse matrix has dtype {sparse.dtype}, must be 16 bits on {target.device.name} of "
            f"compute capability {major}.{minor}: fp8 matrix instructions need 8.9"
        )
    block_k = sparse.block[0 if arguments.by_column else 1]
    if not FAMILIES[families[0]].uses_tma and block_k % MMA_K_FP8:
        raise ValueError(
            f"the sparse matrix has blocks of {sparse.block}, {block_k} along the summed mode, must be "
            f"a multiple of {MMA_K_FP8} for fp8 in the sm80 family: what an instruction sums has one scale"
        )
    return families[:1]


@frozen
class _DenseFactor:
    """The form in which the dense factor goes to the kernel. `copy`: the contiguous mode of its copy; None:
    as it is."""

    layout: MatrixLayout
    copy: str | None
    k_mode: str
    """The mode along K."""

    @property
    def k_major(self) -> bool:
        """True if it is contiguous along K."""
        return (self.copy or self.layout.contiguous) == self.k_mode


def _dense_factor(call: GemmCall, arguments: BsrProductArguments) -> _DenseFactor:
    layout = matrix_layout(arguments.dense)
    copy = None
    k_mode = "row" if arguments.dense_left else "column"
    if call.k == 0 or layout.contiguous is None or layout.align < ALIGN:
        copy = layout.contiguous or "row"
    if arguments.scaled and (copy is not None or layout.contiguous != k_mode):
        copy = k_mode  # fp8 matrix instructions read along K only
    return _DenseFactor(layout, copy, k_mode)


def build(call: GemmCall, arguments: BsrProductArguments, target: Target) -> Plan:
    """A plan for calls like this one, of these arguments. Compiles at its first run; launches nothing itself.

    ValueError where a forced `family` cannot run on the target.
    """
    config, family, dense, pattern = arguments.config, arguments.family, arguments.dense, arguments.pattern
    spans = (arguments.out, arguments.values, dense, *arguments.operand_values()[2:])
    extents = tuple(byte_extent(x) if isinstance(x, torch.Tensor) else 0 for x in spans)
    product_options.check_forced(config, family, CONFIGS)
    families = target.families(family if config is None else config.family)
    fp8, by_column = arguments.scaled, arguments.by_column
    if fp8:
        families = _fp8_families(arguments, target, families)
    make_out = allocate.maker(call.d_shape, call.d_dtype, dense.device)
    if 0 in call.d_shape:
        return Plan(lambda values, dense, out, _: make_out() if out is None else out, None, None, extents)
    factor = _dense_factor(call, arguments)
    problem = _problem(
        call, arguments, factor.k_major, _output_align(call.d_shape, call.d_dtype, arguments.out)
    )
    if config is None and FAMILIES[families[0]].uses_tma and reads_other_order(problem):
        other = "column" if (factor.copy or factor.layout.contiguous) == "row" else "row"
        factor, problem = replace(factor, copy=other), replace(problem, dense_k_major=False)
    chosen = _pick(problem, families) if config is None else _fitted(config, problem, target)
    rule: PiecesRule | None = None
    counter: Callable[[int], Any] = _no_counter
    shared: Sm90BsrConfig | None = None
    # The second launch reads the operands again, which may be D.
    may_share = not fp8 and (arguments.out is None or not call.operands)
    if isinstance(chosen, Sm90BsrConfig):
        if chosen.rows_together > 1:
            if not may_share:
                raise ValueError(f"config is {config}, must have rows_together 1 with out and an epilogue")
            shared, chosen = chosen, choose(problem) or chosen
        elif not fp8 and (config is None or chosen.split):
            longest = pattern.longest[1 if arguments.by_column else 0]
            rule = pieces_rule(problem, unpaired(chosen), target.device.sm_count, longest)
        if config is None and rule is None and may_share:
            shared = choose_together(problem, target.device.sm_count)
        chosen = replace(chosen, split=False) if rule is None else replace(unpaired(chosen), split=True)
        counter = _counter(problem, chosen, rule)
    else:
        name, extent = ("a", call.m) if arguments.dense_left else ("b", call.n)
        tile = chosen.tile_m if arguments.dense_left else chosen.tile_n
        check_grid(name, -(-extent // tile), call.batch or 1)
    modes = tuple(spec.modes for spec in call.operands)
    turned = fp8 and by_column  # blocks are transposed beforehand
    stored = arguments.sparse.block[::-1] if turned else arguments.sparse.block
    constexprs = {
        "config": chosen,
        "epilogue": call.epilogue,
        "layout": BsrLayout(
            stored, arguments.by_column and not turned, arguments.dense_left, modes[1:] if fp8 else modes, fp8
        ),
    }
    prepare: Callable[[torch.Tensor], torch.Tensor] | None
    if call.k == 0:
        prepare = one_block(problem.block_k, arguments.dense_left, factor.k_mode if fp8 else "row")
    else:
        batch = dense.shape[0] if dense.dim() == 3 else None
        prepare = preparation(dense, factor.layout, factor.copy, batch)
    if chosen.pairs and rule is None:
        sizes = pattern.rows, pattern.columns
        check_pairs(*(sizes[::-1] if arguments.by_column else sizes))

    def packed() -> torch.Tensor:  # holds no tensor of the call
        lists = pattern.by_column if by_column else pattern.by_row
        if rule is not None:
            return lists.in_pieces(rule)
        return lists.in_pairs if chosen.pairs else lists.packed

    steps = together.Steps(values_step(arguments.sparse, turned), prepare, make_out)
    if shared is None:
        launch = Launch(FUNCTIONS[chosen.family], target, constexprs)
        run = _prepared(launch, _Memory(packed, counter, rule is not None), *steps)
    else:
        joined = together.Joined(shared, constexprs, pattern, packed)
        launches = joined.launches(lambda f, choices: Launch(f, target, choices), FUNCTIONS["sm90"])
        words = partial(counter_and_workspace, target.index, 0, together.WORDS)
        run = together.runner(joined, launches, words, steps, target.device.sm_count)
    return Plan(run, operand_maker(call.operands, arguments.operands, target), shared or chosen, extents)


def _counter(problem: BsrProblem, config: Sm90BsrConfig, rule: PiecesRule | None) -> Callable[[int], Any]:
    """The function that gives a launch its counter on a device; with a rule also the workspace for the sums
    of pieces."""
    if rule is None:
        return tile_counter
    words, elements = pieces_memory(problem, config, rule)
    return lambda device: counter_and_workspace(device, elements, words)


def _no_counter(device: int) -> Any:
    return None


@frozen
class _Memory:
    """Memory of a launch besides its operands. `lists`: makes the lists, at the first run. `counter`: gives
    the counter of work items for a device; with `split` it gives a workspace, too, which is None without."""

    lists: Callable[[], torch.Tensor]
    counter: Callable[[int], Any]
    split: bool


def _prepared(
    launch: Launch, memory: _Memory, values_step: Any, dense_step: Any, make_out: Callable[[], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """`run` of a plan: steps before the launch, D allocated where there is none, the launch."""
    make_lists: Callable[[], torch.Tensor] | None = memory.lists
    lists: torch.Tensor | None = None
    counter, split = memory.counter, memory.split
    max_ctas, index = launch.target.device.sm_count, launch.target.index
    kernel: Callable[..., Any] | None = None  # the bare launch, once there is one

    def run(values: torch.Tensor, dense: torch.Tensor, out: Any, operands: Any) -> torch.Tensor:
        nonlocal kernel, lists, make_lists
        make = make_lists
        if make is not None:
            lists = make()
            make_lists = None  # it holds the pattern, which holds the plan
        if out is None:
            out = make_out()
        if values_step is not None:
            values = values_step(values)
        if dense_step is not None:
            dense = dense_step(dense)
        if kernel is None:
            counters = counter(index) if split else (counter(index), None)
            launch(values, dense, out, lists, *counters, operands, max_ctas)
            kernel = launch.direct()
        elif split:
            counters, workspace = counter(index)
            kernel(values, dense, out, lists, counters, workspace, operands, max_ctas)
        else:
            kernel(values, dense, out, lists, counter(index), None, operands, max_ctas)
        return out

    return run
