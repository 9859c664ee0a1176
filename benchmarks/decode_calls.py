"""Inputs of the decoding benchmarks: caches of pages, and the calls of this project and its peers on them.

FlashAttention-3 comes as a library of operators, `_vllm_fa3_C.abi3.so`, from vLLM's package or any other
place; it needs vLLM itself no more than this project does.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.attention_calls import DEVICE, compare, output_of
from kernels_dsl.measure import GRAPH_CALLS, Call
from reference.attention import Masking

DIM = 128
ROTATED_BYTES = 400 << 20
"""Of caches that calls take in turns, as far as the calls of a graph go; an L2 cache has 50 MiB."""
LIBRARY = "_vllm_fa3_C.abi3.so"


@dataclass(frozen=True)
class Problem:
    """One query a sequence. `lengths`: keys of each. `room`: keys that the table has room for, if more.
    `fp8`: caches of e4m3, with a scale a head; queries stay bf16."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int = 8
    page: int = 16
    room: int = 0
    fp8: bool = False

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V that a call must read."""
        return sum(self.lengths) * self.kv_heads * DIM * 2 * (1 if self.fp8 else 2)

    @property
    def sets(self) -> int:
        """Caches that calls take in turns."""
        return max(2, min(GRAPH_CALLS, -(-ROTATED_BYTES // self.cache_bytes)))

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        return max(self.room, *self.lengths)


class Inputs(NamedTuple):
    """Tensors of one call. `flat`: both caches by sequence, None where lengths or pages do not allow it."""

    q: Any
    k_cache: Any
    v_cache: Any
    lengths: Any
    table: Any
    flat: tuple[Any, Any] | None
    scale: Any = None


def inputs(problem: Problem) -> list[Inputs]:
    """Sets of random caches; the pages of a sequence lie beside each other, in random order."""
    import torch

    page, lengths = problem.page, problem.lengths
    counts = [-(-n // page) for n in lengths]
    first = [sum(counts[:b]) for b in range(len(counts))]
    generator = torch.Generator(DEVICE).manual_seed(0)
    used = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    uniform = len(set(lengths)) == 1 and lengths[0] % page == 0
    found = []
    for _ in range(problem.sets):
        table = torch.zeros((len(lengths), -(-problem.capacity // page)), dtype=torch.int32, device=DEVICE)
        for b, count in enumerate(counts):
            order = torch.randperm(count, generator=generator, device=DEVICE)
            table[b, :count] = order + first[b]
        shape = (sum(counts), page, problem.kv_heads, DIM)
        caches = [
            torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
        ]
        q = torch.randn(
            (len(lengths), 1, problem.heads, DIM), generator=generator, device=DEVICE, dtype=torch.bfloat16
        )
        if problem.fp8:
            scale = torch.rand(problem.kv_heads, generator=generator, device=DEVICE) + 0.5
            caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
            found.append(Inputs(q, caches[0], caches[1], used, table, None, scale))
            continue
        if not uniform:
            found.append(Inputs(q, caches[0], caches[1], used, table, None))
            continue
        k, v = (x.view(len(lengths), -1, problem.kv_heads, DIM).transpose(1, 2) for x in caches)
        found.append(Inputs(q, caches[0], caches[1], used, table, (k, v)))
    return found


def ours(sets: Sequence[Inputs], equals_prefill: bool = False) -> Call:
    """`kernels_dsl.attention_decode`, or with `decode_equals_prefill`."""
    import kernels_dsl

    def call(n: int) -> Any:
        x = sets[n]
        return kernels_dsl.attention_decode(
            x.q,
            x.k_cache,
            x.v_cache,
            seqused_k=x.lengths,
            block_table=x.table,
            k_scale=x.scale,
            v_scale=x.scale,
            decode_equals_prefill=equals_prefill,
        )

    return call


def flash_attn_call(x: Inputs) -> Callable[[], Any]:
    """`kernels_dsl.flash_attn.flash_attn_with_kvcache`."""
    from kernels_dsl.flash_attn import flash_attn_with_kvcache

    return partial(
        flash_attn_with_kvcache, x.q, x.k_cache, x.v_cache, cache_seqlens=x.lengths, block_table=x.table,
        causal=True,
    )  # fmt: skip


def flashinfer_call(x: Inputs) -> Callable[[], Any]:
    """`run` of `kernels_dsl.flashinfer`'s wrapper for decoding, for sequences of whole pages."""
    import torch

    from kernels_dsl.flashinfer import BatchDecodeWithPagedKVCacheWrapper

    (batch, width), (_, page, kv_heads, dim) = x.table.shape, x.k_cache.shape
    starts = torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=x.table.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(x.table)
    wrapper.plan(
        starts, x.table.flatten(), torch.full_like(x.lengths, page), x.q.shape[2], kv_heads, dim, page,
        q_data_type=x.q.dtype,
    )  # fmt: skip
    return partial(wrapper.run, x.q[:, 0], (x.k_cache, x.v_cache))


