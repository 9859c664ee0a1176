"""The configurations that the tables of attention hold, by name, and one of them for a case."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kernels_dsl.config.attention import PACKS, AttentionVariant, Extent, Sm90AttentionConfig
from kernels_dsl.config.attention_table import AttentionConfig, choose, choose_for_lists, why_not
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from tests.fuzz.draw import Draw

_DIMS = (
    *((d, d) for d in (32, 64, 96, 128, 192, 256)),
    (192, 128),
    (96, 64),
    (128, 256),
    (64, 256),
    (256, 64),
)
_VARIANTS = (
    AttentionVariant(),
    AttentionVariant(left=True, right=True),
    AttentionVariant(softcap=True),
    AttentionVariant(mask="boolean"),
    AttentionVariant(mask="additive"),
)
_BLOCKS = ((64, 64), (128, 128))
_SMS = 132
_UNFORCED_EVERY = 4
# (rows, keys, heads): large, very long, of few rows, of two and three tiles.
_EXTENTS = ((4096, 4096, 64), (4096, 16384, 64), (64, 4096, 200), (64, 300, 64), (193, 500, 100))


def name_of(config: AttentionConfig) -> str:
    """A configuration, by the fields that tell it from others in the tables."""
    tile = f"{config.family} {config.tile_m}x{config.tile_n} {config.dim}/{config.dim_v}"
    if isinstance(config, Sm90AttentionConfig):
        return tile + (f" {config.ctas_per_sm} CTAs" if config.ctas_per_sm > 1 else "")
    flags = (" overlap" if config.overlap else "") + (" q in registers" if config.q_registers else "")
    return tile + flags + (f" ahead {config.ahead}" if config.ahead != 1 else "")


@lru_cache(maxsize=8)
def table(arch: str, family: str) -> tuple[AttentionConfig, ...]:
    """All configurations that a family's tables give on a GPU of `arch` and that fit there."""
    device = DEVICES_BY_ARCH[arch]
    found: dict[AttentionConfig, None] = {}
    for dim, dim_v in _DIMS:
        for variant in _VARIANTS:
            extents = [None, *(Extent(*sizes, _SMS) for sizes in _EXTENTS)]
            here = [choose(family, dim, dim_v, variant, device, extent) for extent in extents]
            here += [choose_for_lists(family, dim, dim_v, variant, block, device)[0] for block in _BLOCKS]
            found.update((c, None) for c in here if why_not(c, dim, dim_v, device) is None)
    return tuple(found)


def families(arch: str) -> tuple[str, ...]:
    """Families of kernels that `arch` runs."""
    return ("sm90", "sm80") if arch == "sm_90a" else ("sm80",)


def forced(draw: Draw) -> AttentionConfig | None:
    """A configuration to ask for, or None: the tables' entries in turn, so that none is left out."""
    entries = [config for family in families(draw.arch()) for config in table(draw.arch(), family)]
    if draw.settings.small:  # the emulator takes long for wide heads
        entries = [c for c in entries if max(c.dim, c.dim_v) <= 128] * 3 + entries
    rounds, place = divmod(draw.block, _UNFORCED_EVERY)
    if place == _UNFORCED_EVERY - 1:
        return None
    return entries[(rounds * (_UNFORCED_EVERY - 1) + place) % len(entries)]


def packed(draw: Draw, config: AttentionConfig, group: int) -> AttentionConfig:
    """`config`, with heads of one group in one tile now and then."""
    fitting = [pack for pack in PACKS if group % pack == 0]
    pack = draw.kernel.choice(fitting) if draw.kernel.random() < 0.5 else 1
    return replace(config, pack=pack) if isinstance(config, Sm90AttentionConfig) else config
