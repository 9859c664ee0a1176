"""Threads that run one plan for the first time at once: none launches before all that it needs is there."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kernels_dsl.config import stream_k
from kernels_dsl.config.gemm import GemmConfig, Sm80GemmConfig, Sm90GemmConfig
from kernels_dsl.ops.gemm import kernels as gemm_kernels
from kernels_dsl.ops.gemm.gemm import plan_for
from lowering import emulator

SPLIT = Sm80GemmConfig(64, 64, 64, 4, 2, 2, split_k=2)
STREAM = Sm90GemmConfig(128, 128, stream_k=True)


@pytest.fixture
def half_made(monkeypatch) -> threading.Event:
    """Set when a plan has its first kernel, while it makes the other thing that it needs."""
    event, launcher, shares = threading.Event(), gemm_kernels.launcher, stream_k.shares

    def slow_launcher(function, *arguments):
        if function == "splitk_reduce":
            event.set()
            time.sleep(0.3)
        return launcher(function, *arguments)

    def slow_shares(*arguments):
        event.set()
        time.sleep(0.3)
        return shares(*arguments)

    monkeypatch.setattr(gemm_kernels, "launcher", slow_launcher)
    monkeypatch.setattr(stream_k, "shares", slow_shares)
    return event


@pytest.mark.parametrize("config", [SPLIT, STREAM], ids=["split", "stream"])
def test_two_threads_run_a_new_plan(half_made, config: GemmConfig):
    a, b = (torch.randint(-2, 3, shape).bfloat16() for shape in ((72, 256), (256, 136)))
    found, errors = {}, []
    with emulator.run(arch="sm_90a", sms=2):
        plan = plan_for(a, b, config=config)

        def work(index: int) -> None:
            try:
                if index == 1:
                    half_made.wait(120)
                found[index] = plan.run(a, b, None, None)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    for result in found.values():
        assert torch.equal(result.float(), (a.float() @ b.float()).bfloat16().float())
