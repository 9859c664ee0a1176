"""Arguments that all ranks of a group must give alike, compared before a collective that would hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist

from kernels_dsl.distributed.groups import Ranks
from kernels_dsl.ops.checked import is_checked

_SEEN: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups that have been used."""
LONG = 6
"""Entries of a tuple that no message shows whole: a shape has fewer."""


class Heard(NamedTuple):
    """Arguments of a rank, and its error, if it has one."""

    said: dict[str, Any]
    error: str | None


class Difference(NamedTuple):
    """An argument that is not alike on two ranks."""

    name: str
    found: Any
    needed: Any


def agree(ranks: Ranks, say: Callable[[], Mapping[str, Any]], error: Exception | None = None) -> None:
    """ValueError on all ranks where one says something else than rank 0, or has an error, which names it.

    A collective that waits for the GPU: in checked mode at each call, else at the first on a group, which
    NCCL needs anyway: all ranks must take part in a communicator's first operation. RuntimeError where a rank
    does not take part within the group's time limit.
    """
    if ranks.group in _SEEN and not is_checked():
        return
    _SEEN.add(ranks.group)
    said = say()
    heard: list[Any] = [None] * ranks.size
    mine = Heard(dict(said), None if error is None else str(error))
    try:
        dist.all_gather_object(heard, mine, group=ranks.group)
    except (RuntimeError, dist.DistError) as reason:
        raise RuntimeError(
            f"rank {ranks.rank} of the group waited for the arguments of the others, of which one has ended, "
            f"is late or did not make this call: {reason}"
        ) from reason
    for rank, other in enumerate(heard):
        if other.error is not None and error is None:
            raise ValueError(f"rank {rank} of the group has an error: {other.error}")
    if error is not None:
        return
    first = heard[0].said
    for key in dict.fromkeys(key for other in heard for key in other.said):
        for rank, other in enumerate(heard):
            if other.said.get(key) != first.get(key):
                name, found, needed = _difference(key, other.said.get(key), first.get(key))
                raise ValueError(
                    f"{name} is {found} on rank {rank} of the group, must be {needed} as on rank 0"
                )


def _difference(name: str, found: Any, needed: Any) -> Difference:
    """The first entry that is not alike of long tuples, their lengths where these differ; others whole."""
    if not isinstance(found, tuple) or not isinstance(needed, tuple) or max(map(len, (found, needed))) < LONG:
        return Difference(name, found, needed)
    if len(found) != len(needed):
        return Difference(f"the length of {name}", len(found), len(needed))
    place = next(i for i, pair in enumerate(zip(found, needed)) if pair[0] != pair[1])
    return Difference(f"{name}[{place}]", found[place], needed[place])
