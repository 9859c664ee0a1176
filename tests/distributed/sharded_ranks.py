"""Functions of a rank in the tests of operators on DTensors, whose kernels are formulas here."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import kernels_dsl
import kernels_dsl.distributed.register
from kernels_dsl.ops.attention import gradient
from kernels_dsl.ops.attention.backward import Gradients
from kernels_dsl.ops.operation import Operation
from kernels_dsl.sparse.tensor import BsrTensor
from reference.quantize import quantize as reference_quantize
from tests.distributed import models
from tests.distributed.ranks import Rank

_GLOO_LACKS = "Invalid scalar type"
"""The error of gloo, where fp8 tensors must go to other ranks."""
OPERATORS = torch.ops.kernels_dsl
_ACTIVATIONS = {None: lambda x: x, "relu": torch.relu}


def _product(call: Any, z: torch.Tensor) -> torch.Tensor:
    """The epilogue of a product, in float64."""
    z = z * call.alpha
    if getattr(call, "c", None) is not None:
        z = z + call.beta * call.c.double()
    if call.bias is not None:
        z = z + (
            call.bias.double() if getattr(call, "bias_axis", "n") == "n" else call.bias.double()[:, None]
        )
    z = _ACTIVATIONS[call.activation](z)
    z = z if call.residual is None else z + call.residual.double()
    return z.to(call.out_dtype or torch.bfloat16)


def _gemm(call: Any) -> torch.Tensor:
    return _product(call, call.a.double() @ call.b.double())


def _gated(call: Any) -> torch.Tensor:
    z = call.alpha * (call.a.double() @ call.b.double())
    z = z if call.bias is None else z + call.bias.double()
    return (torch.nn.functional.silu(z[..., ::2]) * z[..., 1::2]).to(call.out_dtype or call.a.dtype)


def _scaled(call: Any) -> torch.Tensor:
    return _product(call, (call.a.double() * call.scale_a) @ (call.b.double() * call.scale_b))


def _grouped(call: Any) -> torch.Tensor:
    ends = [0, *call.offs.tolist()]
    a, weights = call.a.double(), call.b.double()
    if call.scale_a is not None:
        a, weights = a * call.scale_a[:, None], weights * call.scale_b[:, None]
    rows = zip(ends, ends[1:], weights)
    return _product(call, torch.cat([a[start:end] @ b for start, end, b in rows]))


def _bsr(call: Any) -> torch.Tensor:
    matrix = BsrTensor(call.crow, call.col, call.values.double().bfloat16(), call.shape, call.transposed)
    sparse, dense = matrix.to_dense().double(), call.dense.double()
    return _product(call, dense @ sparse if call.dense_left else sparse @ dense)


def _bsr_scaled(call: Any) -> torch.Tensor:
    values, dense = call.values.double() * call.scales, call.dense.double() * call.dense_scale
    matrix = BsrTensor(call.crow, call.col, values.bfloat16(), call.shape, call.transposed)
    sparse = matrix.to_dense().double()
    return _product(call, dense @ sparse if call.dense_left else sparse @ dense)


def _sampled(call: Any) -> torch.Tensor:
    dense = call.alpha * (call.a.double() @ call.b.double())
    (bm, bn), counts = call.block, call.crow.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    blocks = dense.unflatten(1, (-1, bn)).unflatten(0, (-1, bm)).transpose(1, 2)
    return blocks[rows, call.col.long()].to(call.out_dtype or call.a.dtype)


def _quantize(call: Any) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for turned in {False: (False,), True: (True,), "both": (False, True)}[call.transpose]:
        values, scales = reference_quantize(
            call.x.mT.contiguous() if turned else call.x, call.dtype, scaling=call.scaling, scale=call.scale
        )[:2]
        found += [values, scales]
    return tuple(found)


def _mask_of(options: Any, extras: Any) -> models.Mask:
    """All of a call that hides keys."""
    window = options.window or (None, 0 if options.causal else None)
    starts = None if extras.seqlens is None else extras.seqlens.q
    return models.Mask(window, starts, extras.blocks, tensor=extras.mask, sinks=extras.sinks)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> models.Result:
    """Attention in float64; (S, H, D) where sequences are packed."""
    mask, scale = _mask_of(call.options, call.extras), call.options.scale
    if q.dim() == 4:
        return models.exact(q, k, v, mask, scale)
    out, lse = models.exact(q[None], k[None], v[None], mask, scale)
    return models.Result(out[0], lse[0])


def _attention(call: Any) -> Any:
    out, lse = _exact(call.q, call.k, call.v, call)
    return (out.to(call.q.dtype), lse.float()) if call.return_lse else out.to(call.q.dtype)


def _attention_fp8(call: Any) -> Any:
    tensors = [
        x.double()
        if scale is None
        else x.double()
        * scale.expand(x.shape[0], call.k.shape[2]).repeat_interleave(x.shape[2] // call.k.shape[2], 1)[
            :, None, :, None
        ]
        for x, scale in zip((call.q, call.k, call.v), (call.q_descale, call.k_descale, call.v_descale))
    ]
    out, lse = _exact(*tensors, call)
    return (out.bfloat16(), lse.float()) if call.return_lse else out.bfloat16()


def _backward_plan(x: Any, forward: Any) -> Any:
    def run(forward: Any, do: torch.Tensor, d_lse: torch.Tensor | None) -> Gradients:
        mask, scale = _mask_of(x.options(), x.extras()), x.options().scale
        if x.layout == "bshd":
            return models.gradients_by_formula(forward, do, d_lse, mask, scale)
        whole = models.without_packing(forward)
        d_lse = None if d_lse is None else d_lse[None]
        return models.with_packing(models.gradients_by_formula(whole, do[None], d_lse, mask, scale))

    return SimpleNamespace(run=run)


FORMULAS: dict[str, Callable[[Any], Any]] = {
    "gemm": _gemm, "gemm_gated": _gated, "scaled_gemm": _scaled, "grouped_gemm": _grouped, "bsr_gemm": _bsr,
    "bsr_scaled_gemm": _bsr_scaled, "bsr_sddmm": _sampled, "quantize": _quantize, "attention": _attention,
    "attention_fp8": _attention_fp8,
}  # fmt: skip


class Case(NamedTuple):
    """A call of an operator: its tensors in their order, and how it is called with them."""

    name: str
    tensors: tuple[torch.Tensor, ...]
    call: Callable[..., Any]
    differentiable: bool = True


def _cases() -> list[Case]:
    torch.manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape).bfloat16() / 4  # whose sums are exact

    def fp8(*shape: int) -> torch.Tensor:
        return new(*shape).to(torch.float8_e4m3fn)

    op = OPERATORS
    offs = torch.tensor([3, 3, 8], dtype=torch.int32)
    matrix = BsrTensor.from_dense(new(32, 64), torch.rand(2, 4) < 0.7, (16, 16))
    pattern = (matrix.crow_indices, matrix.col_indices)
    scales = torch.rand(8, 1), torch.rand(1, 12)
    bsr: dict[str, Any] = {"shape": [32, 64]}
    q, k, v = new(2, 4, 4, 8), new(2, 4, 2, 8), new(2, 4, 2, 8)
    packed = (*(x.flatten(0, 1) for x in (q, k, v)), torch.tensor([0, 3, 8], dtype=torch.int32))
    long = new(2, 128, 2, 8), new(2, 128, 2, 8), new(2, 128, 2, 8)
    lists = torch.ones(1, 1, 2).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int()
    return [
        Case("gemm", (new(8, 16), new(16, 12)), op.gemm),
        Case("gemm batch", (new(4, 8, 16), new(16, 12)), op.gemm),
        Case("gemm bias", (new(8, 16), new(16, 12), new(12)), lambda a, b, x: op.gemm(a, b, bias=x)),
        Case("gemm c", (new(8, 16), new(16, 12), new(8, 1)), lambda a, b, x: op.gemm(a, b, x, beta=2.0)),
        Case("gemm relu", (new(8, 16), new(16, 12)), lambda a, b: op.gemm(a, b, activation="relu")),
        Case("gemm uneven", (new(5, 7), new(7, 3)), op.gemm),
        Case("gemm_gated", (new(8, 16), new(16, 12), new(12)), lambda a, b, x: op.gemm_gated(a, b, bias=x)),
        Case("gemm_gated pairs", (new(4, 8, 16), new(16, 6)), op.gemm_gated),
        Case("scaled_gemm", (fp8(8, 16), fp8(16, 12), *scales), op.scaled_gemm, False),
        Case("grouped_gemm", (new(8, 16), new(3, 16, 12), offs), op.grouped_gemm, False),
        Case("bsr right", (*pattern, matrix.values, new(64, 8)), lambda *x: op.bsr_gemm(*x, **bsr)),
        Case(
            "bsr left", (*pattern, matrix.values, new(8, 64)),
            lambda *x: op.bsr_gemm(*x, **bsr, transposed=True, dense_left=True),
        ),
        Case(
            "bsr_sddmm", (*pattern, new(32, 8), new(8, 64)),
            lambda *x: op.bsr_sddmm(*x, **bsr, block=[16, 16]),
        ),
        Case("attention", (q, k, v), lambda *x: op.attention(*x, causal=True, return_lse=True)),
        Case(
            "attention mask", (q, k, v, torch.rand(2, 1, 4, 4) < 0.6),
            lambda *x: op.attention(*x, return_lse=True),
        ),
        Case("attention bias", (q, k, v, new(4, 4, 4)), lambda *x: op.attention(*x, return_lse=True)),
        Case(
            "attention sinks", (q, k, v, new(4)),
            lambda q, k, v, x: op.attention(q, k, v, None, x, causal=True, return_lse=True),
        ),
        Case(
            "attention lists", (*long, *lists),
            lambda q, k, v, *x: op.attention(
                q, k, v, None, None, *x, block_q=64, block_k=64, causal=True, return_lse=True
            ),
        ),
        Case(
            "attention packed", packed,
            lambda q, k, v, x: op.attention(
                q, k, v, *[None] * 6, x, x, layout="thd", max_seqlen_q=5, causal=True, return_lse=True
            ),
        ),
        Case(
            "attention_fp8", (*(fp8(2, 4, heads, 16) for heads in (4, 2, 2)), *torch.rand(3, 2, 2)),
            lambda *x: op.attention_fp8(*x, causal=True, return_lse=True), False,
        ),
        Case(
            "bsr_scaled_gemm",
            (*pattern, fp8(*matrix.values.shape), fp8(64, 8), torch.rand(matrix.nnz, 1, 1), torch.rand(1, 8)),
            lambda *x: op.bsr_scaled_gemm(*x, **bsr), False,
        ),
        Case(
            "scaled_grouped_gemm", (fp8(8, 16), fp8(3, 16, 12), offs, torch.rand(8), torch.rand(3, 12)),
            op.grouped_gemm, False,
        ),
        *(
            Case(
                f"quantize {scaling} {turn}", (new(256, 256),),
                lambda x, s=scaling, t=turn: op.quantize(
                    x, dtype=torch.float8_e4m3fn, scaling=s, transpose=t
                ), False,
            )
            for scaling, turn in itertools.product(("tensor", "row", "1x128", "128x128"), ("no", "both"))
        ),
    ]  # fmt: skip


def _placements(x: torch.Tensor) -> list[Placement]:
    """All placements of a tensor over one dimension of a mesh."""
    return [Replicate(), *(Shard(mode) for mode in range(x.dim())), Partial()]


def _placed(x: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """x with a placement for each dimension of the mesh; partial sums of floating point are shares."""
    partial = [isinstance(placement, Partial) for placement in placements]
    shares = math.prod(size for size, is_partial in zip(mesh.shape, partial) if is_partial)
    share = x if x.dtype.itemsize == 1 or not x.is_floating_point() else x / shares
    whole = [Replicate() if is_partial else placement for placement, is_partial in zip(placements, partial)]
    local = distribute_tensor(share, mesh, whole, src_data_rank=None).to_local().clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.shape, stride=x.contiguous().stride()
    )


def _results(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    made = case.call(*tensors)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def _full(x: torch.Tensor) -> torch.Tensor:
    """All of a DTensor; of an fp8 one as bytes, which every backend can gather."""
    if not isinstance(x, DTensor):
        return x
    if x.dtype.itemsize == 1:
        local = x.to_local().contiguous().view(torch.uint8)
        bytes_of = DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
        return bytes_of.full_tensor().view(x.dtype)
    return x.full_tensor()


def _leaves(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    floating = [x for x in tensors if x.is_floating_point() and case.differentiable]
    return [x.detach().requires_grad_() if any(x is y for y in floating) else x for x in tensors]


def _outcome(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results and gradients, whole."""
    leaves = _leaves(case, tensors)
    results = [_full(x) for x in _results(case, leaves)]
    if case.differentiable:
        sum(
            (x.float() * torch.arange(x.numel()).view(x.shape).remainder(3)).sum() for x in results
        ).backward()
    return [*(x.detach() for x in results), *(_full(x.grad) for x in leaves if x.grad is not None)]


