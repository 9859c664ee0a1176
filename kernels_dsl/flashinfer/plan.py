"""Plans of FlashInfer's wrappers: lists of pages as tables, and the calls that follow them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from kernels_dsl.checks.eager_path import PLAIN_TYPES, check_tensor
from kernels_dsl.checks.options import boolean, integer, one_of, real
from kernels_dsl.ops.serving.decode import attention_decode, repeated
from kernels_dsl.ops.serving.paged_attention import paged_attention
from kernels_dsl.ops.serving.scales import FP8

LAYOUTS = ("NHD", "HND")
BACKENDS = ("auto", "fa2", "fa3")
LOG2_E = math.log2(math.e)
DataType: TypeAlias = "str | torch.dtype"
Caches: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


class LseForm(NamedTuple):
    """Form of a log-sum-exp: its base, "log2" or "ln", and its layout, "NH", (T, H), or "HN", (H, T)."""

    base: str = "log2"
    layout: str = "NH"

    def check(self) -> None:
        """ValueError for another base or layout."""
        one_of("lse_base", self.base, ("log2", "ln"))
        one_of("lse_layout", self.layout, ("NH", "HN"))

    def of(self, natural: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
        """A natural log-sum-exp (H, T) in this form, in `lse` if there is one."""
        found = natural if self.layout == "HN" else natural.mT
        if self.base == "log2":
            found = found * LOG2_E
        return found.contiguous() if lse is None else lse.copy_(found)


USUAL_LSE = LseForm()


class Room(NamedTuple):
    """Sequences, and pages of all of them, that a captured call has room for."""

    sequences: int
    pages: int


@dataclass(frozen=True)
class Sizes:
    """Of a plan: query and KV heads, head dimension, keys of a page."""

    heads: int
    kv_heads: int
    dim: int
    page: int

    def check(self) -> None:
        """TypeError or ValueError where one cannot be."""
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
        for name, value in zip(names, (self.heads, self.kv_heads, self.dim, self.page)):
            integer(name, value, least=1)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_qo_heads is {self.heads}, must be a multiple of num_kv_heads, {self.kv_heads}"
            )


@dataclass(frozen=True)
class Planned:
    """The arguments of `plan` as tables and rules.

    table: int32 (B, n), the pages of each sequence; used: int32 (B,), its keys. starts: int32 (B + 1,), where
    the queries of each start; None where each has q_len. q_len: otherwise the most that one has. rows: of q.
    Both are None for a captured call, which has room for any. invariant: no kernel is chosen by the batch.
    """

    table: torch.Tensor
    used: torch.Tensor
    starts: torch.Tensor | None
    rows: int | None
    q_len: int | None
    sizes: Sizes
    invariant: bool
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float
    scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    @cached_property
    def options(self) -> tuple[Any, ...]:
        """Those of `ops.serving.decode.repeated`."""
        return self.causal, self.window, self.softcap, self.scale, None, False

    @cached_property
    def q_shape(self) -> tuple[int | None, ...]:
        """Shape of q."""
        return self.rows, self.sizes.heads, self.sizes.dim

    @cached_property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of a page of keys."""
        return self.sizes.page, self.sizes.kv_heads, self.sizes.dim


@dataclass(frozen=True)
class PageLists:
    """FlashInfer's lists of pages: those of sequence b are indices[indptr[b] : indptr[b + 1]], the last of
    which has last_page_len[b] keys."""

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    def check(self, prefix: str = "") -> None:
        """TypeError or ValueError where a tensor is not as FlashInfer has it."""
        for name in ("indptr", "indices", "last_page_len"):
            x = check_tensor(prefix + name, getattr(self, name))
            if x.dtype != torch.int32 or x.dim() != 1:
                raise ValueError(
                    f"{prefix}{name} is {x.dtype} {tuple(x.shape)}, must be torch.int32 of one mode"
                )
        batch = self.last_page_len.shape[0]
        if self.indptr.shape[0] != batch + 1:
            raise ValueError(
                f"{prefix}indptr has {self.indptr.shape[0]} entries, must have {batch + 1}, one more than "
                f"{prefix}last_page_len"
            )

    def table(self, width: int, device: torch.device) -> torch.Tensor:
        """The pages of each sequence, int32 (B, width); 0 past its last one."""
        starts, indices = self.indptr.to(device), self.indices.to(device)
        places = torch.arange(width, dtype=torch.int32, device=device)
        table = torch.zeros(self.last_page_len.shape[0], width, dtype=torch.int32, device=device)
        if indices.numel() and table.numel():
            found = indices[(starts[:-1, None] + places).clamp(max=indices.numel() - 1)]
            table = torch.where(places < starts.diff()[:, None], found, table)
        return table

    def used(self, page: int, device: torch.device) -> torch.Tensor:
        """The keys of each sequence, int32 (B,)."""
        counts = self.indptr.to(device).diff()
        return torch.where(counts > 0, (counts - 1) * page + self.last_page_len.to(device), 0).to(torch.int32)


