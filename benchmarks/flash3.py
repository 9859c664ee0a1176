"""FlashAttention-3 on whole sequences, in 16 bits and in fp8, from the library of `decode_calls`.

Its calls raise where it was not loaded, and the harness leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode_calls import flash3_library
from kernels_dsl.measure import Call

HELP = "FlashAttention-3's library (default: an installed vLLM's)"


def load(given: Path | None) -> None:
    """Loads the library at `given`, or that of an installed vLLM, if there is one."""
    import torch

    path = flash3_library(given)
    if path is not None:
        torch.ops.load_library(str(path))


def packed(
    q: Any, k: Any, v: Any, starts: Any, longest: int, causal: bool = False, descales: Sequence[Any] = ()
) -> Call:
    """Its call on packed sequences, the one form of whole sequences that vLLM's build takes.

    q (T, H, D), k, v (T, Hk, D), bf16, fp16 or e4m3; `starts` int32 (sequences + 1,), of queries and of keys;
    `descales` of q, k and v, float32 (sequences, Hk), with e4m3 alone.
    """
    import torch

    nothing = [None] * 5
    arguments = (
        q, k, v, *nothing[:4], starts, starts, *nothing[:3], longest, longest, None, *nothing,
        *(descales or nothing[:3]), 1 / math.sqrt(q.shape[-1]), causal, -1, -1, 0.0, True, None, 0, None, 0,
        None, 1, 0, None,
    )  # fmt: skip
    return lambda _set: torch.ops._vllm_fa3_C.fwd(*arguments)[0]


def dense(q: Any, k: Any, v: Any, causal: bool = False, descales: Sequence[Any] = ()) -> Call:
    """`packed` of q (B, S, H, D), k, v (B, S, Hk, D); descales (B, Hk, ...)."""
    import torch

    batch, length = q.shape[:2]
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return packed(q, k, v, starts, length, causal, [x.reshape(batch, -1) for x in descales])
