"""The facts that `inspect` reads from a cubin, compared with those of a known kernel."""

from __future__ import annotations

import re

import cutlass
import pytest
import torch
from cutlass import Float32, cute
from user_kernels import Config, affine, same

import lowering
from lowering import inspect
from lowering.errors import DamagedEntry

pytestmark = pytest.mark.usefixtures("cache_dir")


@cute.kernel
def spilling_kernel(mX: cute.Tensor):
    """Indexes a register array with a runtime value, which puts it into local memory."""
    tx, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(64, Float32)
    for i in cutlass.range_constexpr(64):
        values[i] = mX[tx + 32 * i]
    for i in cutlass.range(64, unroll=1):
        values[(i * tx) % 64] = values[(i + tx) % 64] + 1.0
    for i in cutlass.range_constexpr(64):
        mX[tx + 32 * i] = values[i]


def spilling(mX: cute.Tensor, stream):
    spilling_kernel(mX).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


@pytest.fixture
def kernel():
    x = torch.empty(64, device="meta")
    constants = {"config": Config(threads=96, smem=2048), "function": same}
    return lowering.jit(affine).compile(x, x, (2.0, x), 64, arch="sm_89", **constants)


def test_resources_of_a_simple_kernel(kernel):
    (found,) = kernel.resources()
    assert "affine" in found.entry
    assert 0 < found.registers <= 32
    assert (found.stack_bytes, found.spill_loads, found.spill_stores) == (0, 0, 0)
    assert (found.static_smem, found.dynamic_smem, found.max_threads) == (0, 2048, 96)
    # Two 24-byte tensors at most, a float and an int, a tensor: at least 3 addresses and 2 words.
    assert 3 * 8 + 2 * 4 <= found.parameter_bytes <= 128
    assert found.count("LDG") == 2
    assert found.count("STG") == 1
    assert found.count("HGMMA") == 0


def test_every_instruction_is_counted(kernel):
    """One count for each address in the disassembly."""
    listing = kernel.sass()
    addresses = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", listing, re.M)
    (found,) = kernel.resources()
    assert sum(found.instructions.values()) == len(addresses) > 10
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_.a-z]*", opcode) for opcode in found.instructions)


def test_local_memory_is_seen():
    x = torch.empty(64 * 32, device="meta")
    (found,) = lowering.jit(spilling).compile(x, arch="sm_90a").resources()
    assert found.stack_bytes >= 64 * 4
    assert found.spill_loads > 0
    assert found.spill_stores > 0


def test_predicated_instructions_are_counted():
    listing = """
\t.section\t.text.kernel_a,"ax",@progbits
.text.kernel_a:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/             @!UP0 UTMALDG.2D [UR8], [UR4] ;
        /*0030*/              @UPT UTMALDG.2D [UR8], [UR4] ;
.L_x_1:
        /*0040*/                   EXIT ;
.text.kernel_b:
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
"""
    counts = inspect.instruction_counts(listing)
    assert counts["kernel_a"] == {"LDC": 1, "BRA": 1, "UTMALDG.2D": 2, "EXIT": 1}
    assert counts["kernel_b"] == {"HGMMA.64x128x16.F32.BF16": 1}


def test_ptx_cubin_and_sass(kernel):
    assert ".target sm_89" in kernel.ptx()
    assert kernel.cubin()[:4] == b"\x7fELF"
    assert "EXIT" in kernel.sass()


def test_not_a_cubin():
    with pytest.raises(DamagedEntry, match="not a cubin"):
        inspect.resources(b"text")
    with pytest.raises(lowering.LoweringError, match="nvdisasm failed"):
        inspect.sass(b"text")


def test_without_nvdisasm(monkeypatch):
    def missing(name):
        raise inspect.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(inspect.importlib.metadata, "files", missing)
    monkeypatch.setattr(inspect.shutil, "which", lambda name: None)
    monkeypatch.setattr(inspect.os, "access", lambda path, mode: False)
    with pytest.raises(lowering.LoweringError, match="pip install nvidia-cuda-nvdisasm"):
        inspect.nvdisasm()