class Wrapper:
    """Base of the wrappers: the tables of a plan, which stay in place for CUDA graphs, and the call."""

    run: Callable[..., Any]

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str, jit_args: Any
    ) -> None:
        self.device = check_tensor("float_workspace_buffer", workspace).device
        self._layout = one_of("kv_layout", kv_layout, LAYOUTS)
        one_of("backend", backend, BACKENDS)
        refuse(jit_args=jit_args)
        self._use_cuda_graph = boolean("use_cuda_graph", use_cuda_graph)
        self._plan: Planned | None = None
        self._room: Room | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if `plan` writes to the same tensors every time."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Nothing: no workspace is used."""

    def _same(self, **arguments: int | None) -> None:
        """ValueError where an argument of `run` is not what `plan` was given."""
        plan = self._plan
        if plan is None:
            return
        left = None if plan.window is None else next(iter(plan.window))
        planned = {"window_left": -1 if left is None else left, "q_len_per_req": plan.q_len}
        for name, value in arguments.items():
            if value is not None and value != planned[name]:
                raise ValueError(f"{name} is {value}, must be {planned[name]}, as planned")

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Caches, **options: Any) -> Any:
        """`run` with `return_lse`."""
        return self.run(q, paged_kv_cache, return_lse=True, **options)

    def end_forward(self) -> None:
        """Nothing, as in FlashInfer."""

    def _reserve(self, **buffers: torch.Tensor | None) -> None:
        """Sizes that a captured call keeps, from FlashInfer's buffers, the last two of pages and their
        lengths."""
        for name, buffer in buffers.items():
            if buffer is None:
                raise ValueError(f"{name} is None, must be given with use_cuda_graph")
        indices, lengths = list(buffers.values())[-2:]
        assert indices is not None and lengths is not None
        self._room = Room(lengths.shape[0], indices.shape[0])

    def _table(self, lists: PageLists, page: int) -> torch.Tensor:
        if self._room is None:
            counts = lists.indptr.diff()
            return lists.table(int(counts.max()) if counts.numel() else 0, self.device)
        batch, pages = lists.last_page_len.shape[0], lists.indices.shape[0]
        if batch != self._room.sequences:
            raise ValueError(
                f"last_page_len has {batch} sequences, must have the buffers' {self._room.sequences}: "
                "captured calls keep it"
            )
        if pages > self._room.pages:
            raise ValueError(f"indices has {pages} pages, must have at most the buffer's {self._room.pages}")
        return lists.table(self._room.pages, self.device)

    def _set(self, plan: Planned) -> None:
        """Keeps a plan; for CUDA graphs in the tensors of the one before."""
        old = self._plan
        if self._use_cuda_graph and old is not None:
            for name in Planned.__dataclass_fields__:
                before, now = getattr(old, name), getattr(plan, name)
                if isinstance(now, torch.Tensor):
                    before.copy_(now)
                elif before != now:
                    raise ValueError(
                        f"{name} is {now}, must be {before}, as planned before: captured calls keep it"
                    )
            return
        self._plan = plan

    def _repeated(self, q: torch.Tensor, caches: Caches) -> torch.Tensor | None:
        """The output of one query a sequence, of a call without options like an earlier one; None where
        there was none, or what is wrong with an argument is to be found."""
        plan = self._plan
        if plan is None or plan.q_len != 1 or plan.starts is not None or self._layout != "NHD":
            return None
        if isinstance(caches, torch.Tensor) and caches.dim() == 5 and caches.shape[1] == 2:
            k, v = caches.unbind(1)
        elif isinstance(caches, tuple) and len(caches) == 2:
            k, v = caches
        else:
            return None
        if type(q) not in PLAIN_TYPES or type(k) not in PLAIN_TYPES or q.is_nested or k.is_nested:
            return None
        if q.shape != plan.q_shape or q.dtype is not plan.q_dtype:
            return None
        if k.shape[1:] != plan.page_shape or k.dtype is not plan.kv_dtype:
            return None
        output = repeated((q.unsqueeze(1), k, v, plan.used, plan.table), plan.options)[1]
        return None if output is None else output.squeeze(1)

    def _call(
        self,
        q: torch.Tensor,
        caches: Caches,
        *,
        scales: dict[str, Any],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        sinks: torch.Tensor | None,
        form: LseForm = USUAL_LSE,
    ) -> Any:
        """Attention as planned. scales: q_scale, k_scale, v_scale."""
        plan = self._plan
        if plan is None:
            raise RuntimeError(f"plan of {type(self).__name__} was not called, must be before run")
        k, v = self._unpacked(caches)
        _check(q, k, v, plan)
        form.check()
        if lse is not None and return_lse:
            _check_lse(lse, q, form)
        options: dict[str, Any] = {
            "causal": plan.causal, "window": plan.window, "softcap": plan.softcap, "sinks": sinks,
            "seqused_k": plan.used, "block_table": plan.table,
            "return_lse": boolean("return_lse", return_lse),
        }  # fmt: skip
        late = _scaled(options, scales, plan)
        found = _attention(q, k, v, plan, out, options)
        result, natural = found if return_lse else (found, None)
        if late != 1.0:
            result.mul_(late)
        return result if natural is None else (result, form.of(natural, lse))

    def _unpacked(self, caches: Caches) -> Sequence[torch.Tensor]:
        """K and V as (pages, keys of a page, KV heads, D)."""
        if isinstance(caches, torch.Tensor):
            if caches.dim() != 5 or caches.shape[1] != 2:
                raise ValueError(
                    f"paged_kv_cache has shape {tuple(caches.shape)}, must be (pages, 2, …) of five modes, "
                    "or a tuple of two tensors"
                )
            caches = caches.unbind(1)
        elif not isinstance(caches, tuple) or len(caches) != 2:
            raise TypeError(
                f"paged_kv_cache is a {type(caches).__name__}, must be a tensor or a tuple of two"
            )
        for x in caches:
            if check_tensor("paged_kv_cache", x).dim() != 4:
                raise ValueError(f"paged_kv_cache has a part of {tuple(x.shape)}, must have four modes")
        return caches if self._layout == "NHD" else [x.transpose(1, 2) for x in caches]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Planned) -> None:
    """TypeError or ValueError where tensors are not as planned."""
    sizes = plan.sizes
    if check_tensor("q", q).dtype != plan.q_dtype:
        raise TypeError(f"q is {q.dtype}, must be {plan.q_dtype}, as planned")
    rows = q.shape[0] if plan.rows is None else plan.rows
    if tuple(q.shape) != (rows, sizes.heads, sizes.dim):
        raise ValueError(
            f"q has shape {tuple(q.shape)}, must be ({rows}, {sizes.heads}, {sizes.dim}), as planned"
        )
    for name, x in (("k", k), ("v", v)):
        if x.dtype != plan.kv_dtype:
            raise TypeError(f"paged_kv_cache has {name} of {x.dtype}, must be {plan.kv_dtype}, as planned")
        if tuple(x.shape[1:]) != plan.page_shape:
            raise ValueError(
                f"paged_kv_cache has {name} of {tuple(x.shape[1:])}, must have {sizes.page} keys of a page, "
                f"{sizes.kv_heads} heads and D {sizes.dim}, as planned"
            )


