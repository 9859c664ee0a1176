"""One or more small calls of each kernel family, with odd sizes, to run under compute-sanitizer's memcheck.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/memcheck/calls.py gemm sm90

Each result is compared with a plain product in float32, so that a call which did nothing is seen too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import kernels_dsl
from kernels_dsl import BsrTensor, Sm80AttentionConfig
from kernels_dsl.sparse.attention_blocks import causal_blocks

BF16 = torch.bfloat16


def near(actual: torch.Tensor, expected: torch.Tensor, share: float = 0.02) -> None:
    """Raises where the two are apart by more than `share` of the largest expected magnitude."""
    error = (actual.float() - expected.float()).abs().max().item()
    limit = share * expected.float().abs().max().item()
    if not error <= limit:
        raise AssertionError(f"off by {error}, at most {limit} was expected")


def gemm(family: str, device: str) -> None:
    """Aligned and not, both majors, a batch, an epilogue with every operand."""
    for m, n, k, batch in ((129, 72, 136, ()), (65, 33, 71, ()), (40, 136, 72, (2,))):
        a, b = torch.randn(*batch, m, k, device=device), torch.randn(*batch, k, n, device=device)
        bias, other = torch.randn(n, device=device), torch.randn(m, n, device=device)
        a, b, bias, other = (x.to(BF16) for x in (a, b, bias, other))
        expected = torch.relu(a.float() @ b.float() + bias) + other
        for right in (b, b.mT.contiguous().mT):
            d = kernels_dsl.gemm(a, right, bias=bias, residual=other, activation="relu", family=family)
            near(d, expected)


def grouped(family: str, device: str) -> None:
    """Groups of no rows, of one, and that end within tiles; rows behind the last group."""
    a, b = torch.randn(300, 136, device=device).to(BF16), torch.randn(4, 136, 72, device=device).to(BF16)
    ends = [0, 1, 133, 290]
    d = kernels_dsl.grouped_gemm(a, b, torch.tensor(ends, dtype=torch.int32, device=device), family=family)
    for group, (start, end) in enumerate(zip([0, *ends], ends)):
        if start < end:
            near(d[start:end], a[start:end].float() @ b[group].float())


def scaled(family: str, device: str) -> None:
    """fp8 factors with one scale, scales of rows, and scales of 128 of K."""
    a, b = torch.randn(130, 272, device=device), torch.randn(272, 80, device=device)
    for kinds in (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128")):
        a8, scale_a = kernels_dsl.quantize(a.to(BF16), scaling=kinds[0])
        b8, scale_b = kernels_dsl.quantize(b.mT.to(BF16).contiguous(), scaling=kinds[1])
        near(kernels_dsl.scaled_gemm(a8, b8.mT, scale_a, scale_b.mT, family=family), a @ b, 0.1)


def quantize(family: str, device: str) -> None:
    """Every kind of scale, with and without the transpose."""
    x = torch.randn(131, 264, device=device, dtype=BF16)
    for scaling in ("tensor", "row", "1x128", "128x128"):
        values, scales = kernels_dsl.quantize(x, scaling=scaling)
        rows, columns = values.shape
        full = scales.repeat_interleave(-(-rows // scales.shape[0]), 0)[:rows] if scales.ndim else scales
        if scaling.endswith("128"):
            rows_each = 128 if scaling.startswith("128") else 1
            full = scales.repeat_interleave(rows_each, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        near(values.float() * full, x, 0.05)
        kernels_dsl.quantize(x, scaling=scaling, transpose="both")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(scores.shape[-1] - scores.shape[-2] + 1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def attention(family: str, device: str) -> None:
    """Dense and causal, also by a mask tensor, lists and packed sequences; lengths that fill no tile."""
    for dim in (64, 128):
        q = torch.randn(2, 131, 4, dim, device=device, dtype=BF16)
        k, v = (torch.randn(2, 203, 2, dim, device=device, dtype=BF16) for _ in range(2))
        for causal in (False, True):
            near(kernels_dsl.attention(q, k, v, causal=causal, family=family), _attention(q, k, v, causal))
    expected = _attention(q, k, v, True)
    mask = torch.ones(131, 203, dtype=torch.bool, device=device).tril(203 - 131)
    near(kernels_dsl.attention(q, k, v, mask=mask, family=family), expected)
    lists = causal_blocks(131, 203, block=(64, 64), device=device)
    near(kernels_dsl.attention(q, k, v, causal=True, blocks=lists, family=family), expected)
    ends = [0, 70, 70, 131], [0, 90, 95, 203]
    starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ends)
    out = kernels_dsl.attention_varlen(q[0], k[0], v[0], *starts, 70, causal=True, family=family)
    for n in (0, 2):
        rows, keys = (slice(x[n], x[n + 1]) for x in ends)
        near(out[None, rows], _attention(q[:1, rows], k[:1, keys], v[:1, keys], True))


def backward(family: str, device: str) -> None:
    """Gradients at heads of every kind of tile, in both orders; over lists; of packed sequences."""
    for dim in (64, 128, 256):
        q = torch.randn(2, 131, 4, dim, device=device, dtype=BF16, requires_grad=True)
        k, v = (torch.randn(2, 203, 2, dim, device=device, dtype=BF16, requires_grad=True) for _ in range(2))
        for causal in (False, True):
            expected = _attention(q, k, v, causal)
            gradient = torch.randn_like(expected)
            exact = torch.autograd.grad(expected, (q, k, v), gradient)
            calls: list[dict[str, Any]] = [{"deterministic": True}, {"deterministic": False}]
            if causal:
                calls.append({"blocks": causal_blocks(131, 203, block=(64, 64), device=device)})
            for options in calls:
                out = kernels_dsl.attention(q, k, v, causal=causal, family=family, **options)
                found = torch.autograd.grad(out, (q, k, v), gradient.to(BF16))
                for name in zip(found, exact):
                    near(*name, 0.03)
    ends = [0, 70, 70, 131], [0, 90, 95, 203]
    starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ends)
    packed = [x.detach()[0].requires_grad_() for x in (q, k, v)]
    out = kernels_dsl.attention_varlen(*packed, *starts, 70, causal=True, family=family)
    torch.autograd.grad(out, packed, torch.randn_like(out))


def decode(family: str, device: str) -> None:
    """Caches in pages, which are written first, of bf16 and e4m3; lengths of 0, 1 and more than a split."""
    lengths, page = [0, 1, 700, 333], 16
    pages = -(-max(lengths) // page)
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    table = torch.randperm(len(lengths) * pages, device=device).view(len(lengths), pages).int()
    q = torch.randn(len(lengths), 1, 8, 128, device=device, dtype=BF16)
    for dtype in (BF16, torch.float8_e4m3fn):
        caches = [torch.zeros(table.numel(), page, 2, 128, device=device, dtype=dtype) for _ in range(2)]
        new = [torch.randn(len(lengths), max(lengths), 2, 128, device=device).to(dtype) for _ in range(2)]
        for cache, x in zip(caches, new):
            for b, n in enumerate(lengths):
                places = torch.arange(n, device=device)
                cache[table[b, places // page].long(), places % page] = x[b, :n]
        before = torch.clamp(used - 1, min=0)
        last = [torch.stack([x[b, max(n - 1, 0)] for b, n in enumerate(lengths)])[:, None] for x in new]
        kernels_dsl.append_kv(*(x.to(BF16) for x in last), *caches, cache_seqlens=before, block_table=table)
        found = kernels_dsl.attention_decode(q, *caches, seqused_k=used, block_table=table)
        for b, n in enumerate(lengths):
            if n:
                keys, values = (x[b : b + 1, :n].to(BF16) for x in new)
                near(found[b : b + 1], _attention(q[b : b + 1], keys, values, True), 0.05)


def attention_fp8(family: str, device: str) -> None:
    """Dense and causal."""
    config = None if family == "sm90" else Sm80AttentionConfig(128, 64, 64, 64, element_bytes=1)
    q, k, v = (torch.randn(1, 131, 2, 64, device=device, dtype=BF16) for _ in range(3))
    small = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    exact = [x.to(BF16) for x in small]
    for causal in (False, True):
        found = kernels_dsl.attention_fp8(*small, causal=causal, config=config)
        near(found, _attention(*exact, causal), 0.1)


def bsr(family: str, device: str) -> None:
    """The product and both gradients, blocks of every kind of kernel."""
    for block in (16, 32, 64, 128):
        rows, columns = 3, 5
        mask = torch.rand(rows, columns, device=device) < 0.6
        mask[0, 0] = True
        dense = torch.randn(rows * block, columns * block, device=device, dtype=BF16)
        sparse = BsrTensor.from_dense(dense, mask, (block, block))
        b = torch.randn(columns * block, 72, device=device, dtype=BF16)
        g = torch.randn(rows * block, 72, device=device, dtype=BF16)
        kept = sparse.to_dense().float()
        near(kernels_dsl.bsr_gemm(sparse, b, family=family), kept @ b.float())
        near(kernels_dsl.bsr_gemm(sparse.t(), g, family=family), kept.mT @ g.float())
        gradient = kernels_dsl.bsr_sddmm(g, b.t(), sparse).to_dense()
        near(gradient, (g.float() @ b.float().mT) * (kept != 0))


FAMILIES: dict[str, Callable[[str, str], None]] = {
    "gemm": gemm,
    "grouped": grouped,
    "scaled": scaled,
    "quantize": quantize,
    "attention": attention,
    "backward": backward,
    "decode": decode,
    "attention_fp8": attention_fp8,
    "bsr": bsr,
}


def main(arguments: list[str]) -> int:
    """`arguments`: a name of FAMILIES, "sm90" or "sm80", and where its tensors are (default "cuda")."""
    name, family, *device = arguments
    torch.manual_seed(0)
    FAMILIES[name](family, *device or ["cuda"])
    if not device:
        torch.cuda.synchronize()
    print(f"{name} {family}: right")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
