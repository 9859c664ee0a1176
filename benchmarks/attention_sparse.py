"""Sparse and long-context attention: windows, block lists, memory, where sparse beats dense, making lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.attention_calls import (
    DEVICE,
    Shape,
    compare,
    flash4,
    flash4_lists,
    ours,
    sdpa,
    tensors,
    verifier,
    window_pairs,
)
from benchmarks.harness import OURS, Case
from kernels_dsl.measure import Call, interleaved
from reference.attention import Masking

HEADS, DIM = 8, 128
WINDOW = 2048
KEPT = 32
BLOCK = (128, 128)
LENGTHS = (32768, 131072, 524288)
DENSE_LIMIT = 131072
"""Longer than this dense attention would take most of a run."""
DENSITY_LENGTH = 32768
DENSITIES = (16, 64, 128, 192, 224, 240, 248, 256)


def shape_of(length: int) -> Shape:
    """One sequence of the size that all of these rows have."""
    return Shape(1, HEADS, length, DIM)


def random_lists(
    length: int, kept: int, heads: int, block: tuple[int, int] = BLOCK, least: int | None = None
) -> tuple[Any, Any]:
    """(counts, indices): `kept` different random key blocks a query block, or from `least` to `kept`, each
    head its own."""
    import torch

    rows, columns = (length // size for size in block)
    generator = torch.Generator(DEVICE).manual_seed(kept)
    indices = torch.empty(1, heads, rows, kept, dtype=torch.int32, device=DEVICE)
    for head in range(heads):  # one at a time: all draws of a long sequence would take gigabytes
        draws = torch.rand(rows, columns, generator=generator, device=DEVICE)
        indices[0, head] = draws.topk(kept, dim=-1).indices.sort(dim=-1).values
    counts = torch.full((1, heads, rows), kept, dtype=torch.int32, device=DEVICE)
    if least is not None:
        counts.random_(least, kept + 1, generator=generator)
    return counts, indices


def window_case(length: int) -> Case:
    """A causal window. Beside it, as long as that is short, dense causal attention by cuDNN."""
    shape = shape_of(length)
    q, k, v = tensors(shape)
    options = {"causal": True, "window": (WINDOW - 1, 0)}
    calls = {OURS: ours(q, k, v, **options), "fa4": flash4(q, k, v, causal=True, window_size=(WINDOW - 1, 0))}
    if length <= DENSE_LIMIT:
        calls["cudnn dense"] = sdpa(q, k, v, "cudnn", causal=True)
    verify = verifier(calls[OURS], q, k, v, Masking(left=WINDOW - 1, right=0))
    pairs = window_pairs(length, WINDOW)
    return Case(f"causal window {WINDOW}, S {length}", shape.flops(pairs), calls, verify=verify)


def _lists_case(name: str, length: int, kept: int, peers: Sequence[str]) -> Case:
    """Random lists of unmasked blocks."""
    from kernels_dsl import BlockLists

    shape = shape_of(length)
    q, k, v = tensors(shape)
    counts, indices = random_lists(length, kept, HEADS)
    calls: dict[str, Call] = {
        OURS: ours(q, k, v, blocks=BlockLists(None, None, counts, indices, BLOCK)),
        "fa4": flash4_lists(q, k, v, counts, indices, BLOCK),
        "ours dense": ours(q, k, v),
        "cudnn dense": sdpa(q, k, v, "cudnn"),
    }
    calls = {name: call for name, call in calls.items() if name in (OURS, *peers)}

    def verify() -> None:
        out: Any = calls[OURS](0)
        for head, row in ((0, 0), (HEADS - 1, counts.shape[2] - 1)):
            blocks = indices[0, head, row].long()
            keys, values = (x[0, :, head].unflatten(0, (-1, BLOCK[1]))[blocks].flatten(0, 1) for x in (k, v))
            rows = slice(row * BLOCK[0], (row + 1) * BLOCK[0])
            part = (q[:, rows, head : head + 1], keys[None, :, None], values[None, :, None])
            compare(out[:, rows, head : head + 1], part, Masking())

    return Case(name, shape.flops(float(length) * kept * BLOCK[1]), calls, verify=verify)


def sparse_cases() -> Iterator[Case]:
    """Windows and random lists of growing length: time should grow with S · k alone."""
    import torch

    for length in LENGTHS:
        yield window_case(length)
        torch.cuda.empty_cache()
    for length in LENGTHS:
        yield _lists_case(f"{KEPT} random blocks a query block, S {length}", length, KEPT, ("fa4",))
        torch.cuda.empty_cache()


def density_cases() -> Iterator[Case]:
    """Lists that hold more and more of all blocks, against dense attention: they pay above 1."""
    import torch

    total = DENSITY_LENGTH // BLOCK[1]
    peers = ("fa4", "ours dense", "cudnn dense")
    for kept in DENSITIES:
        name = f"{kept} of {total} blocks ({kept / total:.1%})"
        yield _lists_case(name, DENSITY_LENGTH, kept, peers)
        torch.cuda.empty_cache()


def _peak(call: Call) -> float:
    """MiB that a call needs beyond what was there before it, its output included."""
    import torch

    call(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call(0)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak / 2**20


def memory_rows() -> list[dict[str, Any]]:
    """Peak of PyTorch's allocator during a call, in MiB, beside what its inputs and its output take."""
    import torch

    from kernels_dsl import BlockLists

    rows = []
    for length in LENGTHS:
        q, k, v = tensors(shape_of(length))
        counts, indices = random_lists(length, KEPT, HEADS)
        lists = BlockLists(None, None, counts, indices, BLOCK)
        window = {"causal": True, "window": (WINDOW - 1, 0)}
        calls = {
            f"causal window {WINDOW}": (ours(q, k, v, **window), None),
            f"{KEPT} random blocks": (ours(q, k, v, blocks=lists), indices),
        }
        fa4 = (
            flash4(q, k, v, causal=True, window_size=(WINDOW - 1, 0)),
            flash4_lists(q, k, v, counts, indices, BLOCK),
        )
        for (name, (call, stored)), peer in zip(calls.items(), fa4):
            row: dict[str, Any] = {"name": f"{name}, S {length}", "output_mib": q.nbytes / 2**20}
            row["lists_mib"] = 0.0 if stored is None else (stored.nbytes + counts.nbytes) / 2**20
            row["ours_peak_mib"] = _peak(call)
            try:
                row["fa4_peak_mib"] = _peak(peer)
            except Exception as error:
                row["fa4_peak_mib"] = None
                print(f"fa4, {row['name']}: {type(error).__name__}: {error}")
            rows.append(row)
        del q, k, v, counts, indices, lists, calls, fa4
        torch.cuda.empty_cache()
    return rows


