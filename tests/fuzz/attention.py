"""Cases of attention: dense and packed calls with masks and lists of blocks; refusals; PyTorch's calls."""

from __future__ import annotations

from tests.fuzz import attention_configs as configs
from tests.fuzz.attention_dense import draw_dense
from tests.fuzz.attention_packed import draw_packed
from tests.fuzz.case import Case, Settings
from tests.fuzz.draw import Draw

_PACKED_ODDS = 0.33


def generate(draw: Draw) -> Case:
    """A case: mostly of dense batches, some of packed sequences, a few of more than 2³¹ elements."""
    kind = draw.kernel.random()
    if draw.settings.plant is not None or kind > _PACKED_ODDS:
        return draw_dense(draw)
    return draw_packed(draw)


def expected_features(settings: Settings) -> list[str]:
    """Every operation, way of calling, and configuration of the tables that this GPU can run."""
    found = ["attention", "attention_varlen", "scaled_dot_product_attention", "mode plain"]
    for family in configs.families(settings.arch):
        found += [configs.name_of(config) for config in configs.table(settings.arch, family)]
    return found
