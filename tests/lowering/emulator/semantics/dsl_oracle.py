"""Layouts and descriptors as the CuTe DSL itself has them: the independent side of these tests.

Layouts are read from the DSL at trace time, descriptors from the compiled kernel's PTX or from the compiled
host function, which runs here on the CPU with its launch captured.
"""

from __future__ import annotations

import ctypes
import re
import tempfile

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
import numpy as np
from cutlass._mlir.execution_engine import ExecutionEngine
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

OPTIONS = "--gpu-arch sm_90a"


class Layout:
    """A CuTe layout `shape:stride`, maybe nested, as an integer function that is evaluated here."""

    def __init__(self, shape, stride):
        self.shape, self.stride = shape, stride

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From CuTe's notation, such as ((8,8),(64,1)):((64,512),(1,0))."""
        shape, stride = text.replace(" ", "").split(":")
        return cls(eval(shape), eval(stride))

    def mode(self, index: int) -> Layout:
        return Layout(self.shape[index], self.stride[index])

    def __call__(self, index):
        """Offset of a linear (colexicographic) index, or array of them, within this mode."""
        return _offset(np.asarray(index), self.shape, self.stride)

    @property
    def size(self) -> int:
        return int(np.prod(np.array(_flat(self.shape))))


def _flat(tree):
    return [x for t in tree for x in _flat(t)] if isinstance(tree, tuple) else [tree]


def _offset(index, shape, stride):
    total = np.zeros_like(index)
    for extent, step in zip(_flat(shape), _flat(stride), strict=True):
        total = total + (index % extent) * step
        index = index // extent
    return total


def cute_swizzle(address, bits: int, base: int, shift: int):
    """CuTe's Swizzle<bits, base, shift> as its documentation defines it."""
    mask = ((1 << bits) - 1) << (base + shift)
    return address ^ ((address & mask) >> shift)


def trace(function):
    """Run `function` under the DSL's tracer, on the host, and return what it returns."""
    found = []

    @cute.jit
    def probe():
        found.append(function())

    cute.compile(probe, options=OPTIONS)
    return found[0]


def mma_layouts(op) -> dict[str, Layout]:
    """(thread, value) layouts of the operands of the MMA atom `op`, or `op()`: column-major offsets."""

    def read():
        tiled = cute.make_tiled_mma(op() if callable(op) else op)
        return {name: str(getattr(tiled, f"tv_layout_{name}")) for name in "ABC"}

    return {name: Layout.parse(text) for name, text in trace(read).items()}


def copy_layouts(op, dtype) -> tuple[Layout, Layout]:
    """(source, destination) (thread, value) layouts of a copy atom, in bits of `dtype` elements."""

    def read():
        atom = cute.make_copy_atom(op() if callable(op) else op, dtype)
        return str(atom.layout_src_tv), str(atom.layout_dst_tv)

    source, destination = trace(read)
    return Layout.parse(source), Layout.parse(destination)


def composed(text: str) -> tuple[tuple[int, int, int], Layout]:
    """`S<3,4,3> o 0 o shape:stride` -> (swizzle, layout)."""
    match = re.fullmatch(r"S<(\d),(\d),(\d)> o 0 o (.*)", text)
    assert match, text
    return (int(match[1]), int(match[2]), int(match[3])), Layout.parse(match[4])


