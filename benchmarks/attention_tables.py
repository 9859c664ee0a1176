"""Host time and error of attention: rows with a name and numbers."""

from __future__ import annotations

from typing import Any

from benchmarks.attention_calls import DEVICE, Shape, flash4, ours, output_of, sdpa, tensors
from kernels_dsl.measure import host_us
from reference.attention import Masking
from reference.attention import attention as reference_attention

HOST_SHAPE = Shape(1, 4, 128, 64)
ERROR_LENGTH = 4096
OUTLIERS = 1e-3
"""Share of elements that get N(0, 100) added, as measurements of attention's error are made elsewhere."""


def host_rows() -> list[dict[str, Any]]:
    """Host microseconds of an eager call at a size where the GPU outruns the host."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import kernels_dsl

    q, k, v = tensors(HOST_SHAPE)
    views = [x.transpose(1, 2) for x in (q, k, v)]
    torch_sdpa = torch.nn.functional.scaled_dot_product_attention
    rows: dict[str, dict[str, Any]] = {}

    def add(name: str, causal: bool, call: Any) -> None:
        row = rows.setdefault(name, {"name": name, "dense_us": None, "causal_us": None})
        try:
            row["causal_us" if causal else "dense_us"] = host_us(lambda: call(0))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")

    own: Any = kernels_dsl.scaled_dot_product_attention
    for causal in (False, True):
        add("ours", causal, ours(q, k, v, causal=causal))
        add("ours, arguments of SDPA", causal, lambda _, c=causal: own(*views, is_causal=c))
        # The context is entered once: choosing a backend is not part of a call.
        for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("fa2", "FLASH_ATTENTION")):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                add(f"{name} (SDPA)", causal, lambda _, c=causal: torch_sdpa(*views, is_causal=c))
        add("fa4", causal, flash4(q, k, v, causal=causal))
    return list(rows.values())


def _with_outliers(x: Any, generator: Any) -> Any:
    import torch

    large = 10.0 * torch.randn(x.shape, generator=generator, device=DEVICE)
    chosen = torch.rand(x.shape, generator=generator, device=DEVICE) < OUTLIERS
    return (x.float() + large * chosen).to(x.dtype)


def error_rows() -> list[dict[str, Any]]:
    """Error of the output against float64, in thousandths: root mean square and maximum of each."""
    import torch

    rows = []
    for dtype in ("bf16", "fp16"):
        for dim in (64, 128, 256):
            for outliers in (False, True):
                for causal in (False, True):
                    rows.append(_error_row(Shape(1, 4, ERROR_LENGTH, dim, dtype), outliers, causal))
    torch.cuda.empty_cache()
    return rows


def _error_row(shape: Shape, outliers: bool, causal: bool) -> dict[str, Any]:
    import torch

    q, k, v = tensors(shape, seed=1)
    if outliers:
        generator = torch.Generator(DEVICE).manual_seed(2)
        q, k, v = (_with_outliers(x, generator) for x in (q, k, v))
    expected, _ = reference_attention(q, k, v, Masking(right=0 if causal else None))
    kinds = ("N(0, 1)", "with outliers")
    row: dict[str, Any] = {
        "name": f"{shape.dtype}, D {shape.dim}, {kinds[outliers]}, {'causal' if causal else 'full'}"
    }
    calls = {
        "ours": ours(q, k, v, causal=causal),
        "fa4": flash4(q, k, v, causal=causal),
        "cudnn": sdpa(q, k, v, "cudnn", causal),
    }
    for name, call in calls.items():
        rms = worst = None
        try:
            out = output_of(call(0))
            out = out.transpose(1, 2) if name == "cudnn" else out
            error = (out.double() - expected).abs()
            rms, worst = 1e3 * float(error.square().mean().sqrt()), 1e3 * float(error.max())
        except Exception as reason:
            if name == "ours":
                raise
            print(f"{name}, {row['name']}: {type(reason).__name__}: {reason}")
        row |= {f"{name}_rms": rms, f"{name}_max": worst}
    return row
