"""Cases of the fp8 operations: quantisation, scaled products, attention and linear layers."""

from __future__ import annotations

from tests.fuzz.case import Case, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_attention import draw_attention
from tests.fuzz.fp8_forced import attention_configs, attention_name, gemm_configs
from tests.fuzz.fp8_grouped import draw_scaled_grouped
from tests.fuzz.fp8_huge import draw_huge
from tests.fuzz.fp8_linear import draw_linear
from tests.fuzz.fp8_qkv import draw_qkv
from tests.fuzz.fp8_quantize import draw_quantize
from tests.fuzz.fp8_scaled import draw_scaled
from tests.fuzz.fp8_varlen import draw_varlen

_TURNS = ("scaled!", "attention!", "quantize", "attention!", "scaled", "varlen", "scaled!", "linear",
          "grouped!", "attention!", "scaled!", "varlen!", "attention", "scaled!", "qkv", "attention!",
          "grouped")  # fmt: skip
"""The operations that kernels are drawn for, one after the other; with "!" a configuration is forced, each of
the operation's in its turn, so that a long run has them all."""
_OPERATIONS = ("quantize", "quantize_qkv", "scaled_gemm", "scaled_grouped_gemm", "scaled_linear",
               "ScaledLinear", "attention_fp8", "attention_fp8_varlen")  # fmt: skip
_HUGE_EVERY = 30
"""Rounds of turns, one of which has cases of gigabytes."""
_STRIDE = 7
"""Neighbours among the configurations are alike; so many are skipped from turn to turn."""


def generate(draw: Draw) -> Case:
    """A case: the operation follows from the number, all else is drawn."""
    rounds, place = divmod(draw.block, len(_TURNS))
    name = _TURNS[place]
    turn = rounds * _TURNS.count(name) + _TURNS[:place].count(name)
    gemms, attentions = gemm_configs(draw.arch()), attention_configs(draw.arch())
    if draw.settings.device == "cuda" and name == "grouped" and rounds % _HUGE_EVERY == 1:
        return draw_huge(draw)
    if name == "quantize":
        return draw_quantize(draw)
    if name == "qkv":
        return draw_qkv(draw)
    if name == "linear":
        return draw_linear(draw)
    operation, forced = name.rstrip("!"), name.endswith("!")
    gemm = gemms[_place(turn, len(gemms))] if forced else None
    attention = attentions[_place(turn, len(attentions))] if forced else None
    if operation == "scaled":
        return draw_scaled(draw, gemm)
    if operation == "grouped":
        return draw_scaled_grouped(draw, gemm)
    return draw_attention(draw, attention) if operation == "attention" else draw_varlen(draw, attention)


def _place(turn: int, count: int) -> int:
    """Every one of `count` places once in `count` turns."""
    stride = _STRIDE if count % _STRIDE else 1
    return turn * stride % count


def expected_features(settings: Settings) -> list[str]:
    """Every operation, way of calling, kind of scale, and configuration that this GPU can run."""
    modes = ["plain"] if settings.device == "cpu" else ["plain", "stream", "threads", "graph"]
    found = [*_OPERATIONS, *(f"mode {mode}" for mode in modes), "fp8 result", "amax"]
    found += [f"scale {kind}" for kind in ("tensor", "matrix", "row", "1x128", "128x128")]
    found += [f"scaled_gemm {contents}" for contents in ("integers", "normal", "patterns")]
    found += [f"attention_fp8 factor {kind}" for kind in ("none", "one", "head", "kv", "block")]
    found += [str(forced) for forced in gemm_configs(settings.arch)]
    found += ["fp8 beyond 2^31 elements"] if settings.device == "cuda" else []
    return found + [attention_name(config) for config in attention_configs(settings.arch)]