def wgmma_descriptors(dtype, kind, rows: int, depth: int, which: str):
    """Descriptors that the DSL builds for an operand tile, and the tile's shared-memory layout.

    Returns (steps, swizzle, layout): `steps` has the descriptor constant (start address 0, plus the advance)
    of each K step of a (rows, depth) tile of operand `which`, "a" or "b".
    """
    major = OperandMajorMode.K if kind.name.startswith("K") else OperandMajorMode.MN
    k_major = OperandMajorMode.K
    found = {}
    k_atom = warpgroup.SmemLayoutAtomKind.K_SW128

    def tile(atom_kind, extent, mode):
        atom = warpgroup.make_smem_layout_atom(atom_kind, dtype)
        return cute.tile_to_shape(atom, (extent, depth), order=(0, 1) if mode == k_major else (1, 0))

    @cute.kernel
    def kernel(out: cute.Tensor, la: cute.ComposedLayout, lb: cute.ComposedLayout, tiled: cute.TiledMma):
        smem = cutlass.memory.SmemAllocator()
        sA = smem.allocate_tensor(dtype, la.outer, byte_alignment=1024, swizzle=la.inner)
        sB = smem.allocate_tensor(dtype, lb.outer, byte_alignment=1024, swizzle=lb.inner)
        thread, _, _ = cute.arch.thread_idx()
        thr = tiled.get_slice(thread)
        tCrA = tiled.make_fragment_A(thr.partition_A(sA))
        tCrB = tiled.make_fragment_B(thr.partition_B(sB))
        acc = cute.make_rmem_tensor(thr.partition_shape_C(out.shape), cutlass.Float32)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            cute.gemm(tiled, acc, tCrA[None, None, k], tCrB[None, None, k], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.autovec_copy(acc, thr.partition_C(out))

    @cute.jit
    def host(out: cute.Tensor):
        a_major, b_major = (major, k_major) if which == "a" else (k_major, major)
        m, n = (rows, 8) if which == "a" else (64, rows)
        la = tile(kind if which == "a" else k_atom, m, a_major)
        lb = tile(kind if which == "b" else k_atom, n, b_major)
        found["layout"] = str(la if which == "a" else lb)
        tiled = hopper.make_trivial_tiled_mma(
            dtype, dtype, a_major, b_major, cutlass.Float32, (1, 1, 1), (64, n)
        )
        kernel(out, la, lb, tiled).launch(grid=(1, 1, 1), block=(128, 1, 1))

    shape = (rows, 8) if which == "a" else (64, rows)
    fake = cute.runtime.make_fake_compact_tensor(
        cutlass.Float32, shape, stride_order=(1, 0), assumed_align=16
    )
    constants = _descriptor_constants(ptx_of(host, fake), which)
    return constants, *composed(found["layout"])


def ptx_of(host, *arguments) -> str:
    """PTX of a host function's kernel."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(host, *arguments, options=f"{OPTIONS} --keep-ptx --dump-dir {folder}")
        return compiled.__ptx__


def _descriptor_constants(ptx: str, which: str) -> list[int]:
    """The constant part of the descriptor operand of each wgmma, in program order."""
    constants = {
        target: int(value) & 0xFFFFFFFFFFFFFFFF
        for target, value in re.findall(r"(?:or\.b64|add\.s64)\s+(%rd\d+), %rd\d+, (-?\d+);", ptx)
    }
    operands = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (%rd\d+), (%rd\d+), p", ptx)
    assert operands, "no wgmma in the PTX"
    return [constants[a if which == "a" else b] for a, b in operands]


def tma_descriptor(dtype, extents, box, swizzle, address, *, store=False, internal_type=None, strides=None):
    """The 16 words of the descriptor that the compiled host code builds for a dense tensor.

    `extents`, `box`: fastest dimension first; `swizzle`: bits of Swizzle<bits, 4, 3> or None; `strides`: in
    elements, None for compact.
    """

    @cute.kernel
    def kernel(atom: cute.CopyAtom):
        cpasync.prefetch_descriptor(atom)

    @cute.jit
    def host(tensor: cute.Tensor):
        layout = cute.make_layout(box)
        if cutlass.const_expr(swizzle is not None):
            layout = cute.make_composed_layout(cute.make_swizzle(swizzle, 4, 3), 0, layout)
        op = cpasync.CopyBulkTensorTileS2GOp() if store else cpasync.CopyBulkTensorTileG2SOp()
        atom, _ = cpasync.make_tiled_tma_atom(op, tensor, layout, box, internal_type=internal_type)
        kernel(atom).launch(grid=(1, 1, 1), block=(32, 1, 1))

    if strides is None:
        strides = tuple(int(np.prod(extents[:d], dtype=np.int64)) for d in range(len(extents)))
    fake = cute.runtime.make_fake_tensor(dtype, tuple(extents), tuple(strides), assumed_align=16)
    compiled = cute.compile(host, fake, options=OPTIONS)
    return capture_first_parameter(compiled, address, 128).view(np.uint64)


def capture_first_parameter(compiled, address: int, size: int) -> np.ndarray:
    """The first `size` bytes that a host function of one static tensor at `address` passes to its kernel."""
    engine = ExecutionEngine(compiled.ir_module, opt_level=0, shared_libs=[])
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    captured: list[np.ndarray] = []
    keep = []

    def register(name, fn, *arguments):
        keep.append(ctypes.CFUNCTYPE(integer, *arguments)(fn))
        engine.raw_register_runtime(name, ctypes.cast(keep[-1], pointer))

    def store_handle(out, *_):
        ctypes.cast(out, ctypes.POINTER(ctypes.c_uint64))[0] = 0x1234
        return 0

    def store_integer(out, *_):
        ctypes.cast(out, ctypes.POINTER(integer))[0] = 0
        return 0

    def launch(config, kernel, arguments):
        first = ctypes.cast(arguments, ctypes.POINTER(pointer))[0]
        captured.append(np.frombuffer(ctypes.string_at(first, size), dtype=np.uint8))
        return 0

    register("_cudaLibraryLoadData", store_handle, *[pointer] * 4, integer, pointer, pointer, integer)
    register("_cudaLibraryGetKernel", store_handle, pointer, pointer, pointer)
    register("_cudaLaunchKernelEx", launch, pointer, pointer, pointer)
    register("_cudaGetDevice", store_integer, pointer)
    register("_cudaDeviceGetAttribute", store_integer, pointer, integer, integer)
    register("_cuKernelGetAttribute", store_integer, pointer, integer, pointer, integer)
    register("_cudaFuncSetAttribute", lambda *_: 0, pointer, integer, integer)
    register("_cudaKernelSetAttributeForDevice", lambda *_: 0, pointer, integer, integer, integer)
    register(
        "_cudaOccupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 0, pointer, pointer, integer, pointer
    )
    register("_cudaLaunchKernel", lambda *_: 1, pointer, *[integer] * 6, pointer, pointer, pointer)
    function = ctypes.CFUNCTYPE(None, pointer)(engine.raw_lookup("_mlir_ciface_" + compiled.function_name))
    tensor = (ctypes.c_uint64 * 8)(address)
    result = integer(-1)
    slots = (pointer * 2)(ctypes.cast(tensor, pointer), ctypes.cast(ctypes.pointer(result), pointer))
    function(ctypes.cast(slots, pointer))
    assert result.value == 0
    assert captured, "the host function did not launch"
    return captured[0]