def sdpa(sets: Sequence[Inputs]) -> Call:
    """PyTorch's attention, to the same keys in one piece."""
    import torch

    def call(n: int) -> Any:
        q, flat = sets[n].q.transpose(1, 2), sets[n].flat
        assert flat is not None
        return torch.nn.functional.scaled_dot_product_attention(q, *flat, enable_gqa=True).transpose(1, 2)

    return call


def flash3_library(given: Path | None) -> Path | None:
    """The library of FlashAttention-3: `given`, or that of an installed vLLM; None where there is none."""
    if given is not None:
        return given
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "vllm_flash_attn" / LIBRARY
    return path if path.exists() else None


def flash3(sets: Sequence[Inputs], problem: Problem, metadata: bool, splits: int = 0) -> Call:
    """FlashAttention-3 with `metadata` for its scheduler computed ahead, once, or without. `splits`: 0 leaves
    their number to it. It takes caches of fp8 with queries of fp8 alone, so it gets such."""
    import torch

    operators = torch.ops._vllm_fa3_C
    batch, longest, scale = len(problem.lengths), problem.capacity, 1 / math.sqrt(DIM)
    dtype, queries, descales = torch.bfloat16, [x.q for x in sets], [[None] * 3 for _ in sets]
    if problem.fp8:
        dtype = torch.float8_e4m3fn
        queries = [x.q.to(dtype) for x in sets]
        of_head = [x.scale.expand(batch, -1).contiguous() for x in sets]
        descales = [[torch.ones_like(scales), scales, scales] for scales in of_head]
    planned = None
    if metadata:
        described = (
            batch, 1, longest, problem.heads, problem.kv_heads, DIM, DIM, dtype, sets[0].lengths,
            None, None, None, None, None, problem.page, 0, True, -1, -1, False, splits, None, 0,
        )  # fmt: skip
        planned = operators.get_scheduler_metadata(*described)
    nothing = [None] * 8

    def call(n: int) -> Any:
        x = sets[n]
        arguments = (
            queries[n], x.k_cache, x.v_cache, *nothing, x.lengths, 1, longest, x.table, *nothing[:5],
            *descales[n], scale, True,
            -1, -1, 0.0, True, planned, splits, None, 0, None, 1, 0, None,
        )  # fmt: skip
        return operators.fwd(*arguments)[0]

    return call


def check_near(call: Call, problem: Problem, sets: Sequence[Inputs]) -> None:
    """As `check`, for queries and probabilities of fp8: RuntimeError where the difference from our result is
    a tenth of it or more."""
    wanted, found = (output_of(x(0)).float() for x in (ours(sets), call))
    error = float((found.reshape(wanted.shape) - wanted).norm() / wanted.norm())
    if not error < 0.1:
        raise RuntimeError(f"{problem.name}: differs by {error:.3f} of the result")


def check(call: Call, problem: Problem, sets: Sequence[Inputs]) -> None:
    """Compares the first KV head of the first and the last sequence with float64, or ToleranceError."""
    found, x, pack = output_of(call(0)), sets[0], problem.heads // problem.kv_heads
    for b in {0, len(problem.lengths) - 1}:
        length = problem.lengths[b]
        pages = x.table[b, : -(-length // problem.page)].long()
        k, v = (cache[pages, :, :1].flatten(0, 1)[None, :length] for cache in (x.k_cache, x.v_cache))
        if x.scale is not None:
            k, v = (cache.double() * x.scale[0].double() for cache in (k, v))
        rows = (slice(b, b + 1), slice(None), slice(0, pack))
        compare(found[rows], (x.q[rows], k, v), Masking(right=0))
