"""The fp8 GEMM against cuBLASLt (`torch._scaled_mm`) with the same scales and sums: suites of `fp8`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.attention_calls import DEVICE
from benchmarks.gemm import SHAPES
from benchmarks.harness import OURS, Case
from kernels_dsl.measure import Call


class Recipe(NamedTuple):
    """Scaling of operands, as `quantize` names it, and whether the tensor cores sum all of K."""

    name: str
    scaling: tuple[str, str]
    fast: bool


BLOCK = Recipe("1x128, 128x128", ("1x128", "128x128"), False)
RECIPES = (
    Recipe("tensor, fast", ("tensor", "tensor"), True),
    Recipe("tensor", ("tensor", "tensor"), False),
    Recipe("row, fast", ("row", "row"), True),
    Recipe("row", ("row", "row"), False),
    BLOCK,
)
DEEP = (4096, 7168, 16384)
OTHER_TILES = {"192x128 1x2": (192, 128, 1, 2), "256x128 1x2": (256, 128, 1, 2), "128x128": (128, 128, 1, 1)}
"""Beside the tile that the table takes, with scales of blocks: (tile M, tile N, cluster M, cluster N)."""
SETS_BYTES = 150e6
"""Inputs of all sets together: more than L2, so that a call does not find its inputs there."""


def operands(a: Any, b: Any, scaling: tuple[str, str]) -> tuple[Any, ...]:
    """(a, b, scale_a, scale_b) of a product a (M, K) @ b.mT, b (N, K)."""
    import kernels_dsl

    (a, scale_a), (b, scale_b) = (kernels_dsl.quantize(x, scaling=s) for x, s in zip((a, b), scaling))
    return a, b.mT, scale_a, scale_b.mT if scale_b.dim() else scale_b


def cases(
    shapes: Sequence[tuple[int, int, int]] = (*SHAPES, DEEP), recipes: Sequence[Recipe] = RECIPES
) -> Iterator[Case]:
    """Every shape with every recipe."""
    import torch

    import kernels_dsl
    from kernels_dsl.config.gemm import Sm90GemmConfig

    for m, n, k in shapes:
        count = max(2, min(8, int(SETS_BYTES // ((m + n) * k))))
        a, b = ([torch.randn(rows, k, device=DEVICE).bfloat16() for _ in range(count)] for rows in (m, n))
        for recipe in recipes:
            sets = [operands(*pair, recipe.scaling) for pair in zip(a, b)]
            outs = [torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE) for _ in range(count)]

            def ours(i: int, fast: bool = recipe.fast) -> Any:
                return kernels_dsl.scaled_gemm(*sets[i], out=outs[i], use_fast_accum=fast)  # noqa: B023

            def cublas(i: int, fast: bool = recipe.fast) -> Any:
                options: dict[str, Any] = {"use_fast_accum": fast, "out": outs[i]}  # noqa: B023
                return torch._scaled_mm(*sets[i], out_dtype=torch.bfloat16, **options)  # noqa: B023

            def verify(fast: bool = recipe.fast) -> None:
                found = kernels_dsl.scaled_gemm(*sets[0], use_fast_accum=fast).float()  # noqa: B023
                exact = a[0].float() @ b[0].float().mT  # noqa: B023
                assert float((found - exact).norm() / exact.norm()) < 0.05

            calls: dict[str, Call] = {OURS: ours, "cublas": cublas}
            for label, (tile_m, tile_n, cluster_m, cluster_n) in OTHER_TILES.items():
                if recipe is not BLOCK:
                    break
                config = Sm90GemmConfig(tile_m, tile_n, cluster_m=cluster_m, cluster_n=cluster_n)

                def other(i: int, config: Sm90GemmConfig = config) -> Any:
                    return kernels_dsl.scaled_gemm(*sets[i], out=outs[i], config=config)  # noqa: B023

                calls[f"ours_other_tile/{label}"] = other
            name = f"{m}×{n}×{k}, {recipe.name}"
            yield Case(name, 2 * m * n * k, calls, sets=count, verify=verify)
        torch.cuda.empty_cache()


def error_rows() -> Iterator[dict[str, Any]]:
    """Decibels of signal over noise of the product against float64 on the operands before quantisation."""
    import torch

    import kernels_dsl
    from reference.inputs import outliers
    from reference.quantize import signal_to_noise

    for k in (1024, 16384):
        for fraction in (0.0, 1e-3):
            options: dict[str, Any] = {"device": DEVICE, "fraction": fraction}
            a, b = (outliers((1024, k), torch.bfloat16, seed=seed, **options) for seed in (1, 2))
            exact = a.double() @ b.double().mT
            row: dict[str, Any] = {"name": f"1024×1024×{k}, {'with outliers' if fraction else 'N(0, 1)'}"}
            for recipe in RECIPES:
                found = kernels_dsl.scaled_gemm(
                    *operands(a, b, recipe.scaling), use_fast_accum=recipe.fast, out_dtype=torch.float32
                )
                row[f"{recipe.name}, dB"] = signal_to_noise(found, exact)
            yield row
