"""One call of each public name, as a first user writes it, and its cost in a process that has torch alone.

`python -m benchmarks.public_calls NAME` is such a process: it prints the times and modules of the name's
first use as JSON. `benchmarks.first_call` starts it. Nothing above `measure` imports kernels_dsl.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

ARCH = "sm_90a"  # what a machine without a GPU compiles for
_N, _BLOCK, _HEADS, _DIM = 512, 64, 4, 128
_E4M3 = torch.float8_e4m3fn


class Inputs(NamedTuple):
    """Arguments of the calls. Matrices are (512, 512), queries, keys and values (1, 512, 4, 128)."""

    a: torch.Tensor
    b: torch.Tensor
    a8: torch.Tensor
    b8: torch.Tensor  # column-major, as fp8 matrix instructions read it
    scale: torch.Tensor
    weights: torch.Tensor  # (2, 512, 512), of two groups
    weights8: torch.Tensor
    scales: torch.Tensor
    offs: torch.Tensor
    qkv: tuple[torch.Tensor, ...]
    qkv8: tuple[torch.Tensor, ...]
    packed: tuple[torch.Tensor, ...]
    packed8: tuple[torch.Tensor, ...]
    cu_seqlens: torch.Tensor
    states: tuple[torch.Tensor, torch.Tensor]  # two results of attention and their log-sum-exps
    slots: torch.Tensor  # places of 512 tokens in a cache of one page
    bsr: tuple[torch.Tensor, ...]  # crow_indices, col_indices, values
    linear: torch.nn.Linear


def inputs(device: str) -> Inputs:
    """The tensors, made by torch alone."""
    a, b = (torch.randn(_N, _N, device=device, dtype=torch.bfloat16) for _ in range(2))
    qkv = [torch.randn(1, _N, _HEADS, _DIM, device=device, dtype=torch.bfloat16) for _ in range(3)]
    weights = torch.stack([b, b])
    rows = _N // _BLOCK
    crow = torch.arange(rows + 1, device=device, dtype=torch.int32)
    values = torch.randn(rows, _BLOCK, _BLOCK, device=device, dtype=torch.bfloat16)
    return Inputs(
        a=a, b=b, a8=a.to(_E4M3), b8=b.to(_E4M3).mT, scale=torch.ones((), device=device),
        weights=weights, weights8=weights.to(_E4M3).mT, scales=torch.ones(2, 1, 1, device=device),
        offs=torch.tensor([_N // 2, _N], device=device, dtype=torch.int32),
        qkv=tuple(qkv), qkv8=tuple(x.to(_E4M3) for x in qkv),
        packed=tuple(x[0] for x in qkv), packed8=tuple(x[0].to(_E4M3) for x in qkv),
        cu_seqlens=torch.tensor([0, 100, _N], device=device, dtype=torch.int32),
        states=(torch.stack(qkv[:2]), torch.zeros(2, 1, _N, _HEADS, device=device)),
        slots=torch.arange(_N, device=device),
        bsr=(crow, crow[:-1].clone(), values),
        linear=torch.nn.Linear(_N, _N, device=device, dtype=torch.bfloat16),
    )  # fmt: skip


def _matrix(library: Any, given: Inputs) -> Any:
    return library.BsrTensor(*given.bsr, (_N, _N))


def _fp8_matrix(library: Any, given: Inputs) -> Any:
    crow, col, values = given.bsr
    return library.BsrTensor(crow, col, values.to(_E4M3), (_N, _N))


def _checked(library: Any, given: Inputs) -> Any:
    with library.checked():
        return library.attention(*given.qkv)


def _with_margin(library: Any, given: Inputs) -> Any:
    with library.sm_margin(8):
        return library.gemm(given.a, given.b)


def _score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + score


CALLS: dict[str, Callable[[Any, Inputs], Any]] = {
    "gemm": lambda lib, x: lib.gemm(x.a, x.b),
    "gemm_gated": lambda lib, x: lib.gemm_gated(x.a, x.b),
    "gemm_gated_supports": lambda lib, x: lib.gemm_gated_supports(x.a, x.b),
    "gemm_reduce": lambda lib, x: lib.gemm_reduce(x.a, x.b),
    "gemm_reduce_supports": lambda lib, x: lib.gemm_reduce_supports(x.a, x.b),
    "supports": lambda lib, x: lib.supports(x.a, x.b),
    "attention": lambda lib, x: lib.attention(*x.qkv),
    "attention_varlen": lambda lib, x: lib.attention_varlen(*x.packed, x.cu_seqlens, x.cu_seqlens, _N),
    "attention_fp8": lambda lib, x: lib.attention_fp8(*x.qkv8),
    "attention_fp8_varlen": lambda lib, x: lib.attention_fp8_varlen(
        *x.packed8, x.cu_seqlens, x.cu_seqlens, _N
    ),
    "quantize_qkv": lambda lib, x: lib.quantize_qkv(*x.qkv),
    "attention_fp8_supports": lambda lib, x: lib.attention_fp8_supports(*x.qkv8),
    "attention_supports": lambda lib, x: lib.attention_supports(*x.qkv),
    "scaled_dot_product_attention": lambda lib, x: lib.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in x.qkv)
    ),
    "attention_decode": lambda lib, x: lib.attention_decode(x.qkv[0][:, -1:], *x.qkv[1:]),
    "attention_decode_supports": lambda lib, x: lib.attention_decode_supports(x.qkv[0][:, -1:], *x.qkv[1:]),
    "merge_states": lambda lib, x: lib.merge_states(*x.states),
    "append_kv": lambda lib, x: lib.append_kv(
        *x.packed[:2], *x.weights.view(2, 1, _N, _HEADS, _DIM), x.slots
    ),
    "register_torch_attention": lambda lib, x: lib.register_torch_attention(),
    "kernel_function": lambda lib, x: lib.kernel_function(_score),
    "checked": _checked,
    "sm_margin": _with_margin,
    "BlockLists": lambda lib, x: lib.BlockLists(x.offs, x.offs),
    "quantize": lambda lib, x: lib.quantize(x.a),
    "quantize_supports": lambda lib, x: lib.quantize_supports(x.a),
    "scaled_gemm": lambda lib, x: lib.scaled_gemm(x.a8, x.b8, x.scale, x.scale),
    "scaled_gemm_supports": lambda lib, x: lib.scaled_gemm_supports(x.a8, x.b8, x.scale, x.scale),
    "grouped_gemm": lambda lib, x: lib.grouped_gemm(x.a, x.weights, x.offs),
    "grouped_gemm_supports": lambda lib, x: lib.grouped_gemm_supports(x.a, x.weights, x.offs),
    "scaled_grouped_gemm": lambda lib, x: lib.scaled_grouped_gemm(
        x.a8, x.weights8, x.scale, x.scales, x.offs
    ),
    "scaled_grouped_gemm_supports": lambda lib, x: lib.scaled_grouped_gemm_supports(
        x.a8, x.weights8, x.scale, x.scales, x.offs
    ),
    "scaled_linear": lambda lib, x: lib.scaled_linear(x.a, x.b),
    "ScaledLinear": lambda lib, x: lib.ScaledLinear.from_linear(x.linear)(x.a),
    "bsr_gemm": lambda lib, x: lib.bsr_gemm(_matrix(lib, x), x.b),
    "bsr_sddmm": lambda lib, x: lib.bsr_sddmm(x.a, x.b, _matrix(lib, x)),
    "bsr_supports": lambda lib, x: lib.bsr_supports(_matrix(lib, x), x.b),
    "bsr_scaled_gemm": lambda lib, x: lib.bsr_scaled_gemm(
        _fp8_matrix(lib, x), x.b8, x.scale.expand(_N // _BLOCK), x.scale
    ),
    "bsr_scaled_supports": lambda lib, x: lib.bsr_scaled_supports(
        _fp8_matrix(lib, x), x.b8, x.scale.expand(_N // _BLOCK), x.scale
    ),
    "BsrTensor": _matrix,
    "BsrLinear": lambda lib, x: lib.BsrLinear(_matrix(lib, x))(x.a),
    "register_epilogue": lambda lib, x: lib.register_epilogue("twice", lambda acc: acc + acc),
    "GemmConfig": lambda lib, x: lib.GemmConfig,
    "Schedule": lambda lib, x: lib.Schedule.PINGPONG,
    "Sm80AttentionConfig": lambda lib, x: lib.Sm80AttentionConfig,
    "Sm90AttentionConfig": lambda lib, x: lib.Sm90AttentionConfig,
    "Sm80GemmConfig": lambda lib, x: lib.Sm80GemmConfig,
    "Sm90GemmConfig": lambda lib, x: lib.Sm90GemmConfig,
    "LinearEpilogue": lambda lib, x: lib.LinearEpilogue(),
}
NOT_CALLED = {
    "autotune_gemm": "it compiles and times candidates by design",
    "advise": "it compiles and times calls by design",
    "register_transformers_attention": "it imports transformers",
    "register_transformers_paged_attention": "it imports transformers",
}


def has_gpu() -> bool:
    """True if the calls run on a GPU; otherwise they go up to the launch."""
    return torch.cuda.is_available()


def _call_without_gpu(name: str, library: Any, given: Inputs, load: bool) -> int:
    """The call up to its launches, which are recorded, and their kernels' libraries; returns their number."""
    from lowering import recording

    with recording.record(ARCH) as recorded:
        CALLS[name](library, given)
    for call in recorded if load else ():
        call.function.compile(*call.args, arch=ARCH, **call.constants).launch  # noqa: B018  loads it
    return len(recorded)


