"""Attention backward against cuDNN and FlashAttention-2 (through PyTorch's SDPA) and flash-attn-4.

    python -m benchmarks.attention_backward                  # everything, three minutes
    python -m benchmarks.attention_backward --suite lists    # may be repeated

Suites, one file of results each: `backward` (dense, causal, windows) and `lists` (random block lists). Each
times `torch.autograd.grad` alone, in both modes of `deterministic`. Operations counted: five products,
6 · D + 4 · Dv for each pair of query and key that a mask leaves; half of all pairs for causal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.attention_calls import DEVICE, causal_pairs, output_of, window_pairs
from benchmarks.harness import OURS, Case
from kernels_dsl.measure import Call
from reference import tolerance
from reference.attention import Masking
from reference.attention import attention as reference_attention

CHECKED = 1024
"""Rows of the short sequence whose gradients are compared with float64 before a timing."""
FIXED = "ours_deterministic"


@dataclass(frozen=True)
class Training:
    """Sizes of a call, and its mask: `window` keys to the left of a query, causal."""

    batch: int
    heads: int
    length: int
    dim: int
    dim_v: int = 0
    kv_heads: int = 0
    causal: bool = False
    window: int | None = None

    def __str__(self) -> str:
        kv = f"/{self.kv_heads}" if self.kv_heads else ""
        dims = f"{self.dim}/{self.dim_v}" if self.dim_v else f"{self.dim}"
        mask = f" window {self.window}" if self.window else " causal" * self.causal
        return f"{self.batch},{self.heads}{kv},{self.length},{dims}{mask}"

    @property
    def flops(self) -> float:
        pairs = float(self.length) ** 2
        if self.window is not None:
            pairs = window_pairs(self.length, self.window)
        elif self.causal:
            pairs = causal_pairs(self.length)
        return self.batch * self.heads * pairs * (6.0 * self.dim + 4.0 * (self.dim_v or self.dim))

    @property
    def masking(self) -> Masking:
        left = None if self.window is None else self.window - 1
        return Masking(left, 0 if self.causal else None)

    def leaves(self, length: int | None = None) -> list[Any]:
        """q, k, v that require gradients."""
        import torch

        generator = torch.Generator(DEVICE).manual_seed(0)
        heads, rows = self.kv_heads or self.heads, length or self.length
        sizes = ((self.heads, self.dim), (heads, self.dim), (heads, self.dim_v or self.dim))
        return [
            torch.randn(
                self.batch, rows, *size, generator=generator, device=DEVICE, dtype=torch.bfloat16
            ).requires_grad_()
            for size in sizes
        ]


def both_masks(batch: int, heads: int, length: int, dim: int, dim_v: int = 0) -> tuple[Training, Training]:
    """One shape without a mask, and causal."""
    shape = Training(batch, heads, length, dim, dim_v)
    return shape, replace(shape, causal=True)


SHAPES = (
    *both_masks(1, 16, 16384, 128),
    *both_masks(4, 16, 4096, 128),
    *both_masks(4, 32, 4096, 64),
    *both_masks(4, 8, 4096, 256),
    *both_masks(1, 64, 8192, 192, dim_v=128),
    *both_masks(16, 16, 1024, 128),
    Training(1, 32, 32768, 128, kv_heads=8, causal=True, window=1024),
)
LISTS = (((128, 128), 32, Training(1, 8, 32768, 128)), ((64, 64), 64, Training(1, 12, 32768, 128)))


def backward_of(forward: Callable[[], Any], leaves: Sequence[Any]) -> Call:
    """Computes the gradients of one forward pass, which runs when the call is made first."""
    import torch

    kept: list[Any] = []

    def call(_set: int) -> Any:
        if not kept:
            out = output_of(forward())
            kept.extend((out, torch.randn_like(out)))
        return torch.autograd.grad(kept[0], leaves, kept[1], retain_graph=True)

    return call


def ours(leaves: Sequence[Any], **options: Any) -> Callable[[], Any]:
    """The forward pass of `kernels_dsl.attention`."""
    import kernels_dsl

    return lambda: kernels_dsl.attention(*leaves, **options)


def sdpa(leaves: Sequence[Any], backend: str, shape: Training) -> Call:
    """PyTorch's attention with one backend, "cudnn" or "fa2"."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[backend]

    def forward() -> Any:
        views = [x.transpose(1, 2) for x in leaves]
        with sdpa_kernel(chosen):
            out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=shape.causal)
        return out.transpose(1, 2)

    return backward_of(forward, leaves)


def flash4(leaves: Sequence[Any], **options: Any) -> Call:
    """flash-attn-4."""

    def forward() -> Any:
        from flash_attn.cute import flash_attn_func

        return flash_attn_func(*leaves, **options)

    return backward_of(forward, leaves)


