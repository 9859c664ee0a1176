"""The cases in which a peer was once level or ahead, each against those peers, in one run.

    python -m benchmarks.losses                    # everything, four minutes
    python -m benchmarks.losses --only "BSR"       # cases whose name contains this

One file of results, `losses`. Cases that the power limit bounds are run once more, each competitor for itself
and for most of a second: `picojoules` has the energy of an operation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import attention, bsr, fp8, fp8_gemm, gemm, harness, machine
from benchmarks.attention_calls import Shape, causal_pairs, flash4, flash4_lists, ours, tensors
from benchmarks.attention_sparse import random_lists
from benchmarks.energy import picojoules
from benchmarks.harness import OURS, Case
from kernels_dsl.measure import Call

LISTED_LENGTH = 32768
FRONTEND = "cudnn-frontend"
"""Block-sparse attention of the package of that name, for square blocks of 64 and 128."""
GEMMS = (
    (8192, 8192, 8192), (16384, 5120, 5120), (4096, 10240, 8192), (8192, 8192, 1024), (4096, 4096, 4096),
)  # fmt: skip
BLOCKS = (
    bsr.Shape((64, 64), 26, (128, 128), 40),
    bsr.Shape((64, 64), 26, (128, 128), 1000),
    bsr.Shape((48, 80), 20, (170, 102)),
    bsr.Shape((96, 96), 13, (85, 85)),
    bsr.Shape((16, 16), 128, (512, 512)),
)


@dataclass(frozen=True)
class Loss:
    """A case that is made when it is measured. `hot`: the power limit bounds it."""

    name: str
    make: Callable[[], Case]
    hot: bool = False


def lists_case(heads: int, block: tuple[int, int], kept: int, least: int | None = None) -> Case:
    """Random lists of unmasked blocks: `kept` in each, or from `least` to `kept`."""
    from kernels_dsl import BlockLists

    shape = Shape(1, heads, LISTED_LENGTH, 128)
    q, k, v = tensors(shape)
    counts, indices = random_lists(shape.length, kept, heads, block, least)
    calls: dict[str, Call] = {
        OURS: ours(q, k, v, blocks=BlockLists(None, None, counts, indices, block)),
        "fa4": flash4_lists(q, k, v, counts, indices, block),
    }
    if block == (64, 64) and least is None:
        calls[FRONTEND] = _frontend(q, k, v, indices, kept)
    flops = 4.0 * 128 * float(counts.sum()) * block[0] * block[1]
    return Case("", flops, calls)


def _frontend(q: Any, k: Any, v: Any, indices: Any, kept: int) -> Call:
    views = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def call(_set: int) -> Any:
        from cudnn.block_sparse_attention.api import block_sparse_attention_forward

        return block_sparse_attention_forward(*views, indices, kept, sparse_block_size=64)

    return call


def grouped_case(shape: Shape, kv_heads: int, **options: Any) -> Case:
    """Causal attention with grouped heads; `options` have the same names in flash-attn-4."""
    q, k, v = tensors(shape)
    k, v = (x[:, :, :kv_heads].contiguous() for x in (k, v))
    calls = {
        OURS: ours(q, k, v, causal=True, **options), "fa4": flash4(q, k, v, causal=True, **options),
    }  # fmt: skip
    return Case("", shape.flops(causal_pairs(shape.length)), calls)


def product_case(shape: tuple[int, int, int]) -> Case:
    """A dense product of bf16 against cuBLAS and quack's tiles."""
    return gemm.case(shape, "bf16", gemm.PEERS)


def scaled_case(recipe: fp8_gemm.Recipe) -> Case:
    """An fp8 product against cuBLASLt."""
    return next(fp8_gemm.cases(((8192, 8192, 8192),), (recipe,)))


def fp8_attention_case(shape: Shape) -> Case:
    """fp8 attention, causal, against our own in bf16."""
    return next(case for case in fp8.attention_cases((shape,)) if case.name.endswith("causal"))


def losses() -> Iterator[Loss]:
    """All cases."""
    yield Loss("lists of 64x64, 64 kept, H 12", partial(lists_case, 12, (64, 64), 64))
    yield Loss("lists of 128x64, 64 kept, H 12", partial(lists_case, 12, (128, 64), 64))
    yield Loss("lists of 128x128, 1 to 200, H 8", partial(lists_case, 8, (128, 128), 200, 1))
    gemma = Shape(4, 32, 4096, 128)
    yield Loss("softcap 30, 4,32/4,4096,128 causal", partial(grouped_case, gemma, 4, softcap=30.0))
    short = Shape(16, 96, 512, 64, "fp16")
    yield Loss("16,96,512,64 causal fp16", partial(attention.dense_case, short, True, ("cudnn",)))
    yield Loss("1,64/8,32768,128 causal", partial(grouped_case, Shape(1, 64, 32768, 128), 8), True)
    for shape in GEMMS:
        yield Loss(f"GEMM {'x'.join(map(str, shape))}", partial(product_case, shape), True)
    for recipe in (fp8_gemm.RECIPES[1], fp8_gemm.BLOCK):
        yield Loss(f"fp8 GEMM 8192x8192x8192, {recipe.name}", partial(scaled_case, recipe), True)
    for pattern in BLOCKS:
        yield Loss(f"BSR {pattern.name}", partial(bsr.case, pattern, ("torch", "dense")))
    for length in (2048, 4096):
        size = Shape(4, 16, length, 128)
        yield Loss(f"fp8 attention {size} causal", partial(fp8_attention_case, size), length == 4096)


def measure(loss: Loss, rounds: int, seconds: float) -> harness.Row:
    """The row, with picojoules an operation of each competitor where the case is bound by power."""
    import torch

    case = replace(loss.make(), name=loss.name)
    row = harness.run_case(case, rounds=rounds, seconds=seconds)
    energy: dict[str, float] = {}
    for name in row.ms if loss.hot else ():
        chosen = row.chosen.get(name)
        used = picojoules(case.calls[f"{name}/{chosen}" if chosen else name], case.flops, case.sets)
        if used is not None:
            energy[name] = used
    del case
    torch.cuda.empty_cache()
    return replace(row, picojoules=energy)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.losses`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.4, help="time each case so long (%(default)s)")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the JSON file")
    args = parser.parse_args(argv)
    facts = machine.header()
    print("\n".join(machine.header_lines(facts)), flush=True)
    rows = []
    for loss in losses():
        if args.only in loss.name:
            row = measure(loss, args.rounds, args.seconds)
            rows.append(asdict(row))
            used = [f"{name} {pj:.3f} pJ/FLOP" for name, pj in row.picojoules.items()]
            print("  |  ".join([harness.line(row), *used]), flush=True)
            harness.write("losses", facts, rows, args.results)  # a run may be cut
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
