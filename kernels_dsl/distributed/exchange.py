"""Tensors that two ranks send each other beside what computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from kernels_dsl.distributed.groups import Ranks


class Message(NamedTuple):
    """Tensors, a tuple or a named one, for a rank of the group or from it."""

    peer: int
    tensors: Any


class Exchange:
    """A message that is sent and one that is received, either of them None, beside what computes."""

    def __init__(self, ranks: Ranks, sent: Message | None, received: Message | None) -> None:
        operations = []
        for function, message in ((dist.isend, sent), (dist.irecv, received)):
            if message is not None:
                operations += [
                    dist.P2POp(function, x, group=ranks.group, group_peer=message.peer)
                    for x in message.tensors
                ]
        self._kept = sent  # until it has been sent
        self.received = received
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Any:
        """The received tensors, or None; the current stream waits for them."""
        for work in self._works:
            work.wait()
        self._kept = None
        return None if self.received is None else self.received.tensors
