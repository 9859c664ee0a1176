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
from kernels_dsl.blocks.reduce.reductions import REDUCTIONS
from reference import gemm as gemm_reference
from reference.attention import Masking, attention
from tests.fuzz.case import Settings

FAULTS = ("dropped_k_tile", "dropped_part", "write_beside", "unwritten", "unequal_repeats", "input_changed",
          "crash", "hang")  # fmt: skip
"""`dropped_part`: of what is reduced or merged, beside the product."""
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

    def gemm_reduce(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """`kernels_dsl.gemm_reduce` by PyTorch."""
        if self.gemm_reduce_supports(a, b, **options) is not None:
            raise ValueError("reduce is a maximum of nothing")
        row, dim = REDUCTIONS[options.pop("reduce")], options.pop("dim")
        place, out, dtype = options.pop("reduced_out"), options.get("out"), options.get("out_dtype")
        d = _Planted("none").gemm(a, b, **{**options, "out": None, "out_dtype": torch.float32})
        if self.fault == "dropped_part":
            cut = max(d.shape[dim] - K_TILE, 0) if row.identity is not None else max(d.shape[dim] - K_TILE, 1)
            reduced = row.exact(d.narrow(dim, 0, cut), dim)
        else:
            reduced = row.exact(d, dim)
        result = d.to(dtype if out is None else out.dtype)
        of_place = self.fault if self.fault in ("write_beside", "unwritten") else "none"
        return self._finish(result, out, a), _Planted(of_place)._finish(reduced, place, a)

    def gemm_reduce_supports(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> str | None:
        """A maximum of nothing is refused."""
        lines = a.shape[-2] if options["dim"] == -2 else b.shape[-1]
        return "reduce" if REDUCTIONS[options["reduce"]].identity is None and lines == 0 else None

    def merge_states(
        self, out: torch.Tensor, lse: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`kernels_dsl.merge_states` by PyTorch."""
        if not out.shape[0]:
            raise ValueError("out has no state")
        count = max(out.shape[0] - 1, 1) if self.fault == "dropped_part" else out.shape[0]
        sums = lse[:count]
        merged = torch.logsumexp(sums, 0)
        weights = torch.exp(sums - torch.where(merged == -torch.inf, 0.0, merged))
        states = out[:count].float().masked_fill((sums == -torch.inf)[..., None], 0.0)
        result = (weights[..., None] * states).sum(0).to(out_dtype or out.dtype)
        return self._finish(result, None, out.detach()), merged

    def attention_decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """`kernels_dsl.attention_decode` by PyTorch."""
        from tests.fuzz import planted_serving

        dropped = K_TILE if self.fault == "dropped_k_tile" else 0
        result, lse = planted_serving.decode(q, k, v, dropped, **options)
        result = self._finish(result.to(q.dtype), options.get("out"), q)
        return (result, lse.float()) if options.get("return_lse") else result

    def append_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: Any
    ) -> None:
        """`kernels_dsl.append_kv` by PyTorch."""
        from tests.fuzz import planted_serving

        slots = planted_serving.slots_of(k_cache, tuple(k.shape[:-2]), **options)
        if self.fault == "unwritten":
            slots[-1:] = -1
        if self.fault == "write_beside" and k_cache.numel():
            free = sorted(set(range(k_cache.shape[:2].numel())) - set(slots.tolist()))
            slots[-1:] = free[0] if free else -1
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            planted_serving.append(new, cache, slots, options.get(f"{name}_scale"))

    def supports(self, *_: Any, **__: Any) -> str | None:
        """Nothing is refused."""
        return None

    attention_decode_supports = supports

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
        _calls += self.fault != "none"
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
