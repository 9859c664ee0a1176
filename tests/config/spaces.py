"""The spaces of what callers can construct: for each family of operators the values of every field and of the
operands.

A point of a space is one call. `recorded` makes it without a GPU and says why it was refused, or which
kernels it would launch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels_dsl import (
    BsrTensor,
    attention,
    attention_fp8,
    bsr_gemm,
    bsr_scaled_gemm,
    bsr_sddmm,
    gemm,
    grouped_gemm,
    scaled_gemm,
    scaled_grouped_gemm,
)
from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig
from kernels_dsl.config.bsr import Sm90BsrConfig
from kernels_dsl.config.gemm import Schedule, Sm80GemmConfig, Sm90GemmConfig
from lowering.recording import RecordedCall, record

Point = dict[str, Any]
"""Axis -> value, all of them words, numbers, booleans or None."""

DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
}  # fmt: skip
M, N, K, GROUPS, BATCH = 384, 320, 512, 3, 2


@dataclass(frozen=True)
class Space:
    """`axes`: name -> values, the common one first. `call` makes the call of a point."""

    name: str
    axes: dict[str, tuple[Any, ...]]
    call: Callable[[Point], Any]

    def draw(self, generator: random.Random, fixed: Point, common: float) -> Point:
        """A point with `fixed` values; each other axis has its common value with the odds `common`."""
        drawn = {
            name: values[0] if generator.random() < common else generator.choice(values)
            for name, values in self.axes.items()
        }
        return {**drawn, **fixed}


def recorded(space: Space, point: Point) -> list[RecordedCall] | str:
    """The calls of JIT functions that the point makes, or why the operator refuses it."""
    try:
        with record(point["arch"]) as calls:
            space.call(point)
    except (TypeError, ValueError) as error:
        return str(error)
    return list(calls)


def _matrix(
    rows: int, columns: int, dtype: torch.dtype, major: str = "row", align: int = 16, batch: int | None = None
) -> torch.Tensor:
    """`major`: "row", "column", or "none" where no mode is contiguous. `align`: bytes that divide the address
    of each line, no more than it says up to 16."""
    size = dtype.itemsize
    lines, extent = (columns, rows) if major == "column" else (rows, columns)
    pitch = -(-extent * size // 16) * 16 + (0 if align == 16 else max(align, size))
    offset = 0 if align == 16 else max(align, size) // size
    step = 2 if major == "none" else 1
    line = pitch // size * step
    strides = (step, line) if major == "column" else (line, step)
    count = (batch or 1) * lines * line + offset
    buffer = torch.empty(count * size, dtype=torch.uint8).view(dtype)
    shape = (rows, columns) if batch is None else (batch, rows, columns)
    return buffer.as_strided(shape, strides if batch is None else (lines * line, *strides), offset)


def _fields(point: Point, config: type, **others: Any) -> Any:
    """The configuration whose fields are axes."""
    names = config.__dataclass_fields__
    values = {name: value for name, value in point.items() if name in names}
    if "schedule" in values:
        values["schedule"] = Schedule(values["schedule"])
    return config(**{**values, **others})


def _epilogue(kind: str, shape: tuple[int, ...], dtype: torch.dtype, grouped: bool = False) -> dict[str, Any]:
    """Keywords of a product's epilogue."""
    n = shape[-1]
    if kind == "bias":
        return {"bias": torch.empty(n)}
    if kind == "rows":
        return {} if grouped else {"bias": torch.empty(shape[-2]), "bias_axis": "m"}
    if kind == "residual":
        return {"residual": torch.empty(shape, dtype=dtype), "activation": "silu"}
    if kind == "all":
        found = {"bias": torch.empty(n), "residual": torch.empty(shape), "alpha": 0.5, "activation": "gelu"}
        return found if grouped else {**found, "c": torch.empty(shape), "beta": 2.0}
    if kind == "own":
        return {"epilogue": _scaled_sum, "epilogue_args": (torch.empty(shape), torch.empty(shape), 2.0)}
    return {}


def _scaled_sum(acc, x, y, s):
    return acc * x + y * s