def _builders(length: int) -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """Name -> (what makes the lists, arguments of the attention that takes them)."""
    import torch

    from kernels_dsl.sparse import attention_blocks as builders

    blocks = length // BLOCK[0]
    documents = (torch.arange(length, device=DEVICE) // 4096)[None]
    scores = torch.randn(1, HEADS, blocks, blocks, device=DEVICE)
    listed = {"mask_mod": builders.document_mask, "aux": (documents.int(),)}
    return {
        "window": (
            lambda: builders.window_blocks(length, length, left=WINDOW - 1, device=DEVICE),
            {"causal": True, "window": (WINDOW - 1, 0)},
        ),
        "documents of 4096": (
            lambda: builders.document_blocks(documents, block=BLOCK, max_blocks=4096 // BLOCK[1] + 1),
            {"causal": True, **listed},
        ),
        f"top {KEPT} by score": (lambda: builders.topk_blocks(scores, KEPT, block=BLOCK), {}),
        f"top {KEPT} by score, causal": (
            lambda: builders.topk_blocks(scores, KEPT, causal=True, block=BLOCK),
            {"causal": True},
        ),
    }


def _ignoring_sets(build: Callable[[], Any]) -> Call:
    return lambda _set: build()


def builder_rows() -> list[dict[str, Any]]:
    """Milliseconds of making lists and of the attention that takes them, both as CUDA graphs."""
    import torch

    rows = []
    for length in LENGTHS[:2]:
        q, k, v = tensors(shape_of(length))
        for name, (build, options) in _builders(length).items():
            lists = build()
            calls: dict[str, Call] = {"build": _ignoring_sets(build)}
            calls["run"] = ours(q, k, v, blocks=lists, **options)
            timed = interleaved(calls, rounds=5, graph=True)
            build_ms, run_ms = timed["build"].ms, timed["run"].ms
            row = {"name": f"{name}, S {length}", "build_ms": build_ms, "attention_ms": run_ms}
            rows.append({**row, "share_percent": 100 * build_ms / run_ms})
        torch.cuda.empty_cache()
    return rows
