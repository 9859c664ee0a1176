"""Cases of `gemm` and `grouped_gemm`, and of `autotune_gemm` on a GPU."""

from __future__ import annotations

from kernels_dsl.config.gemm_table import TABLES
from tests.fuzz.case import Case, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_dense import DenseCase, draw_dense, forced_in_turn, table_name
from tests.fuzz.gemm_grouped import draw_grouped
from tests.fuzz.gemm_huge import draw_huge

_GROUPED_ODDS = 0.4
_HUGE_EVERY = 400


def generate(draw: Draw) -> Case:
    """A case: mostly dense products, some of groups, a few of more than 2³¹ elements."""
    kind = draw.kernel.random()
    if draw.settings.plant is not None:
        return draw_dense(draw)
    if draw.settings.device == "cuda" and draw.number % _HUGE_EVERY == _HUGE_EVERY - 1:
        return draw_huge(draw)
    if kind < _GROUPED_ODDS and not forced_in_turn(draw):
        return draw_grouped(draw)
    return draw_dense(draw)


def expected_features(settings: Settings) -> list[str]:
    """Every operation, way of calling, and configuration of the tables that this GPU can run."""
    families = ("sm90", "sm80") if settings.arch == "sm_90a" else ("sm80",)
    found = ["gemm", "grouped_gemm", "mode plain"]
    if settings.device == "cuda":
        found += ["autotune_gemm", "mode stream", "mode threads", "mode graph", "beyond 2^31 elements"]
    for family in families:
        found += [table_name(candidate.config) for candidate in TABLES[family]]
    return found


__all__ = ["DenseCase", "expected_features", "generate"]
