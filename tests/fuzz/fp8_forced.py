"""Configurations that cases of fp8 operations force: those of the tables, each in its turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from kernels_dsl.config.attention import AttentionVariant, Extent, sm90_fp8_config, turning_v
from kernels_dsl.config.attention_sm80 import sm80_config
from kernels_dsl.config.attention_table import AttentionConfig
from kernels_dsl.config.budget import why_not
from kernels_dsl.config.gemm import GemmConfig, Sm80GemmConfig
from kernels_dsl.config.gemm_table import TABLES, adapted
from kernels_dsl.config.problem import DEVICES_BY_ARCH, H200, L40S, GemmProblem
from kernels_dsl.config.promotion import Promotion
from tests.fuzz.gemm_dense import table_name

FAST, PROMOTED, SCALED = "fast", "promoted", "scaled"
"""Ways to sum products: by the tensor cores alone, 128 of K at a time, or so with scales of 128 of K."""
_TABLE_OF = {FAST: "sm90 fp8", PROMOTED: "sm90 fp8 promoted", SCALED: "sm90 fp8 scaled"}
_PROMOTIONS = {FAST: None, PROMOTED: Promotion(), SCALED: Promotion(1, 128)}
_SHAPES = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_ROWS, _KEYS, _HEADS = (1, 100, 500, 8000), (100, 600, 1500, 3000, 9000), (1, 8, 256)


@dataclass(frozen=True)
class Forced:
    """A configuration of the GEMM tables and the way of summing that it is for."""

    config: GemmConfig
    sums: str

    def __str__(self) -> str:
        table = "" if isinstance(self.config, Sm80GemmConfig) else " fp8"
        return f"{table_name(self.config)}{table} {self.sums}"


@cache
def gemm_configs(arch: str) -> tuple[Forced, ...]:
    """Every configuration that an architecture can run with aligned operands."""
    found = []
    for sums, promotion in _PROMOTIONS.items():
        problem = GemmProblem(512, 512, 512, ab_type="fp8", b_k_major=True, promotion=promotion)
        for table in (_TABLE_OF[sums], "sm80"):
            for candidate in TABLES[table]:
                config = adapted(candidate.config, problem)
                if why_not(config, problem, DEVICES_BY_ARCH[arch]) is None:
                    found.append(Forced(config, sums))
    return tuple(found)


@cache
def attention_configs(arch: str) -> tuple[AttentionConfig, ...]:
    """Every configuration that the tables give without lists, for the head dimensions of `_SHAPES`."""
    found: dict[AttentionConfig, None] = {}
    of_ada = arch != "sm_90a"
    few = Extent(10, 10, 1, 132)
    for dims in _SHAPES:
        for variant in (AttentionVariant(), AttentionVariant(right=True), AttentionVariant(softcap=True)):
            for extent in (None, few):
                found[sm80_config(*dims, variant, L40S.smem_bytes, extent, element_bytes=1)] = None
                if not of_ada:
                    found[sm80_config(*dims, variant, H200.smem_bytes, extent, element_bytes=1)] = None
            if not of_ada:
                found.update(dict.fromkeys(_of_hopper(dims, variant)))
    return tuple(found)


def _of_hopper(dims: tuple[int, int], variant: AttentionVariant) -> list[AttentionConfig]:
    found: list[AttentionConfig] = []
    for rows in _ROWS:
        for keys in _KEYS:
            for heads in _HEADS:
                extent = Extent(rows, keys, heads, H200.sm_count)
                plain = sm90_fp8_config(*dims, variant, extent)
                by_block = sm90_fp8_config(*dims, variant, extent, True)
                found += [plain, by_block, turning_v(plain, variant, extent)]
    return found


def attention_name(config: AttentionConfig) -> str:
    """A configuration of fp8 attention, by the fields that tell it from others."""
    name = f"attention {config.family} {config.tile_m}x{config.tile_n} D {config.dim}/{config.dim_v}"
    if config.family == "sm80":
        return f"{name} {config.warps}x{config.ctas_per_sm}"  # type: ignore[union-attr]
    flags = {
        "watched": config.watch_sums, "late": config.late_wait, "turns V": config.turns_v,
        f"later V {config.later_keys}": config.later_v,
    }  # type: ignore[union-attr]  # fmt: skip
    return " ".join([name, *(flag for flag, on in flags.items() if on)])


def aligned(x: torch.Tensor) -> int:
    """Bytes, at most 16, that divide the address of every row."""
    size = x.element_size()
    strides = [stride * size for stride, extent in zip(x.stride(), x.shape) if extent > 1 and stride != 1]
    return math.gcd(16, x.data_ptr(), *strides)


def fitting(
    config: GemmConfig | None, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None
) -> GemmConfig | None:
    """`config` with loads and stores as wide as rows of operands and result are aligned. An operand that is
    not contiguous along K is copied into rows that are."""
    if config is None:
        return None
    if isinstance(config, Sm80GemmConfig):
        wide = [aligned(x) if x.stride(-1) == 1 or x.shape[-1] <= 1 else 16 for x in (a, b.mT)]
        wide = [16 if width < 4 else width for width in wide]
        return replace(config, copy_bytes_a=wide[0], copy_bytes_b=wide[1])
    stores = out is None or aligned(out) == 16
    return config if stores else replace(config, epi_tma=False)
