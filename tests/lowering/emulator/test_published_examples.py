"""NVIDIA's CuTe DSL examples in the emulator, from a checkout of CUTLASS outside of the repository.

Set ``CUTLASS_EXAMPLES`` to its ``examples/python/CuTeDSL``. Each example runs to its right result, or stops
with an instruction that the error names.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
cutlass = pytest.importorskip("cutlass")

from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor  # noqa: E402

from lowering import emulator  # noqa: E402

EXAMPLES = os.environ.get("CUTLASS_EXAMPLES", "")
pytestmark = pytest.mark.skipif(
    not Path(EXAMPLES, "cute", "hopper").is_dir(),
    reason="CUTLASS_EXAMPLES does not name a checkout of CUTLASS's examples/python/CuTeDSL",
)
DTYPE = {
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.float32: cutlass.Float32, torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in [n for n in sys.modules if n == "cute" or n.startswith("cute.")]:
        del sys.modules[name]


def example(module: str, name: str) -> Any:
    """A class or function of an example."""
    return getattr(importlib.import_module("cute." + module), name)


class Call:
    """Stand-ins for the compiler and values for the emulated call, of the same arguments."""

    def __init__(self) -> None:
        self.fakes: list[Any] = []
        self.values: list[list] = []
        self.tensors: dict[str, Any] = {}

    def tensor(self, t: Any, *, static: bool = False, divisible: int = 8) -> Any:
        """A tensor: static layout, or dynamic with a contiguous mode, strides that share a divisor."""
        self.tensors[f"tensor {len(self.tensors)}"] = t
        shape, stride = tuple(t.shape), tuple(t.stride())
        values = [t.data_ptr()]
        if not static:
            leading = stride.index(1)
            values += [*shape, *(s for i, s in enumerate(stride) if i != leading)]
            shape = tuple(
                cute.sym_int(divisibility=divisible if i == leading else 1) for i in range(len(shape))
            )
            stride = tuple(
                1 if i == leading else cute.sym_int64(divisibility=divisible) for i in range(len(stride))
            )
        self.fakes.append(make_fake_tensor(DTYPE[t.dtype], shape, stride=stride, assumed_align=16))
        self.values.append(values)
        return t

    def number(self, value: float) -> None:
        self.fakes.append(cutlass.Float32(value))
        self.values.append([value])

    def constant(self, value: Any) -> None:
        self.fakes.append(value)

    def stream(self) -> None:
        self.fakes.append(make_fake_stream())
        self.values.append([0])

    def run(self, function: Any, arch: str, folder: Path, found: tuple = ()) -> None:
        """Compile, emulate, and compare the kinds of findings with ``found``."""
        options = f"--gpu-arch {arch} --keep-ptx --generate-line-info --dump-dir {folder}"
        compiled = cute.compile(function, *self.fakes, options=options)
        with emulator.run(arch=arch, raise_on_report=False) as session:
            emulator.call_compiled(compiled, self.values, self.tensors)
        assert [r.kind for r in session.reports] == list(found), "\n".join(map(str, session.reports))


def _gemm_operands(m: int, n: int, k: int, l: int, dtype: Any, out: Any) -> tuple:
    a = torch.randint(-2, 3, (l, m, k)).to(dtype).permute(1, 2, 0)
    b = torch.randint(-2, 3, (l, n, k)).to(dtype).permute(1, 2, 0)
    d = torch.full((l, m, n), math.nan).to(out).permute(1, 2, 0)
    return a, b, d


def _expected(a: Any, b: Any, d: Any) -> Any:
    return torch.einsum("mkl,nkl->mnl", a.float(), b.float()).to(d.dtype).float()


def test_hopper_dense_gemm(tmp_path: Path) -> None:
    kernel = example("hopper.kernel.dense_gemm.dense_gemm", "HopperWgmmaGemmKernel")
    call = Call()
    a, b, d = (call.tensor(t) for t in _gemm_operands(256, 136, 128, 1, torch.float16, torch.float16))
    call.stream()
    call.run(kernel(cutlass.Float32, (128, 128), (2, 1)), "sm_90a", tmp_path)
    assert torch.equal(d.float(), _expected(a, b, d))


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
def test_hopper_persistent_gemm(cluster: tuple[int, int], tmp_path: Path) -> None:
    kernel = example("hopper.kernel.dense_gemm.dense_gemm_persistent", "HopperWgmmaGemmPersistentKernel")
    call = Call()
    a, b, d = (call.tensor(t) for t in _gemm_operands(200, 264, 72, 2, torch.bfloat16, torch.bfloat16))
    call.constant(4)
    call.stream()
    call.run(kernel(cutlass.Float32, (128, 256), cluster, 1, True), "sm_90a", tmp_path)
    assert torch.equal(d.float(), _expected(a, b, d))


def test_hopper_fp8_gemm(tmp_path: Path) -> None:
    kernel = example(
        "hopper.kernel.dense_gemm.dense_gemm_fp8_2xacc", "HopperFP8WarpSpecialized2xAccGemmKernel"
    )
    call = Call()
    a, b, d = _gemm_operands(128, 128, 256, 1, torch.float8_e4m3fn, torch.bfloat16)
    for t in (a, b, d):
        call.tensor(t, divisible=16)
    for _ in range(2):
        call.tensor(torch.ones(1), static=True)
    call.constant(2)
    call.stream()
    call.run(kernel((128, 128), (1, 1), 1, True), "sm_90a", tmp_path)
    assert torch.equal(d.float(), _expected(a, b, d))


def _attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    """(s, d, 1, h, b) tensors in, float32 (b, h, s, d) out."""
    q, k, v = (t.float().permute(4, 2, 3, 0, 1).flatten(1, 2) for t in (q, k, v))
    return torch.softmax(q @ k.transpose(-1, -2) * scale, -1) @ v


def test_hopper_attention(tmp_path: Path) -> None:
    kernel = example("hopper.kernel.attention.fmha", "HopperFusedMultiHeadAttentionForward")
    masks = importlib.import_module("cute.hopper.kernel.attention.fmha").fmha_utils.MaskEnum
    call = Call()
    s, d = 128, 64
    q, k, v, o = (torch.randn(1, s, 1, 1, d).half().permute(1, 4, 3, 2, 0) for _ in range(4))
    for t in (q, k, v, o):
        call.tensor(t)
    call.tensor(torch.empty(1, s, 1, 1, 1).permute(1, 4, 3, 2, 0), divisible=1)
    scale = 1 / math.sqrt(d)
    for number in (scale * math.log2(math.e), scale, 1.0):
        call.number(number)
    call.constant(None)
    call.constant(None)
    call.stream()
    # The kernel ends without waiting for the bulk stores of its output.
    call.run(
        kernel(cutlass.Float32, cutlass.Float32, (64, 128, d), False, masks.WINDOW_MASK),
        "sm_90a",
        tmp_path,
        found=(emulator.Kind.OVERWRITE_IN_USE,),
    )
    expected = _attention(q, k, v, scale)
    assert (o.permute(4, 2, 3, 0, 1).flatten(1, 2).float() - expected).abs().max() < 2e-3


def test_ampere_tensor_core_gemm(tmp_path: Path) -> None:
    kernel = example("ampere.kernel.dense_gemm.tensorop_gemm", "TensorOpGemm")
    call = Call()
    a, b, d = (call.tensor(t) for t in _gemm_operands(136, 264, 72, 1, torch.float16, torch.float16))
    call.stream()
    call.run(kernel(cutlass.Float16, cutlass.Float16, cutlass.Float32, (2, 2, 1)), "sm_80", tmp_path)
    assert torch.equal(d.float(), _expected(a, b, d))


def test_ampere_float32_gemm(tmp_path: Path) -> None:
    kernel = example("ampere.kernel.dense_gemm.sgemm", "SGemm")
    call = Call()
    a, b, d = _gemm_operands(130, 132, 24, 1, torch.float32, torch.float32)
    for t in (a, b, d):
        call.tensor(t[..., 0], divisible=4)
    call.values.append([0])  # the default stream
    call.run(kernel(), "sm_80", tmp_path)
    assert torch.equal(d, _expected(a, b, d))


def test_ampere_attention(tmp_path: Path) -> None:
    kernel = example("ampere.kernel.attention.flash_attention_v2", "FlashAttentionForwardAmpere")
    call = Call()
    s, d = 96, 64
    q, k, v, o = (torch.randn(1, s, 2, d).half() for _ in range(4))
    for t in (q, k, v, o):
        call.tensor(t)
    call.number(1 / math.sqrt(d))
    call.stream()
    call.run(kernel(d, 64, 64, 128, False), "sm_80", tmp_path)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.float().transpose(1, 2) for t in (q, k, v))
    ).transpose(1, 2)
    assert (o.float() - expected).abs().max() < 2e-3


def test_elementwise_add(tmp_path: Path) -> None:
    function = example("ampere.kernel.elementwise.elementwise_add", "elementwise_add")
    call = Call()
    a, b, c = (call.tensor(torch.randn(100, 136), divisible=4) for _ in range(3))
    call.run(function, "sm_80", tmp_path)
    assert torch.equal(c, a + b)


def test_hopper_fp8_gemm_with_gelu(tmp_path: Path) -> None:
    kernel = example(
        "hopper.kernel.dense_gemm.dense_gemm_fp8_gelu_persistent", "HopperFP8GeluPersistentGemmKernel"
    )
    call = Call()
    a, b, d = _gemm_operands(128, 128, 128, 1, torch.float8_e4m3fn, torch.bfloat16)
    for t in (a, b, d):
        call.tensor(t, divisible=16)
    call.number(0.25)
    call.constant(True)
    call.constant(2)
    call.stream()
    call.run(kernel(cutlass.Float32, (128, 128), (1, 1), 1, True), "sm_90a", tmp_path)
    product = torch.einsum("mkl,nkl->mnl", a.float(), b.float()) * 0.25
    expected = torch.nn.functional.gelu(product)
    assert ((d.float() - expected).abs() <= 0.01 * expected.abs() + 1e-3).all()


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_hopper_norm(norm: str, tmp_path: Path) -> None:
    kernel = example("hopper.kernel.cta_norm.cta_norm", "CtaNorm")
    call = Call()
    y, x = (call.tensor(torch.randn(5, 2048).half(), static=True) for _ in range(2))
    weight = call.tensor(torch.randn(2048).half(), static=True)
    bias = None
    if norm == "layer":
        bias = call.tensor(torch.randn(2048).half(), static=True)
    else:
        call.constant(None)
    call.number(1e-6)
    call.run(kernel(2048, norm, 128), "sm_90a", tmp_path)
    wide = x.float()
    if bias is None:
        expected = torch.nn.functional.rms_norm(wide, (2048,), weight.float(), 1e-6)
    else:
        expected = torch.nn.functional.layer_norm(wide, (2048,), weight.float(), bias.float(), 1e-6)
    assert (y.float() - expected).abs().max() < 2e-2


@pytest.mark.parametrize("mode", ["SMEM", "GMEM"])
def test_hopper_grouped_gemm(mode: str, tmp_path: Path) -> None:
    kernel = example("hopper.kernel.grouped_gemm.grouped_gemm", "HopperGroupedGemmPersistentKernel")
    update = getattr(cutlass.utils.TensorMapUpdateMode, mode)
    sizes = [(128, 64, 72, 1), (200, 72, 136, 1), (8, 8, 264, 1)]
    groups = [_gemm_operands(m, n, k, 1, torch.float16, torch.float16) for m, n, k, _ in sizes]
    call = Call()
    for t in _gemm_operands(8, 8, 8, 1, torch.float16, torch.float16):
        call.tensor(t)
    call.constant(len(sizes))
    call.tensor(torch.tensor(sizes, dtype=torch.int32), static=True)
    strides = [[(t.stride(0), t.stride(1)) for t in group] for group in groups]
    call.tensor(torch.tensor(strides, dtype=torch.int32), static=True)
    call.tensor(torch.tensor([[t.data_ptr() for t in group] for group in groups]), static=True)
    call.constant(sum(-(-m // 128) * -(-n // 128) for m, n, _, _ in sizes))
    call.tensor(torch.zeros(2, kernel.num_tensormaps, 16, dtype=torch.int64), static=True)
    call.constant(2)
    call.stream()
    for i, group in enumerate(groups):
        call.tensors.update({f"group {i} {name}": t for name, t in zip("abd", group)})
    call.run(kernel(cutlass.Float32, (128, 128), (1, 1), 1, True, update), "sm_90a", tmp_path)
    for a, b, d in groups:
        assert torch.equal(d.float(), _expected(a, b, d))
