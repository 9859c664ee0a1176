"""Calls like earlier ones: what was decided for them, found by one comparison of all their tensors.

What a call needs depends on the type, dtype, device, shape and strides of its tensors, and whether it may go
past the dispatcher on their dispatch keys and the thread's. To ask for these takes Python 0.3 µs a tensor and
more; the function that code of `torch.compile` compares its inputs with takes 0.06.

What is kept of calls lies in a dictionary by keys that say how many tensors there are, and all that matters
beside them. A key should hold some of their shapes: calls of one key are compared one after the other, and
only a few of them are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels_dsl.ops.sm_margin import BLOCKS, with_margin

MAX_KEYS = 8192  # some hundred bytes each
_MAX_OF_A_KEY = 4
_MISALIGNED = "Misaligned Tensor data"
"""The words of a launch for a tensor's address that is no multiple of what its kernel was compiled for."""
_make_comparison: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
_is_compiling = torch.compiler.is_dynamo_compiling  # other tracers have a mode, or tensors of their own type
_dispatch_modes = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
_forward_ad = torch.autograd.forward_ad


def find(kept: dict[Any, Any], key: Any, tensors: tuple[Any, ...]) -> Any:
    """The entry for such a call, where this one may go past the dispatcher too; None: look further.

    Addresses are not looked at: a launch refuses those that are not multiples of what its kernel takes with
    a ValueError. The caller then does without, after `refused`.
    """
    if _is_compiling() or _forward_ad._current_level >= 0 or _dispatch_modes():
        return None
    if BLOCKS:
        key = with_margin(key)
    try:
        alike = kept.get(key, ())
    except TypeError:  # an argument that has no hash: the checks of a first call name it
        return None
    for same, recorded, found in alike:
        if same(*tensors) and (recorded is None or recorded is _grad_enabled()):
            return found
    return None


def served(kept: dict[Any, Any], key: Any, tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
    """The result for `arguments` of the entry for such a call; None where there is none, or it refuses
    their addresses."""
    run = find(kept, key, tensors)
    if run is None:
        return None
    try:
        return run(*arguments)
    except ValueError as error:
        refused(kept, key, error)
    return None


def keep(kept: dict[Any, Any], key: Any, tensors: tuple[torch.Tensor, ...], found: Any) -> None:
    """Keep `found` for calls like this one, which has gone past the dispatcher.

    What is found with tensors that require grad is kept for this grad mode alone.
    """
    key = with_margin(key)
    others = kept.get(key, ())
    if _make_comparison is None or len(others) == _MAX_OF_A_KEY or not _aligned(tensors):
        return
    recorded = _grad_enabled() if any(x.requires_grad for x in tensors) else None
    if any(same(*tensors) and recorded is mode for same, mode, _ in others):
        return  # kept before, but not looked for: something watched this call
    put(kept, key, (*others, (_comparison(tensors), recorded, found)))


def put(kept: dict[Any, Any], key: Any, value: Any, most: int = MAX_KEYS) -> None:
    """kept[key] = value. Of `most` keys all are forgotten first: plans are cheap to make again."""
    if len(kept) >= most:
        kept.clear()
    kept[key] = value


def refused(kept: dict[Any, Any], key: Any, error: ValueError) -> None:
    """Notes that an entry refused a call's addresses: from now on calls of this key are found only where all
    addresses are multiples of 16. Raises any other error."""
    if _MISALIGNED not in str(error):
        raise error
    key = with_margin(key)
    kept[key] = tuple((_and_aligned(same), recorded, found) for same, recorded, found in kept.get(key, ()))


def _comparison(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """True if as many tensors are like these."""
    distinct = list({id(x): x for x in tensors}.values())
    same: Callable[..., bool]
    same = _make_comparison(*distinct, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if len(distinct) == len(tensors):
        return same
    # That function takes no tensor twice.
    pattern = [next(i for i, y in enumerate(tensors) if y is x) for x in tensors]
    first = sorted(set(pattern))
    return lambda *others: (
        all(x is others[i] for x, i in zip(others, pattern)) and same(*[others[i] for i in first])
    )


def _aligned(tensors: tuple[torch.Tensor, ...]) -> bool:
    return not any(x.data_ptr() & 15 for x in tensors)


def _and_aligned(same: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *tensors: same(*tensors) and _aligned(tensors)
