"""Cases of the block-sparse products: `bsr_gemm`, `bsr_scaled_gemm`, `bsr_sddmm`, gradients, `BsrLinear`."""

from __future__ import annotations

from tests.fuzz.bsr_layers import draw_layer
from tests.fuzz.bsr_matrix import FORMS
from tests.fuzz.bsr_product import FAMILIES, draw_product
from tests.fuzz.bsr_sampled import draw_sampled
from tests.fuzz.case import Case, Settings
from tests.fuzz.draw import Draw

_SAMPLED_ODDS = 0.15
_LAYER_ODDS = 0.08


def generate(draw: Draw) -> Case:
    """A case: mostly products, some sampled ones, gradients and layers."""
    kind = draw.kernel.random()
    if kind < _SAMPLED_ODDS:
        return draw_sampled(draw)
    if kind < _SAMPLED_ODDS + _LAYER_ODDS:
        return draw_layer(draw)
    return draw_product(draw)


def expected_features(settings: Settings) -> list[str]:
    """Every operation, form and way of calling, every maker of matrices, each family of kernels."""
    families = FAMILIES if settings.arch == "sm_90a" else ("sm80",)
    found = ["bsr_gemm", "bsr_scaled_gemm", "bsr_sddmm", "gradient of bsr_gemm", "BsrLinear", "mode plain"]
    found += [f"form {form}" for form in FORMS] + [f"bsr_gemm {family}" for family in families]
    found += [f"BsrTensor.{maker}" for maker in ("from_dense", "from_torch", "top_k", "by_magnitude")]
    found += ["list in pieces", "pairs of block rows"] if settings.arch == "sm_90a" else []
    if settings.device == "cuda":
        found += ["mode stream", "mode threads", "mode graph", "beyond 2^31 elements"]
    return found