EPILOGUES = ("none", "bias", "rows", "residual", "all", "own")
_SM90_FIELDS: dict[str, tuple[Any, ...]] = {
    "tile_m": (128, 64, 192, 256),
    "tile_n": (128, *(n for n in range(16, 257, 8) if n != 128)),
    "tile_k": (0, 16, 32, 64, 96, 128, 192, 256),
    "cluster_m": (1, 2, 4, 8),
    "cluster_n": (1, 2, 4, 8),
    "schedule": ("cooperative", "pingpong"),
    "stages": (0, 2, 3, 4, 5, 7),
    "epi_tma": (True, False),
    "raster_group": (8, 1, 3),
    "raster_along_m": (True, False),
    "split_k": (1, 2, 3),
    "turned": (False, True),
    "stream_k": (False, True),
    "l2_prefetch": (False, True),
    "cluster_k": (1, 2, 3, 4),
    "overlap": (False, True),
    "late": (False, True),
    "arch": ("sm_90a",),
}
_SM80_FIELDS: dict[str, tuple[Any, ...]] = {
    "tile_m": (64, 16, 32, 48, 96, 128, 160, 192, 256),
    "tile_n": (64, 16, 32, 48, 96, 128, 160, 192, 256),
    "tile_k": (64, 16, 32, 48, 96, 128, 256),
    "stages": (4, 3, 5, 8),
    "warps_m": (2, 1, 3, 4, 8),
    "warps_n": (2, 1, 3, 4, 8),
    "raster_group": (8, 1, 3),
    "split_k": (1, 2),
    "copy_bytes_a": (16, 8, 4, 2),
    "copy_bytes_b": (16, 8, 4, 2),
    "arch": ("sm_89", "sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a"),
}
_OPERANDS: dict[str, tuple[Any, ...]] = {
    "a": ("row", "column", "none"),
    "a_align": (16, 8, 4, 2),
    "b": ("column", "row", "none"),
    "b_align": (16, 8, 4, 2),
    "out": ("new", "row", "column", "none"),
    "out_align": (16, 8, 4, 2),
    "n": (N, 64, 47),
    "epilogue": EPILOGUES,
}
_FP8 = {"a": ("row", "column"), "b": ("column", "row"), "a_align": (16, 8, 4, 1), "b_align": (16, 8, 4, 1)}
_SCALINGS = ("tensor", "rows", "1 1", "1 128", "128 1", "128 128")


def _config(point: Point) -> Any:
    return _fields(point, Sm80GemmConfig if "warps_m" in point else Sm90GemmConfig)


def _out(point: Point, dtype: torch.dtype, batch: int | None) -> torch.Tensor | None:
    if point["out"] == "new":
        return None
    return _matrix(M, point["n"], dtype, point["out"], point["out_align"], batch)


def _gemm(point: Point) -> None:
    dtype, n, config = DTYPES[point["dtype"]], point["n"], _config(point)
    out_dtype = DTYPES[point["out_dtype"]]
    grouped, batch = point["operation"] == "grouped", BATCH if point["operation"] == "batched" else None
    a = _matrix(M, K, dtype, point["a"], point["a_align"], batch)
    b = _matrix(K, n, dtype, point["b"], point["b_align"], GROUPS if grouped else batch)
    shape = (M, n) if batch is None else (BATCH, M, n)
    options = _epilogue(point["epilogue"], shape, dtype, grouped)
    options |= {"out": _out(point, out_dtype, batch), "out_dtype": out_dtype, "config": config}
    if grouped:
        grouped_gemm(a, b, torch.empty(GROUPS, dtype=torch.int32), **options)
    else:
        gemm(a, b, **options)


