"""Cases of what a server calls: attention to caches, appending to them, merging of partial results."""

from __future__ import annotations

from tests.fuzz import margin
from tests.fuzz.attention_configs import families
from tests.fuzz.case import Case, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.refusals import draw_refusal
from tests.fuzz.serving_append import PLACES, draw_append
from tests.fuzz.serving_decode import draw_decode
from tests.fuzz.serving_decode_packed import draw_packed_decode
from tests.fuzz.serving_huge import draw_huge
from tests.fuzz.serving_kvcache import TABLES, draw_kvcache
from tests.fuzz.serving_merge import draw_merge
from tests.fuzz.serving_packed import draw_paged
from tests.fuzz.serving_pages import SCALES
from tests.fuzz.serving_refusals import ServingRefusalCase

_ODDS = (
    (draw_append, 0.2), (draw_merge, 0.15), (draw_paged, 0.2), (draw_kvcache, 0.15),
    (draw_packed_decode, 0.1), (draw_decode, 1.0),
)  # fmt: skip
_REFUSAL_ODDS = 0.05
_HUGE_EVERY = 400


def generate(draw: Draw) -> Case:
    """A case: mostly attention to caches; some calls that must be refused."""
    if draw.settings.device == "cuda" and draw.number % _HUGE_EVERY == _HUGE_EVERY - 1:
        return draw_huge(draw)
    kind = draw.kernel.random()
    if draw.data.random() < _REFUSAL_ODDS:
        return draw_refusal(ServingRefusalCase, draw)
    for make, odds in _ODDS:
        if kind < odds:
            return margin.perhaps(draw, make(draw))
        kind -= odds
    raise AssertionError("the odds are less than 1")


def expected_features(settings: Settings) -> list[str]:
    """Every operation, way of calling and form of caches."""
    found = ["attention_decode", "append_kv", "merge_states", "flash_attn_with_kvcache", "sm_margin"]
    found += [
        "attention_varlen block_table",
        "gradient of merge_states",
        "mode plain",
        "fp8 cache",
        "16-bit cache",
    ]
    found += [f"pages by {name}" for name in TABLES] + [f"append by {name}" for name in PLACES]
    found += [f"k_scale {name}" for name in SCALES] + ["decode from pages", "decode from slots"]
    found += [
        "length 0",
        "table of nonsense",
        "strided tables",
        "places outside",
        "states without keys",
        "same bits alone",
        "decode_equals_prefill",
    ]
    found += ["attention_decode cu_seqlens_q", "max_seqlen_q", "packed without queries"]
    found += ["new keys", "lengths as a number", "many queries", "keys hidden by a window"]
    if settings.device == "cuda":
        found += ["mode stream", "mode threads", "mode graph", "cache beyond 2^31 elements"]
    return found + [f"pages of family {family}" for family in (None, *families(settings.arch))]
