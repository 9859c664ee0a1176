"""What steps 10 and 11 share beside their kernels: inputs, the check against float64, the peers' calls.

Tensors are (1, rows, heads, d).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import common
import torch

from reference.attention import Masking, attention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(lab: common.Lab, rows: int, keys: int, heads: int, d: int) -> Tensors:
    """q, k, v, N(0, 1), the same each time."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(1, n, heads, d, generator=generator).to(lab.device, torch.bfloat16)
        for n in (rows, keys, keys)
    )
    return q, k, v


def check(lab: common.Lab, name: str, call: Callable[..., Any], tensors: Tensors, masking: Masking) -> None:
    """`call(q, k, v, out)` against float64, with the error of PyTorch in bfloat16 as the measure."""
    q, k, v = tensors
    out = lab.poison(*q.shape, dtype=q.dtype)
    if lab.where == common.COMPILE:
        print(f"  left out  {name}   (no GPU and no emulator to run it on)")
        return
    lab.launch(call, q, k, v, out)
    expected, peer = (attention(q, k, v, masking, dtype=t)[0] for t in (torch.float64, q.dtype))
    lab.close(name, *(x.transpose(1, 2) for x in (out, expected, peer)))


def problem(length: int, heads: int, d: int) -> Tensors:
    """q, k, v on the GPU."""
    q, k, v = (common.random(1, length, heads, d) for _ in range(3))
    return q, k, v


def peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> dict[str, Any]:
    """cuDNN by way of PyTorch, and flash-attn-4 where it is installed."""
    from benchmarks import attention_calls

    calls = {"cuDNN": partial(attention_calls.sdpa(q, k, v, "cudnn", causal), 0)}
    if importlib.util.find_spec("flash_attn") is not None:
        calls["flash-attn-4"] = partial(attention_calls.flash4(q, k, v, causal=causal), 0)
    return calls


def separate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in a kernel for each part: all scores go through memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.softmax((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5, dim=-1)
    return (weights @ v).transpose(1, 2)


def memory(calls: Mapping[str, Callable[[], Any]], title: str) -> str:
    """What each call needs at its peak, its output included."""
    found = []
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        found.append(f"{name} {(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB")
    return f"Memory of a call, {title}: {', '.join(found)}."


def errors(calls: Mapping[str, Callable[[], Any]], tensors: Tensors) -> str:
    """Root mean square error of each against float64."""
    expected, _ = attention(*tensors)
    found = []
    for name, call in calls.items():
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        out = out if out.shape == expected.shape else out.transpose(1, 2)
        error = float((out.double() - expected).square().mean().sqrt())
        found.append(f"{name} {error:.3g}")
    return f"Root mean square error against float64: {', '.join(found)}."


def window_peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int) -> dict[str, Any]:
    """flash-attn-4 with a causal window, where it is installed."""
    from benchmarks import attention_calls

    if importlib.util.find_spec("flash_attn") is None:
        return {}
    window = {"causal": True, "window_size": (width - 1, 0)}
    return {"flash-attn-4": partial(attention_calls.flash4(q, k, v, **window), 0)}


def lists_peer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: tuple[torch.Tensor, ...], block: tuple[int, int]
) -> dict[str, Any]:
    """flash-attn-4 on lists (counts (heads, tiles), blocks (heads, tiles, entries)), where it is installed."""
    from benchmarks import attention_calls

    if importlib.util.find_spec("flash_attn") is None:
        return {}
    counts, blocks = (x[None] for x in lists)
    return {"flash-attn-4": partial(attention_calls.flash4_lists(q, k, v, counts, blocks, block), 0)}
