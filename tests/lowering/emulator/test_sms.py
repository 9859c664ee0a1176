"""A GPU of few SMs: what the emulator claims reaches kernels, host code and every family of operations."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from ptx_kernels import run  # noqa: E402

from lowering import emulator  # noqa: E402
from lowering.emulator.capture import DeviceFacts  # noqa: E402

SPECIAL = """
mov.u32 %r10, %nsmid;
mov.u32 %r11, %smid;
mad.lo.u32 %r12, %r10, 100, %r11;
ld.param.u64 %rd1, [p0];
mov.u32 %r13, %ctaid.x;
mul.wide.u32 %rd2, %r13, 4;
add.u64 %rd3, %rd1, %rd2;
@%p1 st.global.b32 [%rd3], %r12;
"""


def test_a_kernel_sees_the_sms() -> None:
    numbers = torch.zeros(5, dtype=torch.int32)
    run(SPECIAL, [numbers], grid=5, sms=3)
    assert numbers.tolist() == [300, 301, 302, 300, 301]


def test_host_code_sees_the_sms_and_the_limits_of_the_arch() -> None:
    facts = DeviceFacts("sm_89", 7)
    assert [facts.attribute(n) for n in (16, 75, 76, 97, 9999)] == [7, 8, 9, 99 * 1024, 0]


def test_the_environment_gives_the_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELS_DSL_EMULATE_SMS", "5")
    assert emulator.active_sms() == 5
    with emulator.run():
        assert emulator.active_sms() is None
    monkeypatch.setenv("KERNELS_DSL_EMULATE_SMS", "few")
    with pytest.raises(emulator.EmulatorError, match="KERNELS_DSL_EMULATE_SMS is 'few', must be a number"):
        emulator.active_sms()


@pytest.mark.parametrize("sms", [0, -1, 1.5, True])
def test_a_number_of_sms_that_no_gpu_has_is_refused(sms: object) -> None:
    with pytest.raises(emulator.EmulatorError, match="sms is"), emulator.run(sms=sms):
        pass


def _integers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _gemm(**config: object) -> None:
    from kernels_dsl import gemm
    from kernels_dsl.config.gemm import Sm90GemmConfig

    a, b = _integers(200, 136), _integers(72, 136).mT
    expected = (a.double() @ b.double()).to(a.dtype)
    assert torch.equal(gemm(a, b, config=Sm90GemmConfig(**config) if config else None), expected)  # type: ignore[arg-type]


def _grouped() -> None:
    from kernels_dsl import grouped_gemm

    a, b, offs = _integers(135, 64), _integers(3, 64, 72), torch.tensor([70, 71, 135], dtype=torch.int32)
    rows = [(0, 70), (70, 71), (71, 135)]
    expected = torch.cat([a[m:n].double() @ x.double() for (m, n), x in zip(rows, b)])
    assert torch.equal(grouped_gemm(a, b, offs), expected.to(a.dtype))


def _bsr() -> None:
    from kernels_dsl import BsrTensor, bsr_gemm

    dense, x = _integers(256, 320), _integers(320, 200)
    found = bsr_gemm(BsrTensor.from_dense(dense, torch.ones(4, 5, dtype=torch.bool), (64, 64)), x)
    assert torch.equal(found, (dense.double() @ x.double()).to(x.dtype))


def _varlen() -> None:
    from kernels_dsl import attention_varlen

    q, starts = _integers(230, 2, 64), torch.tensor([0, 100, 230], dtype=torch.int32)
    attention_varlen(q, q, q, starts, starts, 130, causal=True)


def _quantize(scaling: str) -> None:
    from kernels_dsl import quantize

    quantize(_integers(600, 1032), scaling=scaling)


FAMILIES = {
    "gemm": (lambda: _gemm(tile_m=64, tile_n=64), "sm_90a"),
    "gemm by the table": (_gemm, "sm_90a"),
    "stream-K": (lambda: _gemm(tile_m=64, tile_n=16, stream_k=True), "sm_90a"),
    "grouped": (_grouped, "sm_90a"),
    "bsr": (_bsr, "sm_90a"),
    "attention's tile queue": (_varlen, "sm_90a"),
    "quantize, sm_90a": (lambda: _quantize("tensor"), "sm_90a"),
    "quantize, sm_89": (lambda: _quantize("tensor"), "sm_89"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_that_share_out_their_work_do_so_among_the_sms(name: str) -> None:
    pytest.importorskip("cutlass")
    call, arch = FAMILIES[name]
    with emulator.run(arch=arch, sms=2) as session:
        call()
    per_sm = 4 if name.startswith("quantize") else 1  # CTAs that find maxima are small
    grids = [launch.grid[0] * launch.grid[1] * launch.grid[2] for launch in session.launches]
    assert grids[0] == 2 * per_sm, grids
