"""Products where nothing may be compiled run by the kernels that are there, and are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels_dsl
from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.ops.gemm import gemm as gemm_module
from lowering import CompileRefused, cache, emulator

CONFIGS: dict[str, Any] = {
    "sm_90a": Sm90GemmConfig(64, 32), "sm_80": Sm80GemmConfig(64, 64, 64, 4, 2, 2),
}  # fmt: skip


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache in use, and compiling allowed."""
    monkeypatch.setattr(cache, "_enabled", None)
    monkeypatch.setattr(cache, "_refuse", None)
    monkeypatch.setattr(cache, "_chosen_dir", tmp_path / "cache")
    yield


def _factors(m: int, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, w = (torch.randint(-3, 4, (rows, k), generator=generator).bfloat16() for rows in (m, n))
    return a, w.t()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("arch", CONFIGS)
def test_another_configuration_takes_over(arch: str, seed: int) -> None:
    small, large = _factors(40, 24, 64, seed), _factors(150, 264, 96, seed)
    with emulator.run(arch=arch):
        assert gemm_module.plan_for(*large).decision.config != CONFIGS[arch]
        kernels_dsl.gemm(*small, config=CONFIGS[arch])
        compiled = cache.stats()["compiles"]
        cache.refuse_compile()
        assert torch.equal(
            kernels_dsl.gemm(*large).float(), (large[0].float() @ large[1].float()).bfloat16().float()
        )
        with pytest.raises(CompileRefused):
            kernels_dsl.gemm(*large, activation="gelu")  # another kernel, whatever the tile
        with pytest.raises(CompileRefused):
            kernels_dsl.gemm(*large, config=Sm80GemmConfig(128, 128, 32, 4, 2, 2))  # as it is asked for
        assert cache.stats()["compiles"] == compiled


def _gated(m: int, **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _factors(m, 352, 96, m)
    z = GATES["swiglu"].of_pairs(a.double() @ b.double())
    return kernels_dsl.gemm_gated(a, b, activation="swiglu", **config), z


def _scaled(m: int, **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (x.to(torch.float8_e4m3fn) for x in _factors(m, 352, 96, m))
    one = torch.ones(())
    found = kernels_dsl.scaled_gemm(a, b, one, one, out_dtype=torch.bfloat16, **config)
    return found, a.double() @ b.double()


def _grouped(m: int, **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _factors(m, 352, 96, m)
    offs = torch.tensor([m // 2, m], dtype=torch.int32)
    return kernels_dsl.grouped_gemm(a, torch.stack([b, b]), offs, **config), a.double() @ b.double()


def _reduced(m: int, **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _factors(m, 352, 96, m)
    return kernels_dsl.gemm_reduce(a, b, **config).reduced, (a.double() @ b.double()).sum(-1)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("product", [_gated, _scaled, _grouped, _reduced])
def test_products_of_every_kind(product: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    with emulator.run(arch="sm_90a", check=False):
        product(64, config=Sm90GemmConfig(64, 64))
        cache.refuse_compile()
        found, exact = product(200)
        torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("empty_cache")
def test_a_reduction_whose_second_kernel_is_missing_writes_nothing(seed: int) -> None:
    a, b = (x.cuda() for x in _factors(40, 264, 64, seed))
    config = Sm80GemmConfig(128, 256, 32, 4, 2, 4)
    kernels_dsl.gemm_reduce(a, b[:, :200], config=config)  # rows of one part: no second kernel
    cache.refuse_compile()
    out = torch.full((40, 264), 7.0, dtype=a.dtype, device="cuda")
    with pytest.raises(CompileRefused):
        kernels_dsl.gemm_reduce(a, b, out=out, config=config)
    assert bool((out == 7).all())