def _check_lse(lse: torch.Tensor, q: torch.Tensor, form: LseForm) -> None:
    """TypeError or ValueError where the log-sum-exp of q (T, H, D) does not fit."""
    rows, heads, _ = q.shape
    wanted = (rows, heads) if form.layout == "NH" else (heads, rows)
    if check_tensor("lse", lse).dtype != torch.float32 or tuple(lse.shape) != wanted:
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}, must be torch.float32 {wanted}")


def _scaled(options: dict[str, Any], scales: dict[str, Any], plan: Planned) -> float:
    """Puts the scales of q, k and v into `options`; what is left to multiply the output by."""
    options["scale"] = plan.scale
    for name in ("q_scale", "k_scale"):
        x = scales[name]
        if isinstance(x, torch.Tensor) and name == "k_scale" and plan.kv_dtype == FP8:
            options["k_scale"] = x
        elif x is not None:
            options["scale"] *= real(name, x, above=0)
    x = scales["v_scale"]
    if x is None:
        return 1.0
    if plan.kv_dtype != FP8:
        return real("v_scale", x)
    if not isinstance(x, torch.Tensor):
        x = torch.full((), real("v_scale", x), dtype=torch.float32, device=plan.used.device)
    options["v_scale"] = x
    return 1.0


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Planned,
    out: torch.Tensor | None,
    options: dict[str, Any],
) -> Any:
    """The output (T, H, D), with `return_lse` and the log-sum-exp (H, T)."""
    if plan.starts is not None:
        longest = q.shape[0] if plan.q_len is None else plan.q_len
        return paged_attention(
            q, k, v, cu_seqlens_q=plan.starts, max_seqlen_q=longest, batch_invariant=plan.invariant,
            out=out, **options,
        )  # fmt: skip
    assert plan.q_len is not None
    each = (plan.used.shape[0], plan.q_len)
    found = attention_decode(
        _by_sequence(q, each), k, v, out=None if out is None else _by_sequence(out, each), **options
    )
    if isinstance(found, torch.Tensor):
        return _as_rows(found)
    assert found.lse is not None
    return _as_rows(found.out), found.lse.transpose(0, 1).flatten(1)


