"""Facts of the driver about a loaded cubin, compared with those read from the file."""

from __future__ import annotations

import pytest
import torch
from user_kernels import Config, affine, same

import lowering
from lowering import ArgumentValueError, LoweringError
from lowering.loaded import LoadedCubin

pytestmark = pytest.mark.usefixtures("cache_dir")


def compile_affine(**config):
    x = torch.empty(64, device="meta")
    arch = lowering.arch.arch_of_device(0) if lowering.arch.device_count() else "sm_90a"
    constants = {"config": Config(**config), "function": same}
    return lowering.jit(affine).compile(x, x, (2.0, x), 64, arch=arch, **constants)


@pytest.mark.gpu
def test_the_driver_agrees_with_the_file():
    kernel = compile_affine(threads=96)
    (read,) = kernel.resources()
    with LoadedCubin(kernel.cubin()) as loaded:
        said = loaded.attributes(read.entry)
    assert said.registers == read.registers
    assert said.local_bytes == read.stack_bytes == 0
    assert (
        read.max_threads == 96 <= said.max_threads
    )  # the driver's is a bound by registers, not the launch's


@pytest.mark.gpu
def test_occupancy_follows_shared_memory_and_threads():
    kernel = compile_affine(threads=256)
    (read,) = kernel.resources()
    device = lowering.arch.device(0)
    limits = lowering.arch.limits(device.arch)
    with LoadedCubin(kernel.cubin()) as loaded:
        assert loaded.resident_blocks(read.entry, 256) == limits.max_threads_per_sm // 256
        assert loaded.resident_blocks(read.entry, 256, limits.smem_per_block) == 1
        assert loaded.resident_blocks(read.entry, 256, limits.smem_per_block // 2 - 2048) == 2
        if limits.max_cluster > 1:
            few = loaded.resident_clusters(read.entry, (2, 1, 1), 256, limits.smem_per_block)
            assert 0 < few <= device.sm_count // 2


@pytest.mark.gpu
def test_unknown_entries_and_files_are_named():
    with (
        LoadedCubin(compile_affine().cubin()) as loaded,
        pytest.raises(ArgumentValueError, match=r"'absent'"),
    ):
        loaded.attributes("absent")
    # Drivers that load lazily refuse what is no cubin at its first use.
    with pytest.raises(LoweringError), LoadedCubin(b"text") as nothing:
        nothing.attributes("absent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu():
    with pytest.raises(LoweringError, match=r"device 0 does not exist"):
        LoadedCubin(b"")
