"""Cases of attention: dense and packed calls, lists of blocks, gradients, refusals, PyTorch's calls."""

from __future__ import annotations

from tests.fuzz import attention_configs as configs
from tests.fuzz import attention_torch, margin
from tests.fuzz.attention_dense import draw_dense
from tests.fuzz.attention_flash import NAMES as FLASH_NAMES
from tests.fuzz.attention_flash import draw_flash
from tests.fuzz.attention_gradient import draw_gradient
from tests.fuzz.attention_gradient_packed import draw_packed_gradient
from tests.fuzz.attention_huge import draw_huge
from tests.fuzz.attention_packed import draw_packed
from tests.fuzz.attention_refusals import AttentionRefusalCase
from tests.fuzz.attention_torch import draw_integration
from tests.fuzz.case import Case, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.refusals import draw_refusal

_ODDS = ((draw_packed, 0.33), (draw_gradient, 0.09), (draw_packed_gradient, 0.06), (draw_flash, 0.03))
"""Of the cases that are not of PyTorch's calls; the others are of dense batches."""
_INTEGRATION_ODDS = 0.03
_HUGE_ODDS = 0.002
_REFUSAL_ODDS = 0.03


def generate(draw: Draw) -> Case:
    """A case: mostly of dense batches, some of packed sequences, a few of more than 2³¹ elements."""
    kind = draw.kernel.random()
    if draw.settings.plant is not None:
        return draw_dense(draw)
    rare = draw.data.random()
    if rare < _REFUSAL_ODDS:
        return draw_refusal(AttentionRefusalCase, draw)
    if draw.settings.device == "cuda" and rare > 1 - _HUGE_ODDS:
        return draw_huge(draw)
    return margin.perhaps(draw, _without_refusal(draw, kind))


def _without_refusal(draw: Draw, kind: float) -> Case:
    if kind > 1 - _INTEGRATION_ODDS:
        return draw_integration(draw)
    for make, odds in _ODDS:
        if kind < odds:
            return make(draw)
        kind -= odds
    return draw_dense(draw)


def expected_features(settings: Settings) -> list[str]:
    """Every operation, way of calling, kind of lists, and configuration that this GPU can run."""
    found = ["attention", "attention_varlen", "scaled_dot_product_attention", "kernel_function", "checked"]
    found += ["BlockLists", *(f"{kind} lists" for kind in ("window", "topk", "documents", "BlockMask"))]
    found += ["gradient of attention", "gradient of log-sum-exp", "gradient in free order"]
    found += ["gradient of packed sequences", "packed gradient of log-sum-exp"]
    found += ["gradient with BlockLists", "packed gradient with BlockLists"]
    found += [*FLASH_NAMES, "sm_margin", "mode plain", *attention_torch.names(settings)]
    if settings.device == "cuda":
        found += ["mode stream", "mode threads", "mode graph", "beyond 2^31 elements"]
    for family in configs.families(settings.arch):
        found += [configs.name_of(config) for config in configs.table(settings.arch, family)]
    return found