def check(case: Case, placements: tuple[Any, ...], mesh: DeviceMesh) -> bool:
    """Results and gradients are those of one process, or the call is refused before communication (False)."""
    several = [p if isinstance(p, tuple) else (p,) for p in placements]
    tensors = [_placed(x, mesh, *p) for x, p in zip(case.tensors, several)]
    label = f"{case.name} {placements}"
    with CommDebugMode() as traffic:
        try:
            with torch.no_grad():
                _results(case, tensors)
        except RuntimeError as error:
            if _GLOO_LACKS in str(error) and any(x.dtype.itemsize == 1 for x in case.tensors):
                return False
            assert "must" in str(error), f"{label}: {error}"
            assert traffic.get_total_counts() == 0, label
            return False
    for mine, expected in zip(_outcome(case, tensors), _outcome(case, list(case.tensors)), strict=True):
        assert mine.dtype == expected.dtype and mine.shape == expected.shape, label
        error = (mine.double() - expected.double()).abs().max()
        assert error <= 2.0**-6 * expected.double().abs().max(), f"{label}: {error}"
    return True


def use_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators compute by formula in place of kernels."""
    monkeypatch.setattr(Operation, "run", lambda self, call: FORMULAS[self.name](call))
    monkeypatch.setattr(gradient, "_plan_of", _backward_plan)


def _grid(most: int) -> list[tuple[Case, tuple[Placement, ...]]]:
    """At most so many placements of the tensors of each case, in a seeded sample."""
    found, random_of = [], random.Random(22)
    for case in _cases():
        placements = list(itertools.product(*map(_placements, case.tensors)))
        found += [(case, chosen) for chosen in random_of.sample(placements, min(most, len(placements)))]
    return found


def _run(chosen: list[tuple[Case, tuple[Placement, ...]]], rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (rank.size,))
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        found = [check(case, placements, mesh) for case, placements in chosen]
    assert any(found) and not all(found)


def sample(rank: Rank) -> None:
    """A seeded sample of operators and placements."""
    _run(_grid(3), rank)


def everything(rank: Rank) -> None:
    """Every operator with every placement of each of its tensors, or 400 where there are more."""
    _run(_grid(400), rank)


def two_dimensions(rank: Rank) -> None:
    """A sample of placements of every operator's tensors on a mesh of two dimensions."""
    mesh, random_of = init_device_mesh("cpu", (2, rank.size // 2)), random.Random(23)

    def any_of(placements: list[Placement]) -> Placement:
        return placements[0] if random_of.random() < 0.7 else random_of.choice(placements)

    def sample(case: Case) -> tuple[tuple[Placement, Placement], ...]:
        every = map(_placements, case.tensors)
        return tuple((any_of(placements), any_of(placements)) for placements in every)

    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        for case in _cases():
            found = [check(case, sample(case), mesh) for _ in range(40)]
            assert any(found), case.name


REPLICATE, PARTIAL = Replicate(), Partial()
EXACT = [
    ("gemm", (Shard(0), REPLICATE), {}, Shard(0)),
    ("gemm", (REPLICATE, Shard(1)), {}, Shard(1)),
    ("gemm", (Shard(1), Shard(0)), {}, PARTIAL),
    ("gemm", (PARTIAL, REPLICATE), {}, PARTIAL),
    ("gemm", (Shard(1), REPLICATE), {}, PARTIAL),
    ("gemm bias", (Shard(1), Shard(0), REPLICATE), {}, PARTIAL),
    ("gemm bias", (REPLICATE, Shard(1), Shard(0)), {}, Shard(1)),
    ("gemm relu", (PARTIAL, REPLICATE), {"reduce_scatter_tensor": 1}, None),
    ("gemm_gated", (REPLICATE, Shard(1), Shard(0)), {}, Shard(1)),
    ("gemm_gated", (Shard(0), REPLICATE, REPLICATE), {}, Shard(0)),
    ("gemm_gated", (PARTIAL, REPLICATE, REPLICATE), {"reduce_scatter_tensor": 1}, None),
    ("attention", (Shard(0),) * 3, {}, Shard(0)),
    ("attention", (Shard(2),) * 3, {}, Shard(2)),
    ("attention mask", (Shard(0),) * 4, {}, Shard(0)),
    ("attention mask", (*(Shard(2),) * 3, REPLICATE), {}, Shard(2)),
    ("attention bias", (*(Shard(2),) * 3, Shard(0)), {}, Shard(2)),
    ("attention bias", (*(Shard(0),) * 3, REPLICATE), {}, Shard(0)),
    ("attention sinks", (*(Shard(2),) * 3, Shard(0)), {}, Shard(2)),
    ("attention lists", (*(Shard(0),) * 3, REPLICATE, REPLICATE), {}, Shard(0)),
    ("attention lists", (*(Shard(2),) * 3, REPLICATE, REPLICATE), {}, Shard(2)),
    ("attention packed", (*(Shard(1),) * 3, REPLICATE), {}, Shard(1)),
    ("attention_fp8", (*(Shard(2),) * 3, *(Shard(1),) * 3), {}, Shard(2)),
    ("attention_fp8", (Shard(0),) * 6, {}, Shard(0)),
    ("bsr_scaled_gemm", (*(REPLICATE,) * 3, Shard(1), REPLICATE, Shard(1)), {}, Shard(1)),
    ("scaled_grouped_gemm", (REPLICATE, Shard(2), REPLICATE, REPLICATE, Shard(1)), {}, Shard(1)),
    ("scaled_grouped_gemm", (Shard(1), Shard(1), REPLICATE, REPLICATE, REPLICATE), {}, PARTIAL),
    ("grouped_gemm", (REPLICATE, Shard(2), REPLICATE), {}, Shard(1)),
    ("bsr left", (REPLICATE, REPLICATE, REPLICATE, Shard(0)), {}, Shard(0)),
    ("quantize row no", (Shard(0),), {}, Shard(0)),
]
"""Operator, placements, the collectives of a call, placement of the first result."""
LOCAL_BACKWARD = [
    ("gemm", (Shard(0), REPLICATE), (Shard(0), PARTIAL)),
    ("gemm", (REPLICATE, Shard(1)), (PARTIAL, Shard(1))),
    ("gemm bias", (REPLICATE, Shard(1), Shard(0)), (PARTIAL, Shard(1), Shard(0))),
    ("gemm relu", (Shard(0), REPLICATE), (Shard(0), PARTIAL)),
    ("gemm_gated", (REPLICATE, Shard(1), Shard(0)), (PARTIAL, Shard(1), Shard(0))),
    ("attention", (Shard(0),) * 3, (Shard(0),) * 3),
    ("attention", (Shard(2),) * 3, (Shard(2),) * 3),
    ("attention bias", (*(Shard(2),) * 3, Shard(0)), (*(Shard(2),) * 3, Shard(0))),
    ("attention bias", (*(Shard(0),) * 3, REPLICATE), (*(Shard(0),) * 3, PARTIAL)),
    ("attention sinks", (*(Shard(0),) * 3, REPLICATE), (*(Shard(0),) * 3, PARTIAL)),
    ("attention sinks", (*(Shard(2),) * 3, Shard(0)), (*(Shard(2),) * 3, Shard(0))),
    ("attention lists", (*(Shard(2),) * 3, REPLICATE, REPLICATE), (Shard(2),) * 3),
    ("attention packed", (*(Shard(1),) * 3, REPLICATE), (Shard(1),) * 3),
    ("bsr left", (REPLICATE, REPLICATE, REPLICATE, Shard(0)), (PARTIAL, Shard(0))),
]
"""Operator, placements, those of the gradients, which need no collective."""


def backward_collectives(rank: Rank) -> None:
    """Gradients of shards come without communication, in the placements that follow from the operands'."""
    mesh = init_device_mesh("cpu", (rank.size,))
    cases = {case.name: case for case in _cases()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        for name, placements, expected in LOCAL_BACKWARD:
            case = cases[name]
            leaves = _leaves(case, [_placed(x, mesh, p) for x, p in zip(case.tensors, placements)])
            first = _results(case, leaves)[0]
            with CommDebugMode() as traffic:
                first.backward(torch.ones_like(first))
            assert traffic.get_total_counts() == 0, f"{name} {placements}: {traffic.get_comm_counts()}"
            found = tuple(x.grad.placements[0] for x in leaves if x.requires_grad)
            assert found == expected, f"{name} {placements}: {found}"


def collectives(rank: Rank) -> None:
    """Calls move no more than they must, public functions too, and refusals name the reason."""
    mesh = init_device_mesh("cpu", (rank.size,))
    cases = {case.name: case for case in _cases()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_formulas(monkeypatch)
        for name, placements, expected, placed in EXACT:
            case = cases[name]
            tensors = [_placed(x, mesh, p) for x, p in zip(case.tensors, placements)]
            with CommDebugMode() as traffic:
                first = _results(case, tensors)[0]
            counts = {str(key).split(".")[-1]: n for key, n in traffic.get_comm_counts().items()}
            assert counts == expected, f"{name} {placements}: {counts}"
            assert isinstance(first, DTensor) and (placed is None or first.placements == (placed,)), name
        a, b = (_placed(x, mesh, p) for x, p in zip(cases["gemm"].tensors, (Shard(0), REPLICATE)))
        assert kernels_dsl.gemm(a, b).placements == (Shard(0),)
        q, k, v = (_placed(x, mesh, Shard(2)) for x in cases["attention"].tensors)
        assert kernels_dsl.attention(q, k, v, causal=True).placements == (Shard(2),)
        with pytest.raises(RuntimeError, match="q is sharded along mode 1, must not be: queries attend"):
            kernels_dsl.attention(*(_placed(x, mesh, Shard(1)) for x in cases["attention"].tensors))
        columns = (_placed(x, mesh, p) for x, p in zip(cases["gemm_gated"].tensors, (REPLICATE, Shard(1))))
        x, w = (y.requires_grad_() for y in columns)
        product = kernels_dsl.gemm_gated(x, w)
        with CommDebugMode() as traffic:
            product.backward(torch.ones_like(product))
        assert traffic.get_total_counts() == 0
        assert (x.grad.placements, w.grad.placements) == ((PARTIAL,), (Shard(1),))
        with pytest.raises(RuntimeError, match=r"a is sharded along mode 1, must not be: the epilogue"):
            kernels_dsl.gemm_gated(_placed(cases["gemm"].tensors[0], mesh, Shard(1)), b)
        odd = _placed(torch.zeros(16, 2 * rank.size + 2).bfloat16(), mesh, Shard(1))
        with pytest.raises(RuntimeError, match=r"b has shape .* ranks cannot share mode 1"):
            kernels_dsl.gemm_gated(a, odd)
        with pytest.raises(RuntimeError, match=r"must be called with torch\.Tensors"):
            kernels_dsl.gemm(a, b, out=_placed(torch.zeros(8, 12).bfloat16(), mesh, Shard(0)))
