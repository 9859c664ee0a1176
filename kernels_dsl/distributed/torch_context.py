"""`scaled_dot_product_attention` of sequences that PyTorch's context parallelism shards, by these methods.

PyTorch makes DTensors of queries, keys and values, sharded along the sequence. A function mode sees the call
with them, before PyTorch chooses a backend, so that nothing of PyTorch's is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from kernels_dsl.checks import options
from kernels_dsl.distributed.attention import METHODS, context_parallel_attention
from kernels_dsl.distributed.sequence import ORDERS

_SDPA = torch._C._nn.scaled_dot_product_attention
"""The function itself, whose name in `torch.nn.functional` PyTorch gives to a wrapper meanwhile."""
_ROWS = 2
"""The mode of the sequence in (B, H, S, D)."""


class _Arguments(NamedTuple):
    """Those of `torch.nn.functional.scaled_dot_product_attention`."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@contextmanager
def torch_context_parallel(*, method: str = "ring", order: str | None = None) -> Iterator[None]:
    """Within it, PyTorch's context parallelism runs `context_parallel_attention`.

    That is for `scaled_dot_product_attention` of DTensors (B, H, S, D) that are sharded along S, as
    `torch.distributed.tensor.experimental.context_parallel` makes them; other modes of the mesh may shard the
    batch or the heads. Other calls are PyTorch's. The backward pass may run after it, in PyTorch's context.

    method: as of `context_parallel_attention`. order: None asks PyTorch, whose load balancing is "zigzag".

    ValueError before any communication for attn_mask, dropout_p and what that function refuses.
    """
    options.one_of("method", method, METHODS)
    if order is not None:
        options.one_of("order", order, ORDERS)
    with _Mode(method, order):
        yield


class _Mode(TorchFunctionMode):
    def __init__(self, method: str, order: str | None) -> None:
        super().__init__()
        self._method, self._order = method, order

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if func is not _SDPA:
            return func(*args, **keywords)
        call = _Arguments(*args, **keywords)
        mode = _sharded_rows(call)
        if mode is None:
            return func(*args, **keywords)
        return self._attention(call, mode)

    def _attention(self, call: _Arguments, mode: int) -> DTensor:
        """The output, sharded like the queries; `mode` of the mesh shards the rows."""
        if call.attn_mask is not None:
            raise ValueError("attn_mask is given, must be None for a sequence that ranks share")
        if options.real("dropout_p", call.dropout_p) != 0.0:
            raise ValueError(f"dropout_p is {call.dropout_p}, must be 0: there is no dropout")
        query, mesh = call.query, call.query.device_mesh
        for name, x in (("key", call.key), ("value", call.value)):
            if not isinstance(x, DTensor) or x.device_mesh != mesh or x.placements != query.placements:
                found = x.placements if isinstance(x, DTensor) else type(x).__name__
                raise ValueError(f"{name} is {found}, must be a DTensor with {query.placements} like query")
        if query.shape[1] != call.key.shape[1] and not call.enable_gqa:
            heads = f"{call.key.shape[1]} heads, must have {query.shape[1]} like query"
            raise ValueError(f"key has {heads} where enable_gqa is false")
        q, k, v = (x.to_local().transpose(1, 2) for x in (query, call.key, call.value))
        out = context_parallel_attention(
            q, k, v, mesh.get_group(mode), method=self._method, order=self._order or _order_of_torch(),
            causal=call.is_causal, scale=call.scale,
        )  # fmt: skip
        return DTensor.from_local(out.transpose(1, 2), mesh, query.placements, run_check=False)


def _sharded_rows(call: _Arguments) -> int | None:
    """The mode of the mesh that shards the rows of the queries; None where there is none or not one alone."""
    query = call.query
    if not isinstance(query, DTensor) or query.dim() != 4:
        return None
    found = [mode for mode, placement in enumerate(query.placements) if placement == Shard(_ROWS)]
    return found[0] if len(found) == 1 else None


def _order_of_torch() -> str:
    """The order of PyTorch's shards. RuntimeError where this version does not say."""
    from torch.distributed.tensor import experimental as _experimental

    module: Any = getattr(_experimental, "_context_parallel", None) or getattr(
        _experimental, "_attention", None
    )
    chosen = getattr(module, "_cp_options", None)
    if chosen is None:
        raise RuntimeError(
            f"order is None, must be given for torch {torch.__version__}, which does not say it"
        )
    return "zigzag" if chosen.enable_load_balance else "contiguous"
