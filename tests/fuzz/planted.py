"""Operations with a planted fault, which the harness must catch, and the same without one, which must pass.

They are PyTorch's own, on any device, and take the arguments that the cases draw.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import kernels_dsl
from reference import gemm as gemm_reference
from reference.attention import Masking, attention
from tests.fuzz.case import Settings

FAULTS = ("dropped_k_tile", "write_beside", "unwritten", "unequal_repeats", "input_changed", "crash", "hang")
K_TILE = 16
_calls = 0


class Operations:
    """The library's operations, or those of this module with the fault that the settings plant."""

    def __init__(self, settings: Settings) -> None:
        self.fault = settings.plant

    def __getattr__(self, name: str) -> Any:
        if self.fault is None:
            return getattr(kernels_dsl, name)
        return getattr(_Planted(self.fault), name)


class _Planted:
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def gemm(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        """`kernels_dsl.gemm` by PyTorch."""
        out, dtype = options.pop("out", None), options.pop("out_dtype", None)
        for name in ("config", "family"):
            options.pop(name, None)
        if options.pop("bias_axis", "n") == "m" and options.get("bias") is not None:
            options["bias"] = options["bias"][:, None]
        dtype = out.dtype if dtype is None and out is not None else dtype
        x, y = a.resolve_neg(), b.resolve_neg()
        if self.fault == "dropped_k_tile":
            x, y = x[..., : max(a.shape[-1] - K_TILE, 0)], y[..., : max(b.shape[-2] - K_TILE, 0), :]
        result = gemm_reference.gemm_same_dtype(x, y, out_dtype=dtype, **options)
        return self._finish(result, out, a)

    def supports(self, *_: Any, **__: Any) -> str | None:
        """Nothing is refused."""
        return None

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """`kernels_dsl.attention` by PyTorch: causal or not, nothing else."""
        if self.fault == "dropped_k_tile":
            k, v = k[:, : max(k.shape[1] - K_TILE, 0)], v[:, : max(v.shape[1] - K_TILE, 0)]
        masking = Masking(right=0 if options.get("causal") else None)
        result, lse = attention(q, k, v, masking, scale=options.get("scale"), dtype=q.dtype)
        result = self._finish(result.to(q.dtype), options.get("out"), q)
        return (result, lse.float()) if options.get("return_lse") else result

    def _finish(
        self, result: torch.Tensor, out: torch.Tensor | None, some_input: torch.Tensor
    ) -> torch.Tensor:
        """`result` in its place, with the fault."""
        global _calls
        _calls += 1
        if self.fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "hang":
            time.sleep(3600)
        if self.fault == "unequal_repeats" and _calls % 2 == 0:
            result = result * (1 + 2 * torch.finfo(result.dtype).eps)
        if self.fault == "input_changed" and some_input.numel():
            some_input.view(-1 if some_input.is_contiguous() else some_input.shape)[..., :1] += 1
        if out is None:
            return result.clone()
        keep = out.clone() if self.fault == "unwritten" else None
        out.copy_(result)
        if out.numel():
            if keep is not None:
                out[..., -1:, -1:] = keep[..., -1:, -1:]
            if self.fault == "write_beside":
                after = 1 + sum((n - 1) * s for n, s in zip(out.shape, out.stride()))
                out.as_strided((1,), (1,), out.storage_offset() + after).fill_(1.0)
        return out