def verifier(shape: Training, options: dict[str, Any]) -> Callable[[], None]:
    """Compares the gradients of two heads and CHECKED rows with float64, in both modes."""

    def verify() -> None:
        import torch

        small = replace(shape, batch=1, heads=2, kv_heads=min(shape.kv_heads, 1), length=CHECKED)
        leaves = small.leaves()
        d_out = torch.randn_like(leaves[0][..., :1].expand(1, CHECKED, 2, small.dim_v or small.dim))
        references = []
        for dtype in (torch.float64, torch.bfloat16):
            copies = [x.detach().to(dtype).requires_grad_() for x in leaves]
            q, k, v = copies
            out = reference_attention(q, k, v, small.masking, dtype=dtype)[0]
            references.append(torch.autograd.grad(out, copies, d_out.to(out.dtype)))
        for deterministic in (True, False):
            out = ours(leaves, deterministic=deterministic, **options)()
            for own, exact, peer in zip(torch.autograd.grad(out, leaves, d_out), *references):
                tolerance.check(*(x.transpose(1, 2) for x in (own, exact.double(), peer.double())), ulps=4.0)

    return verify


def dense_case(shape: Training, peers: Sequence[str], family: str | None = None) -> Case:
    """Both of our modes, or one family of our kernels in free order, and `peers` on one shape."""
    leaves = shape.leaves()
    options: dict[str, Any] = {"causal": shape.causal}
    foreign = dict(options)
    if shape.window is not None:
        options["window"] = foreign["window_size"] = (shape.window - 1, 0)
    calls = {
        OURS: backward_of(ours(leaves, deterministic=False, **options), leaves),
        FIXED: backward_of(ours(leaves, deterministic=True, **options), leaves),
    }
    if family is not None:
        options["family"] = family
        calls = {OURS: backward_of(ours(leaves, deterministic=False, **options), leaves)}
    for peer in peers:
        if peer in ("cudnn", "fa2"):
            if shape.window is None and not shape.kv_heads:
                calls[peer] = sdpa(leaves, peer, shape)
        else:
            calls[peer] = flash4(leaves, deterministic=peer.endswith("deterministic"), **foreign)
    return Case(str(shape), shape.flops, calls, verify=verifier(shape, options))


def lists_case(block: tuple[int, int], kept: int, shape: Training) -> Case:
    """Random lists of unmasked blocks, and flash-attn-4 with the lists turned round for it beforehand."""
    import torch

    from kernels_dsl import BlockLists

    leaves = shape.leaves()
    rows, columns = (shape.length // size for size in block)
    generator = torch.Generator(DEVICE).manual_seed(kept)
    draws = torch.rand(1, shape.heads, rows, columns, generator=generator, device=DEVICE)
    chosen = torch.zeros_like(draws, dtype=torch.int32).scatter_(-1, draws.topk(kept, dim=-1).indices, 1)

    def listed(mask: Any) -> tuple[Any, Any]:
        order = torch.argsort(mask, dim=-1, descending=True, stable=True).int()
        return mask.sum(-1, dtype=torch.int32), order.contiguous()

    lists = listed(chosen)
    calls = {}
    for name, deterministic in ((OURS, False), (FIXED, True)):
        mask = BlockLists(None, None, *lists, block)
        calls[name] = backward_of(ours(leaves, blocks=mask, deterministic=deterministic), leaves)
    calls["fa4"] = flash4_lists(leaves, lists, listed(chosen.transpose(-1, -2).contiguous()), block)
    flops = shape.flops * kept / columns
    name = f"{shape.length}, H {shape.heads}, {block[0]}x{block[1]}, {kept} kept"
    return Case(name, flops, calls)


def flash4_lists(leaves: Sequence[Any], lists: Any, turned: Any, block: tuple[int, int]) -> Call:
    """flash-attn-4 on (counts, indices) of unmasked blocks, of rows and of columns."""

    def forward() -> Any:
        import torch
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        made = [
            BlockSparseTensorsTorch(*(torch.zeros_like(x) for x in given), *given, block_size=block)
            for given in (lists, turned)
        ]
        return flash_attn_func(*leaves, block_sparse_tensors=made[0], block_sparse_tensors_bwd=made[1])

    return backward_of(forward, leaves)


def _alone(cases: Iterator[Callable[[], Case]]) -> Iterator[Case]:
    """Cases whose tensors are gone before those of the next one are made."""
    import torch

    for make in cases:
        yield make()
        torch.cuda.empty_cache()


def suites() -> dict[str, Iterator[Callable[[], Case]]]:
    """Functions that make the cases of each suite."""
    peers = ("cudnn", "fa2", "fa4", "fa4_deterministic")
    return {
        "backward": (partial(dense_case, shape, peers) for shape in SHAPES),
        "lists": (partial(lists_case, *lists) for lists in LISTS),
        # FlashAttention-2's kernels are of the same class.
        "sm80": (
            partial(dense_case, shape, ("fa2",), "sm80")
            for shape in SHAPES
            if shape.window is None and not shape.dim_v
        ),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.attention_backward`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention_backward", description="Attention backward against its peers."
    )
    made = suites()
    parser.add_argument("--suite", action="append", choices=tuple(made), help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each (default %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="time each case for at least so long (%(default)s)"
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON files")
    args = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    for suite in args.suite or made:
        harness.run_suite(
            f"attention_{suite}" if suite == "backward" else f"attention_backward_{suite}",
            _alone(made[suite]),
            rounds=args.rounds,
            seconds=args.seconds,
            results=args.results,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
