"""Arguments that all ranks of a group must give alike, compared before a collective that would hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist

from kernels_dsl.distributed.sequence import Ranks
from kernels_dsl.ops.checked import is_checked

_SEEN: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups that have been used."""


class Heard(NamedTuple):
    """Arguments of a rank, and its error, if it has one."""

    said: dict[str, Any]
    error: str | None


def agree(ranks: Ranks, say: Callable[[], Mapping[str, Any]], error: Exception | None = None) -> None:
    """ValueError on all ranks where one says something else than rank 0, or has an error, which names it.

    A collective that waits for the GPU: in checked mode at each call, else at the first on a group, which
    NCCL needs anyway: all ranks must take part in a communicator's first operation.
    """
    if ranks.group in _SEEN and not is_checked():
        return
    _SEEN.add(ranks.group)
    said = say()
    heard: list[Any] = [None] * ranks.size
    dist.all_gather_object(heard, Heard(dict(said), None if error is None else str(error)), group=ranks.group)
    for rank, other in enumerate(heard):
        if other.error is not None and error is None:
            raise ValueError(f"rank {rank} of the group has an error: {other.error}")
    if error is not None:
        return
    first = heard[0].said
    for key in dict.fromkeys(key for other in heard for key in other.said):
        for rank, other in enumerate(heard):
            if other.said.get(key) != first.get(key):
                raise ValueError(
                    f"{key} is {other.said.get(key)} on rank {rank} of the group, must be {first.get(key)} "
                    "as on rank 0"
                )
