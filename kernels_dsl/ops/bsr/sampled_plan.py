"""From a call of a sampled product to its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

import lowering
from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.config.bsr import ALIGN
from kernels_dsl.config.bsr_sampled import choose_sampled
from kernels_dsl.config.bsr_sm80 import check_grid, choose_sddmm_sm80, sddmm_units
from kernels_dsl.config.family import FAMILIES
from kernels_dsl.ops import allocate
from kernels_dsl.ops.gemm.layouts import matrix_layout
from kernels_dsl.ops.gemm.steps import preparation
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target

if TYPE_CHECKING:
    from kernels_dsl.ops.bsr.sampled_product import SampledArguments, SampledCall

_FOLDER = "kernels_dsl.kernels.bsr"
FUNCTIONS = {
    "sm90": lowering.jit(f"{_FOLDER}.sddmm_sm90:sddmm_sm90_entry", name="bsr_sddmm_sm90"),
    "sm80": lowering.jit(f"{_FOLDER}.sddmm_sm80:sddmm_sm80_entry", name="bsr_sddmm_sm80"),
}


def build_sampled(
    call: SampledCall, arguments: SampledArguments, target: Target
) -> Callable[..., torch.Tensor]:
    """`run(a, b, operands)` of a sampled product, which makes the values."""
    a, b, pattern, block = arguments.a, arguments.b, arguments.pattern, arguments.block
    shape, out_dtype, batch = call.d_shape, call.d_dtype, None if len(call.d_shape) == 3 else call.d_shape[0]
    families, max_ctas = target.families(None), target.device.sm_count
    if 0 in shape or a.shape[-1] == 0:
        return lambda a, b, operands: a.new_zeros(shape, dtype=out_dtype)
    layouts = (matrix_layout(a), matrix_layout(b))
    copies = (
        None if layouts[0].contiguous else "row",
        # What is gathered goes by cp.async alone, which takes 4 bytes at least.
        None if layouts[1].contiguous and layouts[1].align >= 4 else layouts[1].contiguous or "column",
    )
    aligns = tuple(ALIGN if copy else x.align for x, copy in zip(layouts, copies))
    steps = [
        preparation(x, layout, copy, x.shape[0] if x.dim() == 3 else None)
        for x, layout, copy in zip((a, b), layouts, copies)
    ]
    constexprs: dict[str, Any] = {"epilogue": LinearEpilogue(alpha=arguments.alpha != 1.0), "block": block}
    b_k_major = (copies[1] or layouts[1].contiguous) == "column"
    chosen = None
    if FAMILIES[families[0]].uses_tma:
        kept = pattern.nnz / max(1, pattern.rows)
        chosen = choose_sampled(block, b_k_major, min(aligns) >= ALIGN, kept)
    if chosen is not None:
        constexprs |= {"config": chosen}
        lists = pattern.chunks(chosen.units * chosen.cluster, chosen.group, chosen.rows_together)
        launch = Launch(FUNCTIONS["sm90"], target, constexprs)
    else:
        check_grid("a", 1, batch or 1)
        units = sddmm_units(block)
        constexprs |= {"config": choose_sddmm_sm80(block, (aligns[0], aligns[1])), "units": units}
        lists = pattern.chunks(units)
        launch = Launch(FUNCTIONS["sm80"], target, constexprs)

    make_out = allocate.maker(shape, out_dtype, a.device)
    step_a, step_b = steps
    kernel: Callable[..., Any] | None = None  # the bare launch, once there is one

    def run(a: torch.Tensor, b: torch.Tensor, operands: Any) -> torch.Tensor:
        nonlocal kernel
        out = make_out()
        if step_a is not None:
            a = step_a(a)
        if step_b is not None:
            b = step_b(b)
        if kernel is not None:
            kernel(a, b, out, lists, operands, max_ctas)
        else:
            launch(a, b, out, lists, operands, max_ctas)
            kernel = launch.direct()
        return out

    return run