def _scale(scaling: str, side: int, n: int, groups: int | None) -> torch.Tensor:
    """That of a (side 0) or b. `groups`: of rows, with a matrix of b each."""
    kind = scaling if scaling in ("tensor", "rows") else scaling.split()[side]
    extent, parts = (M, n)[side], -(-K // 128)
    if kind == "tensor":
        return torch.empty(1)
    sizes = (extent, {"rows": 1, "1": parts}.get(kind, parts))
    if kind == "128":
        sizes = (-(-extent // 128), parts)
    shape = sizes if side == 0 else sizes[::-1]
    return torch.empty(shape if groups is None or side == 0 else (groups, *shape))


def _scaled(point: Point) -> None:
    n, config = point["n"], _config(point)
    out_dtype = DTYPES[point["out_dtype"]]
    grouped = point["operation"] == "grouped"
    groups = GROUPS if grouped else None
    a = _matrix(M, K, DTYPES[point["dtype"]], point["a"], point["a_align"])
    b = _matrix(K, n, DTYPES[point["b_dtype"]], point["b"], point["b_align"], groups)
    scales = tuple(_scale(point["scaling"], side, n, groups) for side in (0, 1))
    options = _epilogue(point["epilogue"], (M, n), torch.bfloat16, grouped)
    options |= {"out": _out(point, out_dtype, None), "out_dtype": out_dtype, "config": config}
    options |= {"use_fast_accum": point["fast"], "amax": torch.empty(1) if point["amax"] else None}
    if out_dtype.itemsize == 1:
        options["scale_result"] = torch.empty(1)
    if grouped:
        scaled_grouped_gemm(a, b, *scales, torch.empty(GROUPS, dtype=torch.int32), **options)
    else:
        scaled_gemm(a, b, *scales, **options)


_BSR_GRID = (4, 6)
_BSR_KEPT = ((0, (0, 2, 3, 5)), (1, (1,)), (2, ()), (3, (0, 1, 2, 3, 4)))


def _sparse(block: tuple[int, int], dtype: torch.dtype, batch: int | None = None) -> BsrTensor:
    columns = [column for _, kept in _BSR_KEPT for column in kept]
    ends = torch.tensor([0, *(len(kept) for _, kept in _BSR_KEPT)]).cumsum(0)
    lead = () if batch is None else (batch,)
    values = torch.empty((*lead, len(columns), *block), dtype=dtype)
    shape = (_BSR_GRID[0] * block[0], _BSR_GRID[1] * block[1])
    return BsrTensor(ends.int(), torch.tensor(columns, dtype=torch.int32), values, shape)


_BLOCKS = (64, 16, 32, 48, 96, 128, 192, 256)
_BSR: dict[str, tuple[Any, ...]] = {
    "rows": _BLOCKS,
    "columns": _BLOCKS,
    "form": ("a b", "at b", "b a", "b at"),
    "dense": ("row", "column", "none"),
    "dense_align": (16, 8, 2),
    "x": (256, 1024, 100, 33),
    "out": ("new", "row", "column", "none"),
    "out_align": (16, 8, 2),
    "batch": (False, True),
    "epilogue": ("none", "bias", "residual", "all", "own"),
}
_SM90_BSR: dict[str, tuple[Any, ...]] = {
    "tile_s": (64, 16, 32, 48, 96, 128, 192, 256),
    "tile_x": (256, 64, 128, 192, 512),
    "sparse_on_m": (True, False),
    "unit_k": (64, 16, 32, 48, 128),
    "units": (1, 2, 4),
    "cluster_s": (1, 2, 4),
    "cluster_x": (1, 2, 4),
    "schedule": ("cooperative", "pingpong"),
    "stages": (0, 2, 4),
    "epi_tma": (True, False),
    "kept_stages": (0, 2, 4),
    "split": (False, True),
    "pairs": (False, True),
    "arch": ("sm_90a",),
}


def _bsr(point: Point) -> None:
    dtype, x = DTYPES[point["dtype"]], point["x"]
    config = _fields(point, Sm80GemmConfig if "warps_m" in point else Sm90BsrConfig)
    batch = BATCH if point["batch"] else None
    sparse = _sparse((point["rows"], point["columns"]), dtype, batch)
    if point["form"] in ("at b", "b at"):
        sparse = sparse.t()
    left = point["form"].startswith("b")
    rows, columns = sparse.size
    m, n = (x, columns) if left else (rows, x)
    dense_shape = (x, rows) if left else (columns, x)
    dense_dtype = DTYPES[point.get("b_dtype", point["dtype"])]
    dense = _matrix(*dense_shape, dense_dtype, point["dense"], point["dense_align"], batch)
    out_dtype = DTYPES[point["out_dtype"]]
    shape = (m, n) if batch is None else (BATCH, m, n)
    options = _epilogue(point["epilogue"], shape, torch.bfloat16)
    options |= {"out_dtype": out_dtype, "config": config}
    if point["out"] != "new":
        options["out"] = _matrix(m, n, out_dtype, point["out"], point["out_align"], batch)
    factors = (dense, sparse) if left else (sparse, dense)
    if dtype.itemsize > 1:
        bsr_gemm(*factors, **options)
        return
    scales = [torch.empty(sparse.values.shape[:-2]), torch.empty(1)]
    if point["scaling"] == "rows":
        scales[1] = torch.empty((x, 1) if left else (1, x))
    bsr_scaled_gemm(*factors, *(scales[::-1] if left else scales), **options)


def _sddmm(point: Point) -> None:
    dtype, block = DTYPES[point["dtype"]], (point["rows"], point["columns"])
    pattern = _sparse(block, dtype)
    m, n = pattern.size
    batch = BATCH if point["batch"] else None
    a = _matrix(m, K, dtype, point["a"], point["a_align"], batch)
    b = _matrix(K, n, dtype, point["b"], point["b_align"], batch)
    bsr_sddmm(a, b, pattern, alpha=point["alpha"], out_dtype=DTYPES[point["out_dtype"]])


_MASKS: dict[str, tuple[Any, ...]] = {
    "dim": (128, 64, 32, 80, 96, 192, 256),
    "dim_v": (128, 64, 32, 80, 96, 192, 256),
    "heads": (8, 2),
    "keys": (512, 100),
    "causal": (False, True),
    "window": (False, True),
    "softcap": (0.0, 30.0),
    "sinks": (False, True),
    "lse": (False, True),
}
_SM90_ATTENTION: dict[str, tuple[Any, ...]] = {
    "tile_m": (128, 64, 192),
    "tile_n": (128, 16, 48, 64, 80, 96, 112, 160, 176, 192, 256),
    "wider": (0, 32, 64),
    "stages": (2, 1, 3, 4),
    "pingpong": (True, False),
    "o_tma": (True, False),
    "lazy_rescale": (False, True),
    "late_wait": (False, True),
    "ctas_per_sm": (1, 2),
    "pack": (1, 2, 4),
    "arch": ("sm_90a",),
}
_SM80_ATTENTION: dict[str, tuple[Any, ...]] = {
    "tile_m": (64, 128, 256),
    "tile_n": (64, 16, 32, 96, 128),
    "wider": (0, 32, 64),
    "warps": (4, 8),
    "q_registers": (False, True),
    "overlap": (False, True),
    "ahead": (1, 0, 2),
    "ctas_per_sm": (1, 2),
    "arch": ("sm_89", "sm_80", "sm_90a", "sm_120a"),
}
_FP8_ONLY: dict[str, tuple[Any, ...]] = {
    "watch_sums": (False, True),
    "linear_exps": (0, 3, 4),
    "turns_v": (False, True),
    "later_v": (0, 2, 7),
    "later_keys": (32, 64),
    "descale": ("tensor", "head", "block", "none"),
}


def _attention(point: Point) -> None:
    fp8 = "descale" in point
    dtype = torch.float8_e4m3fn if fp8 else DTYPES[point["dtype"]]
    dims = {name: -(-point[name] // 32) * 32 + point["wider"] for name in ("dim", "dim_v")}
    if "warps" in point:
        config = _fields(point, Sm80AttentionConfig, **dims, element_bytes=dtype.itemsize)
    else:
        config = _fields(point, Sm90AttentionConfig, **dims)
    q = torch.empty(1, 300, 8, point["dim"], dtype=dtype)
    k = torch.empty(1, point["keys"], point["heads"], point["dim"], dtype=dtype)
    v = torch.empty(1, point["keys"], point["heads"], point["dim_v"], dtype=dtype)
    options: dict[str, Any] = {
        "causal": point["causal"], "window": (64, 32) if point["window"] else None, "config": config,
        "softcap": point["softcap"], "return_lse": point["lse"],
        "sinks": torch.empty(8) if point["sinks"] else None,
    }  # fmt: skip
    if not fp8:
        mask = {"none": None, "boolean": torch.bool, "additive": torch.float32}[point["mask"]]
        if mask is not None:
            options["mask"] = torch.empty(300, point["keys"], dtype=mask)
        attention(q, k, v, **options)
        return
    if point["descale"] != "none":
        blocks = -(-point["keys"] // 128)
        shape = {"tensor": (1,), "head": (1, point["heads"]), "block": (1, point["heads"], blocks)}
        options["k_descale"] = options["v_descale"] = torch.empty(shape[point["descale"]])
    attention_fp8(q, k, v, **options)


_16_BITS = ("bf16", "fp16", "fp32")
_E = ("e4m3", "e5m2")
_TO = ("bf16", "fp16", "fp32", "e4m3", "e5m2")
_PRODUCT = {
    **_OPERANDS, "operation": ("single", "batched", "grouped"), "dtype": _16_BITS, "out_dtype": _16_BITS,
}  # fmt: skip
_SCALED = {
    **_OPERANDS, **_FP8, "operation": ("single", "grouped"), "dtype": _E, "b_dtype": _E, "out_dtype": _TO,
    "scaling": _SCALINGS, "fast": (False, True), "amax": (False, True),
}  # fmt: skip
_NO_LISTS = ("split_k", "raster_group", "copy_bytes_a", "copy_bytes_b")
"""Fields that have no effect with lists of blocks."""
_SM80_BSR = {name: values for name, values in _SM80_FIELDS.items() if name not in _NO_LISTS}
_BSR_16 = {**_BSR, "dtype": ("bf16", "fp16"), "out_dtype": _16_BITS}
_BSR_8 = {
    **_BSR, "dtype": _E, "b_dtype": _E, "out_dtype": _16_BITS, "scaling": ("tensor", "rows"),
    "dense": ("column", "row"),
}  # fmt: skip
_SDDMM = {
    "rows": _BLOCKS, "columns": _BLOCKS, "dtype": ("bf16", "fp16"), "out_dtype": ("bf16", "fp16"),
    "a": ("row", "column", "none"), "a_align": (16, 8, 4, 2), "b": ("row", "column", "none"),
    "b_align": (16, 8, 4, 2), "batch": (False, True), "alpha": (1.0, 0.5),
    "arch": ("sm_90a", "sm_80", "sm_89"),
}  # fmt: skip
_ATTENTION = {**_MASKS, "dtype": ("bf16", "fp16"), "mask": ("none", "boolean", "additive")}
_SM80_FP8 = {**_SM80_FIELDS, "arch": ("sm_89", "sm_90a", "sm_100a", "sm_120a")}
_SM90_BSR_8 = {**_SM90_BSR, "tile_x": (128, 64, 192, 256)}
_SM80_BSR_8 = {**_SM80_BSR, "arch": _SM80_FP8["arch"]}
_SM80_FP8_ATTENTION = {
    **_SM80_ATTENTION, "arch": ("sm_89", "sm_120a"), "descale": _FP8_ONLY["descale"], **_MASKS
}  # fmt: skip

SPACES = {
    space.name: space
    for space in (
        Space("gemm sm90", {**_SM90_FIELDS, **_PRODUCT}, _gemm),
        Space("gemm sm80", {**_SM80_FIELDS, **_PRODUCT}, _gemm),
        Space("scaled sm90", {**_SM90_FIELDS, **_SCALED}, _scaled),
        Space("scaled sm80", {**_SM80_FP8, **_SCALED}, _scaled),
        Space("bsr sm90", {**_SM90_BSR, **_BSR_16}, _bsr),
        Space("bsr sm80", {**_SM80_BSR, **_BSR_16}, _bsr),
        Space("bsr scaled sm90", {**_SM90_BSR_8, **_BSR_8}, _bsr),
        Space("bsr scaled sm80", {**_SM80_BSR_8, **_BSR_8}, _bsr),
        Space("sddmm", _SDDMM, _sddmm),
        Space("attention sm90", {**_SM90_ATTENTION, **_ATTENTION}, _attention),
        Space("attention sm80", {**_SM80_ATTENTION, **_ATTENTION}, _attention),
        Space("attention fp8 sm90", {**_SM90_ATTENTION, **_FP8_ONLY, **_MASKS}, _attention),
        Space("attention fp8 sm80", _SM80_FP8_ATTENTION, _attention),
    )
}
