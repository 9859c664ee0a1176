"""The results of the common calls (`kernels_dsl.aot.calls`) and their gradients in float64, by PyTorch alone.

A reference may be of the leading part of a result: the first rows of a large product, the first heads of
attention over many keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels_dsl import BsrLinear, BsrTensor
from kernels_dsl.aot.calls.call import Call, Result, leaf
from kernels_dsl.blocks.epilogue.activations import ACTIVATIONS
from kernels_dsl.blocks.epilogue.gates import GATES
from kernels_dsl.blocks.reduce.reductions import REDUCTIONS

Tensors = Sequence[torch.Tensor]
Arguments = dict[str, Any]
_ROWS = 2048
"""Of a product that are compared, of those that have many."""
_SCORES, _QUERIES = 1 << 29, 16384
"""Of attention that are computed for a comparison; of more there are fewer heads and queries."""

TOLERANCES = {
    "quantize": 0.04, "quantize_qkv": 0.04, "append_kv": 0.04, "attention_fp8": 0.1,
    "attention_fp8_varlen": 0.1, "scaled_linear": 0.15,
}  # fmt: skip
_TOLERANCE = 0.015
"""Of the error's root mean square by that of the result. bf16 is rounded by 0.2 %, e4m3 by 2.6 %."""


def check(call: Call, result: Result) -> float:
    """The largest relative error among outputs and gradients; AssertionError where one is over its limit."""
    doubles = {name: _double(value) for name, value in result.arguments.items()}
    leaves = [leaf(doubles[name]).requires_grad_() for name in call.gradients]
    exact = REFERENCES[call.name](doubles)
    actual = _RESULTS.get(call.name, lambda _, outputs: outputs)(result.arguments, result.outputs)
    assert len(exact) == len(actual), f"{len(actual)} results, {len(exact)} expected"
    worst = 0.0
    for x, y in zip(actual, exact):
        worst = max(worst, _compare(call, "result", x, y))
    if leaves:
        wanted = [x for x in exact if x.requires_grad]
        given = [x.double() for x in result.upstream]
        assert [x.shape for x in wanted] == [x.shape for x in given]
        for name, x, y in zip(call.gradients, result.gradients, torch.autograd.grad(wanted, leaves, given)):
            worst = max(worst, _compare(call, f"gradient of {name}", x, y))
    return worst


def _compare(call: Call, name: str, actual: torch.Tensor, exact: torch.Tensor) -> float:
    part = actual.detach()[tuple(slice(0, n) for n in exact.shape)].double()
    exact = exact.detach()
    assert part.shape == exact.shape, f"{call.label}: {name} is {part.shape}, must be {exact.shape}"
    error = float((part - exact).norm() / exact.norm().clamp(min=1e-30)) if exact.numel() else 0.0
    limit = TOLERANCES.get(call.name, _TOLERANCE)
    assert error <= limit, f"{call.label}: {name} is off by {error:.3g} of its size, at most {limit}"
    return error


