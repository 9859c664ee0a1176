"""From a checked call to a plan: what the next call with the same tensors' layouts only has to launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.checks.layout import MatrixLayout
from kernels_dsl.checks.overlap import byte_extent
from kernels_dsl.config import stream_k
from kernels_dsl.config.gemm import EntryLayout, GemmConfig, Sm90GemmConfig
from kernels_dsl.config.gemm_table import oriented
from kernels_dsl.ops import allocate
from kernels_dsl.ops.gemm import kernels as gemm_kernels
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.gemm.arguments import DenseArguments, GemmCall
from kernels_dsl.ops.gemm.decide import Decision, decide, families
from kernels_dsl.ops.gemm.layouts import contiguous_layout, matrix_layout
from kernels_dsl.ops.gemm.steps import Operands, Step, operand_maker, preparation, restrided
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import counter_and_workspace
from lowering import cache
from lowering.records import frozen

Run = Callable[..., torch.Tensor]

_EMPTY_K = 16  # extent of the zero operands that stand for those with K = 0


@frozen
class Plan:
    """The launches of a call.

    `run(a, b, out, operands)` returns D, or D and its reduction; with `out` None it allocates D.
    `operands(values)` makes the epilogue's operands from (alpha, beta, c, bias, residual, *epilogue_args),
    alpha and beta as floats; None where the epilogue has none. `decision` is None where nothing is launched.
    `extents`: bytes that out, a, b and the extra arguments span, 0 for one that is not given or no tensor.
    """

    run: Run
    operands: Callable[[tuple[Any, ...]], Operands] | None
    decision: Decision | None
    extents: tuple[int, ...]


def build(
    call: GemmCall, arguments: DenseArguments, target: Target, launch_of: type[Launch] | None = None
) -> Plan:
    """A plan for calls like this one, of these arguments. Compiles at its first run; launches nothing itself.

    `launch_of` makes its launch. ValueError where a forced `family` or `config` cannot compute the call.
    """
    a, b, out, config, family = arguments.a, arguments.b, arguments.out, arguments.config, arguments.family
    spans = (out, a, b, *arguments.operand_values()[2:])
    extents = tuple(byte_extent(x) if isinstance(x, torch.Tensor) else 0 for x in spans)
    product_options.check_forced(config, family)
    families(call.ab_dtype, target, family if config is None else config.family)
    if 0 in call.d_shape or call.groups == 0:
        return Plan(_allocating(call, lambda _a, _b, out, _operands: out), None, None, extents)
    if call.k == 0:
        return replace(_plan_for_empty_k(call, arguments, target, launch_of), extents=extents)
    layouts = (matrix_layout(a), matrix_layout(b), _output_layout(call, out))
    staged = out is not None and layouts[2].contiguous is None and not out.is_contiguous()
    if staged:
        layouts = (layouts[0], layouts[1], contiguous_layout(call.d_shape, call.d_dtype.itemsize))
    stored = stored_layouts(layouts, arguments)

    def with_config(config: GemmConfig | None, a: torch.Tensor, b: torch.Tensor) -> tuple[Run, Decision]:
        decision = decide(call, stored, target, config, family)
        prepare_a = preparation(a, layouts[0], decision.copy_a, call.batch)
        prepare_b = preparation(b, layouts[1], decision.copy_b, call.batch)
        launch = (launch_of or Launch)(call, decision, target)
        view_d = restrided(layouts[2].strides)
        if prepare_a is prepare_b is view_d is None and not staged:
            return _bare(launch, a.device), decision
        run = _prepared(launch, prepare_a, prepare_b, view_d)
        return _allocating(call, _through_contiguous(run, call) if staged else run), decision

    run, decision = with_config(config, a, b)
    if config is None and cache.compiling_refused():
        from kernels_dsl.ops.gemm.at_hand import with_kernel_at_hand

        run = with_kernel_at_hand(run, call, decision, target, with_config)  # which holds no tensor
    return Plan(run, operand_maker(call.operands, arguments.operands, target), decision, extents)


def stored_layouts(
    layouts: tuple[MatrixLayout, MatrixLayout, MatrixLayout], arguments: DenseArguments
) -> tuple[MatrixLayout, MatrixLayout, MatrixLayout]:
    """The layouts of a, b and d, d aligned no better than the product that is written beside it."""
    preact = vars(arguments).get("preact_out")
    if preact is None:
        return layouts
    product = matrix_layout(preact)
    # A view in place of the tensor, as D gets, would be one more step of a call: predicated stores will do.
    plain = product.contiguous != "row" or product.strides is not None
    align = preact.element_size() if plain else product.align
    return layouts[0], layouts[1], replace(layouts[2], align=min(layouts[2].align, align))


def _output_layout(call: GemmCall, out: torch.Tensor | None) -> MatrixLayout:
    if out is None:
        return contiguous_layout(call.d_shape, call.d_dtype.itemsize)
    return matrix_layout(out)


def _plan_for_empty_k(
    call: GemmCall, arguments: DenseArguments, target: Target, launch_of: type[Launch] | None
) -> Plan:
    """K = 0: D is the epilogue of zeros, which the product of operands that hold zeros gives."""
    if arguments.config is not None and arguments.config.split_k > 1:
        reason = f"split_k is {arguments.config.split_k}, must be 1 where K is 0"
        raise ValueError(f"config is {arguments.config}, must be one that fits: {reason}")

    def zeros(like: torch.Tensor, k_mode: int) -> torch.Tensor:
        shape = list(like.shape)
        shape[k_mode] = _EMPTY_K
        return like.new_zeros(shape)

    of_zeros = replace(arguments, a=zeros(arguments.a, -1), b=zeros(arguments.b, -2))  # type: ignore[type-var]
    inner = build(replace(call, k=_EMPTY_K), of_zeros, target, launch_of)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, operands: Operands) -> torch.Tensor:
        return inner.run(zeros(a, -1), zeros(b, -2), out, operands)

    return Plan(run, inner.operands, inner.decision, inner.extents)


class Launch:
    """Launches the kernel, or for split-K both kernels, of one plan; compiles them at the first call."""

    def __init__(self, call: GemmCall, decision: Decision, target: Target) -> None:
        self.call = call
        self.decision = decision
        self.target = target
        modes = tuple(spec.modes for spec in call.operands[call.not_epilogue :])
        self.layout = EntryLayout(
            modes, decision.swap, call.promotion, grouped=call.groups is not None, gated=call.gated
        )
        self.max_ctas = target.device.sm_count
        self._kernel: Callable[..., Any] | None = None
        self._reduce: Callable[..., Any] | None = None
        self._make_partials: Callable[[], torch.Tensor] | None = None
        self._streams = decision.config.stream_k
        self._cut = (1, 1, 0, 1)  # counters, elements of the workspace, shared tiles, K tiles of a share

    def __call__(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, operands: Operands) -> None:
        if self.decision.config.split_k > 1:
            return self._split(a, b, d, operands)
        if self._streams:
            return self._stream(a, b, d, operands)
        if self._kernel is None:
            self._kernel = self._compile(a, b, d, operands, self.call.epilogue, self.layout)
        self._kernel(a, b, d, operands, self.max_ctas)
        return None

    def direct(self) -> Callable[..., Any] | None:
        """The bare launch for calls that need nothing else; None before the first call, or where they do."""
        if self.decision.config.split_k > 1 or self._streams or self.target.emulated:
            return None
        return self._kernel

    def _compile(self, a: Any, b: Any, d: Any, operands: Operands, epilogue: Any, layout: EntryLayout) -> Any:
        args = (a, b, d, operands, self.max_ctas)
        constexprs = {"config": self.decision.config, "epilogue": epilogue, "layout": layout}
        launch, kernel = gemm_kernels.launcher(self.decision.family, self.target, args, constexprs)
        self.max_ctas = gemm_kernels.resident_ctas(kernel, self.decision.config, self.target)
        return launch

    def _stream(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, operands: Operands) -> None:
        """One launch, with memory for the sums of tiles that are cut along K."""
        index, values = self.target.index, operands or ()
        if self._kernel is None:
            first = (*counter_and_workspace(index, 1), 0, 1, *values)
            kernel = self._compile(a, b, d, first, self.call.epilogue, self.layout)
            # Only now it is known how many CTAs run at one time.
            config = self.decision.config
            assert isinstance(config, Sm90GemmConfig)
            found = stream_k.shares(config, oriented(self.decision.problem, config), self.max_ctas)
            self._cut = (*stream_k.memory(config, found), found.tiles, found.share)
            self._kernel = kernel  # last: another thread launches as soon as it is there
        counters, elements, tiles, share = self._cut
        memory = counter_and_workspace(index, elements, counters)
        self._kernel(a, b, d, (*memory, tiles, share, *values), self.max_ctas)

    def _split(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, operands: Operands) -> None:
        """Partial sums into a float32 workspace, then their sum and the epilogue into D."""
        if self._make_partials is None:
            config = self.decision.config
            shape = stream_k.partials_shape(oriented(self.decision.problem, config), config.split_k)
            self._make_partials = allocate.maker(shape, torch.float32, d.device)
        workspace = self._make_partials()
        blocks = self.call.not_epilogue
        scales, epilogue_operands = (
            (operands or ())[part] or None for part in (slice(blocks), slice(blocks, None))
        )
        if self._kernel is None:
            plain = replace(self.layout, operand_modes=(), gated=False)
            kernel = self._compile(a, b, workspace, scales, LinearEpilogue(), plain)
            constexprs = {
                "split_k": self.decision.config.split_k,
                "epilogue": self.call.epilogue,
                "layout": replace(self.layout, promotion=None),
                "early": self.decision.config.traits.launches_early,
            }
            self._reduce, _ = gemm_kernels.launcher(
                "splitk_reduce", self.target, (workspace, d, epilogue_operands), constexprs
            )
            self._kernel = kernel  # last, as in `_stream`
        assert self._reduce is not None
        self._kernel(a, b, workspace, scales, self.max_ctas)
        self._reduce(workspace, d, epilogue_operands)


def _prepared(launch: Launch, prepare_a: Step | None, prepare_b: Step | None, view_d: Step | None) -> Run:
    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, operands: Operands) -> torch.Tensor:
        launch(
            a if prepare_a is None else prepare_a(a),
            b if prepare_b is None else prepare_b(b),
            out if view_d is None else view_d(out),
            operands,
        )
        return out

    return run


def _bare(launch: Launch, device: torch.device) -> Run:
    """The run of a plan that only launches, D allocated where the caller gave none: one frame of Python."""
    kernel: Callable[..., Any] | None = None
    max_ctas = launch.max_ctas
    make_out = allocate.maker(launch.call.d_shape, launch.call.d_dtype, device)

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, operands: Operands) -> torch.Tensor:
        nonlocal kernel, max_ctas
        if out is None:
            out = make_out()
        if kernel is not None:
            kernel(a, b, out, operands, max_ctas)
            return out
        launch(a, b, out, operands)
        max_ctas = launch.max_ctas
        kernel = launch.direct()  # last: another thread launches as soon as it is there
        return out

    return run


def _through_contiguous(run: Run, call: GemmCall) -> Run:
    """For an out without a contiguous mode: compute into a fresh tensor and copy."""
    partly = call.groups is not None  # rows of no group keep what they hold

    def staged(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, operands: Operands) -> torch.Tensor:
        dense = torch.empty(call.d_shape, dtype=call.d_dtype, device=out.device)
        if partly:
            dense.copy_(out)
        return out.copy_(run(a, b, dense, operands))

    return staged


def _allocating(call: GemmCall, run: Run) -> Run:
    """`run`, with D allocated where the caller gave none."""
    shape, dtype = call.d_shape, call.d_dtype

    def allocating(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, operands: Operands
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=a.device)
        return run(a, b, out, operands)

    return allocating
