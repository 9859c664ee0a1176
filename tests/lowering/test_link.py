"""The built-in linker, on what the DSL exports."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess

import pytest
import torch
import tvm_ffi
import user_kernels

from lowering.compile import compile_host
from lowering.errors import LinkError
from lowering.function import RUNTIME_LIBRARIES
from lowering.launch import load_runtime
from lowering.link import link_shared

ARGS = ("mX", "mY")


@pytest.fixture(scope="module")
def exported() -> bytes:
    jit = user_kernels.affine_jit
    x = torch.empty(64, device="meta")
    constants = {"config": user_kernels.Config(smem=1024), "function": user_kernels.same}
    signature = jit.signature(x, x, (2.0, x), 64)
    return compile_host(jit.target, jit.parameters, signature, constants, arch="sm_90a", name="affine").object


def test_the_result_loads_and_runs_up_to_the_first_check(exported, tmp_path):
    path = tmp_path / "kernel.so"
    path.write_bytes(link_shared(exported, RUNTIME_LIBRARIES) + b"what follows is not looked at")
    load_runtime()
    kernel = tvm_ffi.load_module(str(path))["kernel"]
    x = torch.zeros(64)
    with pytest.raises(ValueError, match=r"argument #0.*mX.*expected device_type=cuda"):
        kernel(x, x, (2.0, x), 64)
    with pytest.raises(TypeError, match="Expects 4 parameters"):
        kernel(x)
    with pytest.raises(TypeError, match="argument #0"):
        kernel(1, x, (2.0, x), 64)


def test_symbols_are_found_and_data_is_right(exported, tmp_path):
    """The cubin that the library holds is the one that was compiled; zeroed sections are zero."""
    path = tmp_path / "kernel.so"
    path.write_bytes(link_shared(exported, RUNTIME_LIBRARIES) + b"\xff" * 8192)
    load_runtime()
    library = ctypes.CDLL(str(path))
    assert library.__cute_internal_kernel_cuda_num_binaries() == 1
    assert hasattr(library, "__tvm_ffi_kernel")
    with pytest.raises(AttributeError):
        library.no_such_symbol  # noqa: B018


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here")
def test_a_reader_of_elf_files_has_no_complaint(exported, tmp_path):
    path = tmp_path / "kernel.so"
    path.write_bytes(link_shared(exported, RUNTIME_LIBRARIES))
    text = ""
    for wanted in (
        ["--program-headers", "--dynamic"],
        ["--use-dynamic", "--syms"],
        ["--use-dynamic", "--relocs"],
    ):
        command = ["readelf", "--wide", *wanted, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        text += done.stdout
    assert "Warning" not in text
    assert "__tvm_ffi_kernel" in text
    for library in RUNTIME_LIBRARIES:
        assert f"Shared library: [{library}]" in text
    assert "RPATH" not in text
    assert "RUNPATH" not in text


def patched(exported: bytes, at: int, form: str, value: int) -> bytes:
    data = bytearray(exported)
    struct.pack_into(form, data, at, value)
    return bytes(data)


def test_other_files_are_refused(exported):
    with pytest.raises(LinkError, match="ELF"):
        link_shared(b"", ())
    with pytest.raises(LinkError, match="ELF"):
        link_shared(b"MZ" + exported[2:], ())
    with pytest.raises(LinkError, match="machine 183"):  # aarch64
        link_shared(patched(exported, 18, "<H", 183), ())
    with pytest.raises(LinkError, match="ELF type 3"):
        link_shared(patched(exported, 16, "<H", 3), ())


def test_unknown_relocations_are_refused(exported):
    (table,) = struct.unpack_from("<Q", exported, 40)
    (count,) = struct.unpack_from("<H", exported, 60)
    for i in range(count):
        header = struct.unpack_from("<IIQQQQIIQQ", exported, table + 64 * i)
        if header[1] == 4 and header[5] > 1000:  # the code's relocations
            info = header[4] + 8
            (symbol_and_type,) = struct.unpack_from("<Q", exported, info)
            with pytest.raises(LinkError, match="relocation type 99"):
                link_shared(patched(exported, info, "<Q", symbol_and_type >> 32 << 32 | 99), ())
            return
    pytest.fail("the exported object has no relocations for its code")
