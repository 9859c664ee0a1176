"""The benchmark of context parallelism: times that it reads from a trace."""

from __future__ import annotations

import pytest

from benchmarks.context_parallel import exposed_us
from tests.distributed.ranks import run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_the_ring_around_another_attention_is_right(size):
    run_ranks("tests.distributed.ring_peer_ranks:equal", size=size)


def test_exposed_communication_is_time_without_any_other_kernel():
    def kernel(name: str, start: float, length: float) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": length}

    events = [
        kernel("attention", 0, 10),
        kernel("ncclDevKernel_SendRecv", 5, 10),  # 5 of it alone
        kernel("attention", 20, 5),
        kernel("ncclDevKernel_SendRecv", 21, 2),  # hidden
        kernel("merge", 30, 5),
        kernel("ncclDevKernel_SendRecv", 28, 10),  # 2 before and 3 after
        {"cat": "cpu_op", "name": "nccl", "ts": 0, "dur": 100},
    ]
    assert exposed_us(events) == 5 + 2 + 3
    assert exposed_us([]) == 0
