"""Process groups as a rank of them sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist


class Ranks(NamedTuple):
    """A process group as a rank of it sees it."""

    group: dist.ProcessGroup
    rank: int
    size: int


def ranks_of(group: Any) -> Ranks:
    """The ranks of a group, of a device mesh of one dimension, or with None all.

    TypeError for anything else, RuntimeError without `init_process_group`, ValueError on a rank that is not
    in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group")
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a mesh of {group.ndim} dimensions, must have 1: take mesh[name]")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not have this rank: call it on the ranks of the group alone")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}, must be a ProcessGroup, a DeviceMesh or None")
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))