def _by_sequence(x: torch.Tensor, each: tuple[int, int]) -> torch.Tensor:
    """Rows (T, H, D) as (B, q_len, H, D), by the quicker operator where there is a choice."""
    return x.unsqueeze(1) if each[1] == 1 else x.unflatten(0, each)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    return x.squeeze(1) if x.shape[1] == 1 else x.flatten(0, 1)


def _dtype(name: str, kind: DataType | None, default: torch.dtype) -> torch.dtype:
    """The dtype that FlashInfer has by name or as a dtype."""
    if kind is None:
        return default
    found = getattr(torch, kind, None) if isinstance(kind, str) else kind
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is {kind!r}, must be a torch.dtype or the name of one")
    return found


def rules_of(
    sizes: Sizes,
    pos_encoding_mode: str,
    window: tuple[int, int],
    softcap: float | None,
    scale: float | None,
    dtypes: tuple[DataType | None, DataType | None, DataType | None],
) -> dict[str, Any]:
    """Fields of `Planned` that say what is computed. TypeError or ValueError for what has no counterpart."""
    if pos_encoding_mode != "NONE":
        raise ValueError(
            f"pos_encoding_mode is {pos_encoding_mode!r}, must be 'NONE': rotate q and k beforehand"
        )
    q_dtype = _dtype("q_data_type", dtypes[0], torch.float16)
    kv_dtype = _dtype("kv_data_type", dtypes[1], q_dtype)
    if kv_dtype not in (q_dtype, FP8):
        raise TypeError(f"kv_data_type is {kv_dtype}, must be {q_dtype}, as q_data_type, or {FP8}")
    if _dtype("o_data_type", dtypes[2], q_dtype) != q_dtype:
        raise TypeError(f"o_data_type is {dtypes[2]}, must be {q_dtype}, as q_data_type")
    left, right = (
        None if integer(name, width, least=-1) < 0 else width
        for name, width in zip(("window_left", "window_right"), window)
    )
    limits = None if left is None and right in (None, 0) else (left, right)
    return {
        "causal": right == 0, "window": limits, "softcap": real("logits_soft_cap", softcap or 0.0, least=0),
        "scale": 1 / math.sqrt(sizes.dim) if scale is None else real("sm_scale", scale, above=0),
        "q_dtype": q_dtype, "kv_dtype": kv_dtype,
    }  # fmt: skip


def refuse(**arguments: Any) -> None:
    """ValueError for an argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is given, must be None: it has no counterpart here")