def measure(name: str, load: bool = True, turns: bool = False) -> dict[str, Any]:
    """Use one public name in this process, which has imported torch alone. Times in milliseconds.

    With a GPU: from `import kernels_dsl` until the result is there. Without: up to the launch; `load`: the
    kernels are taken from the cache, and compiled if need be. `turns`: once torch and the GPU are there, it
    prints "ready" and waits for a line of its input.
    """
    cuda = has_gpu()
    given = inputs("cuda" if cuda else "cpu")
    if cuda:
        torch.mm(given.a, given.b)
        torch.cuda.synchronize()
    if turns:
        print("ready", flush=True)
        sys.stdin.readline()
    return _use(name, given, cuda, load)


def _use(name: str, given: Inputs, cuda: bool, load: bool) -> dict[str, Any]:
    before = frozenset(sys.modules)
    start, cpu = time.perf_counter(), time.process_time()
    import kernels_dsl

    getattr(kernels_dsl, name)
    imported = time.perf_counter()
    with torch.no_grad():
        if not cuda:
            _call_without_gpu(name, kernels_dsl, given, load)
        else:
            CALLS[name](kernels_dsl, given)
            torch.cuda.synchronize()
    done = time.perf_counter()
    return {
        "name": name,
        "import_ms": (imported - start) * 1e3,
        "call_ms": (done - imported) * 1e3,
        "total_ms": (done - start) * 1e3,
        "cpu_ms": (time.process_time() - cpu) * 1e3,
        "modules": sorted(frozenset(sys.modules) - before),
    }


if __name__ == "__main__":
    turns = "--turns" in sys.argv
    print(json.dumps(measure(sys.argv[1], "--no-kernels" not in sys.argv, turns)), flush=True)
    if turns:
        sys.stdin.read()  # to end is work, too, which would disturb the next one
