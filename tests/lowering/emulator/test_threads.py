"""Emulated calls of several threads do not mix."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch")

import kernels_dsl  # noqa: E402
from lowering.emulator import capture  # noqa: E402


@pytest.fixture
def slow_host_functions(monkeypatch):
    """Host functions return to their caller late, so that another thread's call falls between."""
    call = capture._call

    def slow(*arguments):
        time.sleep(0.05)
        call(*arguments)
        time.sleep(0.05)

    monkeypatch.setattr(capture, "_call", slow)


def test_two_threads_call_one_kernel_at_once(monkeypatch, slow_host_functions):
    monkeypatch.setenv("KERNELS_DSL_EMULATE", "sm_89")
    start, results = threading.Barrier(2), {}
    kernels_dsl.gemm(torch.zeros(16, 16).bfloat16(), torch.zeros(16, 16).bfloat16())

    def work(index: int) -> None:
        a = torch.full((16, 16), float(index + 1)).bfloat16()
        b = torch.ones(16, 16).bfloat16()
        start.wait(60)
        results[index] = [kernels_dsl.gemm(a, b) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(results[index]) == 3 and all(bool((x == 16 * (index + 1)).all()) for x in results[index])