class Dense:
    """A block-sparse matrix of doubles: `values` are its leaf."""

    def __init__(self, matrix: BsrTensor) -> None:
        self.matrix = matrix
        self.values = matrix.values.detach().double()

    @property
    def cells(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block rows and block columns of the values."""
        crow = self.matrix.crow_indices.long()
        rows = torch.arange(len(crow) - 1, device=crow.device)
        return torch.repeat_interleave(rows, crow.diff()), self.matrix.col_indices.long()

    def dense(self, scales: torch.Tensor | None = None) -> torch.Tensor:
        """The matrix, its blocks times their scales."""
        values = self.values if scales is None else self.values * scales.reshape(-1, 1, 1)
        (rows, columns), (bm, bk) = self.matrix.shape, self.matrix.block
        full = values.new_zeros(rows // bm, columns // bk, bm, bk).index_put(self.cells, values)
        full = full.transpose(1, 2).reshape(rows, columns)
        return full.t() if self.matrix.transposed else full


def _double(value: Any) -> Any:
    if isinstance(value, BsrTensor):
        return Dense(value)
    if isinstance(value, BsrLinear):
        made = Dense(value.weight)
        made.bias = value.bias.detach().double()  # type: ignore[attr-defined]
        return made
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double()
    return value


def expanded(scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """One scale for each element of a tensor of `shape`: of blocks of 128, or of groups of equal size."""
    scale = scale.double()
    if scale.dim() < len(shape):
        return scale.reshape(*scale.shape, *[1] * (len(shape) - scale.dim())).expand(shape)
    for mode, size in enumerate(shape):
        groups = scale.shape[mode]
        group = 128 if 1 < groups == -(-size // 128) else -(-size // groups)
        scale = scale.repeat_interleave(group, dim=mode).narrow(mode, 0, size)
    return scale


# ---- products ----------------------------------------------------------------------------------------------


def _gemm(a: Arguments) -> Tensors:
    left, residual = a["a"], a.get("residual")
    if not left.requires_grad:
        left = left[..., :_ROWS, :]
    z = left @ a["b"]
    if a.get("bias") is not None:
        z = z + a["bias"]
    if a.get("activation") is not None:
        z = ACTIVATIONS[a["activation"]].exact(z)
    return [z if residual is None else z + residual[..., : z.shape[-2], :]]


def _gated(a: Arguments) -> Tensors:
    return [GATES["swiglu"].of_pairs(_gemm(a)[0])]


def _reduced(a: Arguments) -> Tensors:
    z = a["a"] @ a["b"]
    return [z, REDUCTIONS[a["reduce"]].exact(z, a.get("dim", -1))]


def _grouped(a: Arguments) -> Tensors:
    ends = a["offs"].tolist()
    left = a["a"] * expanded(a["scale_a"], a["a"].shape) if "scale_a" in a else a["a"]
    right = a["b"] * expanded(a["scale_b"], a["b"].shape) if "scale_b" in a else a["b"]
    return [torch.cat([left[i:j] @ right[g] for g, (i, j) in enumerate(zip([0, *ends], ends))])]


def _scaled(a: Arguments) -> Tensors:
    left = (a["a"] * expanded(a["scale_a"], a["a"].shape))[:_ROWS]
    return [left @ (a["b"] * expanded(a["scale_b"], a["b"].shape))]


def _linear(a: Arguments) -> Tensors:
    y = a["x"] @ a["weight"].t()
    return [y if a["bias"] is None else y + a["bias"]]


def _dense(factor: Any) -> torch.Tensor:
    return factor.dense() if isinstance(factor, Dense) else factor


def _bsr(a: Arguments) -> Tensors:
    return _gemm({**a, "a": _dense(a["a"]), "b": _dense(a["b"])})


def _bsr_scaled(a: Arguments) -> Tensors:
    factors = []
    for name in ("a", "b"):
        factor, scale = a[name], a[f"scale_{name}"]
        sparse = isinstance(factor, Dense)
        factors.append(factor.dense(scale) if sparse else factor * expanded(scale, factor.shape))
    return [factors[0] @ factors[1]]


def _sampled(a: Arguments) -> Tensors:
    pattern = a["pattern"]
    bm, bk = pattern.matrix.block
    full = (a["a"] @ a["b"]).unflatten(1, (-1, bk)).unflatten(0, (-1, bm)).transpose(1, 2)
    return [full[pattern.cells]]


def _bsr_linear(a: Arguments) -> Tensors:
    return [a["x"] @ a["layer"].dense().t() + a["layer"].bias]


# ---- attention ---------------------------------------------------------------------------------------------


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: Arguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Sq, H, Dv) and log-sum-exp (B, H, Sq) of q (B, Sq, H, D), k and v (B, Sk, Hk, …), with the
    options of the call `a`; of fewer heads and queries where there are many scores."""
    group, (batch, q_len), k_len = q.shape[2] // k.shape[2], q.shape[:2], k.shape[1]
    if not q.requires_grad:
        rows = min(q_len, _QUERIES)
        heads = max(1, min(q.shape[2], _SCORES // (batch * rows * k_len)))
        kv = -(-heads // group)
        q, k, v = q[:, :rows, :heads], k[:, :, :kv], v[:, :, :kv]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1)[:, : q.shape[1]] for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    softcap = a.get("softcap")
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if a.get("mask") is None else scores + a["mask"][:, :, : q.shape[2]]
    hidden = _hidden(a, q.shape[1], q_len, k_len, q.device)
    scores = scores.masked_fill(hidden[:, :, : q.shape[2]], -math.inf)
    all_scores = scores
    if a.get("sinks") is not None:
        sinks = a["sinks"][: q.shape[1]].view(1, -1, 1, 1).expand(batch, -1, q.shape[2], 1)
        all_scores = torch.cat([scores, sinks], dim=-1)
    weights = all_scores.softmax(-1).nan_to_num(0.0)[..., :k_len]
    return (weights @ v).transpose(1, 2), all_scores.logsumexp(-1)


def _hidden(a: Arguments, heads: int, q_len: int, k_len: int, device: torch.device) -> torch.Tensor:
    i = torch.arange(q_len, device=device)[:, None] + k_len - q_len
    j = torch.arange(k_len, device=device)
    left, right = a.get("window") or (None, None)
    hidden = torch.zeros(1, 1, q_len, k_len, dtype=torch.bool, device=device)
    if a.get("causal") or a.get("is_causal"):
        right = 0
    hidden = hidden if right is None else hidden | (j > i + right)
    hidden = hidden if left is None else hidden | (j < i - left)
    if a.get("mask_mod") is not None:
        documents = a["aux"][0]
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    if a.get("blocks") is not None:
        hidden = hidden | ~_listed(a["blocks"], heads, q_len, k_len)
    return hidden


def _listed(blocks: Any, heads: int, q_len: int, k_len: int) -> torch.Tensor:
    """Pairs in listed blocks."""
    bq, bk = blocks.block
    columns, found = -(-k_len // bk), None
    for counts, indices in ((blocks.counts, blocks.indices), (blocks.full_counts, blocks.full_indices)):
        if counts is None:
            continue
        there = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        places = torch.where(there, indices, columns).long()
        one = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
        one = one.scatter(-1, places, True)[..., :columns]
        found = one if found is None else found | one
    assert found is not None
    found = found.repeat_interleave(bq, dim=2)[:, :, :q_len].repeat_interleave(bk, dim=3)[..., :k_len]
    return found[:, :heads]


def _descaled(a: Arguments, packed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = []
    for name in "qkv":
        x, scale = a[name], a.get(f"{name}_descale")
        if scale is not None and not packed:
            x = (x.transpose(1, 2) * expanded(scale, x.transpose(1, 2).shape)).transpose(1, 2)
        found.append(x)
    return found[0], found[1], found[2]


def _attention(a: Arguments) -> Tensors:
    out, lse = attend(*_descaled(a, False), a)
    return [out, lse] if a.get("return_lse") else [out]


def _torchs(a: Arguments) -> Tensors:
    out, _ = attend(*(a[name].transpose(1, 2) for name in ("query", "key", "value")), a)
    return [out.transpose(1, 2)]


def _keys(cache: torch.Tensor, a: Arguments, sequence: int, used: int) -> torch.Tensor:
    """The keys (used, heads, D) of a sequence, in pages or not."""
    table = a.get("block_table")
    rows = cache[sequence] if table is None else cache[table[sequence].long()].flatten(0, 1)
    return rows[:used]


def _packed(a: Arguments) -> Tensors:
    """Sequence by sequence, of all heads."""
    starts = a["cu_seqlens_q"].tolist()
    outs = []
    for n, (i, j) in enumerate(itertools.pairwise(starts)):
        if a.get("block_table") is not None:
            k, v = (_keys(a[name], a, n, int(a["seqused_k"][n])) for name in "kv")
        else:
            k, v = a["k"][i:j], a["v"][i:j]
        outs.append(attend(a["q"][None, i:j], k[None], v[None], a)[0][0])
    heads = min(x.shape[1] for x in outs)
    return [torch.cat([x[:, :heads] for x in outs])]


def _decode(a: Arguments) -> Tensors:
    queries, starts = a["q"], a.get("cu_seqlens_q")
    if starts is not None:
        queries = queries.unflatten(0, (len(starts) - 1, -1))
    outs, sums = [], []
    for n, q in enumerate(queries):
        used = int(a["seqused_k"][n])
        k, v = (_keys(a[name], a, n, used) for name in ("k_cache", "v_cache"))
        if "k_scale" in a:
            k, v = k * a["k_scale"][:, None], v * a["v_scale"][:, None]
        out, lse = attend(q[None], k[None], v[None], {**a, "causal": True})
        outs.append(out[0])
        sums.append(lse[0])
    found = [torch.cat(outs) if starts is not None else torch.stack(outs)]
    return [*found, torch.stack(sums)] if a.get("return_lse") else found


# ---- the rest ----------------------------------------------------------------------------------------------


def _slots(a: Arguments) -> torch.Tensor:
    if "slot_mapping" in a:
        return a["slot_mapping"].long()
    page, tokens = a["k_cache"].shape[1], a["k"].shape[1]
    places = a["cache_seqlens"].long()[:, None] + torch.arange(tokens, device=a["k"].device)
    pages = a["block_table"].long().gather(1, places // page)
    return (pages * page + places % page).flatten()


def _appended(a: Arguments) -> Tensors:
    return [a[name].reshape(-1, *a[name].shape[-2:]) for name in "kv"]


def _from_cache(a: Arguments, _: Tensors) -> Tensors:
    """Rows that were written, times their scale."""
    found = []
    for name in "kv":
        rows = a[f"{name}_cache"].double().flatten(0, 1)[_slots(a)]
        found.append(rows * a[f"{name}_scale"][:, None] if f"{name}_scale" in a else rows)
    return found


def _merged(a: Arguments) -> Tensors:
    lse = a["lse"].logsumexp(0)
    return [(a["out"] * (a["lse"] - lse).exp()[..., None]).sum(0), lse]


def _quantized(a: Arguments) -> Tensors:
    x, transpose = a["x"], a["transpose"]
    return [x, x.mT] if transpose == "both" else [x.mT if transpose else x]


def _dequantized(a: Arguments, outputs: Tensors) -> Tensors:
    """Values times scales."""
    return [x.double() * expanded(s, x.shape) for x, s in zip(outputs[::2], outputs[1::2])]


def _dequantized_heads(a: Arguments, outputs: Tensors) -> Tensors:
    pairs = zip(outputs[::2], outputs[1::2])
    turned = [(x.double().transpose(1, 2), s) for x, s in pairs]
    return [(x * expanded(s, x.shape)).transpose(1, 2) for x, s in turned]


_RESULTS: dict[str, Callable[[Arguments, Tensors], Tensors]] = {
    "append_kv": _from_cache, "quantize": _dequantized, "quantize_qkv": _dequantized_heads,
}  # fmt: skip
"""The tensors to compare, where they are not the outputs."""
REFERENCES: dict[str, Callable[[Arguments], Tensors]] = {
    "gemm": _gemm, "gemm_gated": _gated, "gemm_reduce": _reduced, "grouped_gemm": _grouped,
    "scaled_gemm": _scaled, "scaled_grouped_gemm": _grouped, "scaled_linear": _linear, "bsr_gemm": _bsr,
    "bsr_scaled_gemm": _bsr_scaled, "bsr_sddmm": _sampled, "BsrLinear": _bsr_linear,
    "attention": _attention, "scaled_dot_product_attention": _torchs, "attention_varlen": _packed,
    "attention_fp8": _attention, "attention_fp8_varlen": _packed, "attention_decode": _decode,
    "append_kv": _appended, "merge_states": _merged, "quantize": _quantized,
    "quantize_qkv": lambda a: [a["q"], a["k"], a["v"]],
}  # fmt: skip
