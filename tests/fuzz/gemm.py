"""Cases of the dense products and of `grouped_gemm`, and of `autotune_gemm` on a GPU."""

from __future__ import annotations

from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.blocks.reduce.reductions import REDUCTIONS
from kernels_dsl.config.gemm_table import TABLES
from tests.fuzz import margin
from tests.fuzz.case import Case, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_dense import DenseCase, draw_dense, forced_in_turn, table_name
from tests.fuzz.gemm_gated import draw_gated
from tests.fuzz.gemm_gradient import OPERATIONS as DIFFERENTIABLE
from tests.fuzz.gemm_gradient import draw_gradient
from tests.fuzz.gemm_grouped import draw_grouped
from tests.fuzz.gemm_huge import draw_huge
from tests.fuzz.gemm_invariant import OPERATIONS as INVARIANT
from tests.fuzz.gemm_invariant import draw_invariant
from tests.fuzz.gemm_reduced import draw_reduced

_ODDS = (
    (draw_grouped, 0.25),
    (draw_reduced, 0.25),
    (draw_gated, 0.15),
    (draw_invariant, 0.1),
    (draw_gradient, 0.1),
)
"""Of the cases without a configuration in its turn; the others are of `gemm`."""
_HUGE_EVERY = 400


def generate(draw: Draw) -> Case:
    """A case: mostly dense products, some of groups, a few of more than 2³¹ elements."""
    kind = draw.kernel.random()
    if draw.settings.plant is not None:
        return draw_dense(draw)
    if draw.settings.device == "cuda" and draw.number % _HUGE_EVERY == _HUGE_EVERY - 1:
        return draw_huge(draw)
    return margin.perhaps(draw, draw_dense(draw) if forced_in_turn(draw) else _without_turn(draw, kind))


def _without_turn(draw: Draw, kind: float) -> Case:
    for make, odds in _ODDS:
        if kind < odds:
            return make(draw)
        kind -= odds
    return draw_dense(draw)


def expected_features(settings: Settings) -> list[str]:
    """Every operation, way of calling, and configuration of the tables that this GPU can run."""
    families = ("sm90", "sm80") if settings.arch == "sm_90a" else ("sm80",)
    found = [
        "gemm",
        "grouped_gemm",
        "gemm_reduce",
        "gemm_gated",
        "register_epilogue",
        "sm_margin",
        "mode plain",
    ]
    found += [f"{name} of {lines}" for name in REDUCTIONS for lines in ("rows", "columns")]
    found += [f"gate {name}" for name in GATES] + [f"preact {kept}" for kept in ("no", "made", "given")]
    found += [f"{name} batch_invariant" for name in INVARIANT]
    found += [f"gradient of {name}" for name in DIFFERENTIABLE]
    if settings.device == "cuda":
        found += ["autotune_gemm", "mode stream", "mode threads", "mode graph", "beyond 2^31 elements"]
    for family in families:
        found += [table_name(candidate.config) for candidate in TABLES[family]]
    return found


__all__ = ["DenseCase", "expected_features", "generate"]
