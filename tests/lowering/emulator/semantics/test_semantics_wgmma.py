"""WGMMA: fragments and operand addresses against what the CuTe DSL reports, products against float64."""

from __future__ import annotations

import dsl_oracle as oracle
import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass")

from cutlass.cute.nvgpu import OperandMajorMode, warpgroup  # noqa: E402

from lowering.emulator.semantics import numeric, tensor_core, wgmma  # noqa: E402
from lowering.emulator.semantics.swizzle import Swizzle, swizzle  # noqa: E402

Kind = warpgroup.SmemLayoutAtomKind
K_MAJOR = OperandMajorMode.K
TYPES = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
}


def _coordinates(layout: oracle.Layout, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(thread, value) -> (row, column) of a layout with column-major offsets in a tile of `rows` rows."""
    threads, values = layout.mode(0), layout.mode(1)
    offsets = threads(np.arange(threads.size))[:, None] + values(np.arange(values.size))[None, :]
    return offsets % rows, offsets // rows


def _atom(dtype, n, source=warpgroup.OperandSource.SMEM, accumulator=None):
    accumulator = accumulator or cutlass.Float32
    if dtype is cutlass.Float8E4M3FN:
        return warpgroup.MmaF8Op(dtype, dtype, accumulator, (64, n, 32), source, K_MAJOR, K_MAJOR)
    return warpgroup.MmaF16BF16Op(dtype, accumulator, (64, n, 16), source, K_MAJOR, K_MAJOR)


@pytest.mark.parametrize("n", [8, 64, 256])
def test_accumulator_fragment(n):
    layout = oracle.mma_layouts(lambda: _atom(cutlass.BFloat16, n))["C"]
    rows, columns = _coordinates(layout, 64)
    ours = wgmma.accumulator_coordinates(n)
    np.testing.assert_array_equal(ours[0], rows)
    np.testing.assert_array_equal(ours[1], columns)


@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_a_register_fragment(name):
    layouts = oracle.mma_layouts(lambda: _atom(TYPES[name], 64, warpgroup.OperandSource.RMEM))
    rows, columns = _coordinates(layouts["A"], 64)
    ours = wgmma.a_coordinates(tensor_core.OPERAND_BITS[name])
    np.testing.assert_array_equal(ours[0], rows)
    np.testing.assert_array_equal(ours[1], columns)


K_KINDS = [Kind.K_INTER, Kind.K_SW32, Kind.K_SW64, Kind.K_SW128]
MN_KINDS = [Kind.MN_INTER, Kind.MN_SW32, Kind.MN_SW64, Kind.MN_SW128]
CASES = [("bf16", kind) for kind in K_KINDS + MN_KINDS] + [
    (name, kind) for name in ("e4m3",) for kind in (Kind.K_INTER, Kind.K_SW64, Kind.K_SW128)
]


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize(("name", "kind"), CASES, ids=[f"{n}-{k.name}" for n, k in CASES])
def test_operand_addresses(name, kind, which):
    """Each element of each K step lies where the DSL's shared-memory layout puts it."""
    bits = tensor_core.OPERAND_BITS[name]
    rows, step, depth = (64 if which == "a" else 128), 256 // bits, 1024 // bits
    constants, pattern, layout = oracle.wgmma_descriptors(TYPES[name], kind, rows, depth, which)
    assert len(constants) == depth // step
    for index, constant in enumerate(constants):
        descriptor = wgmma.decode_descriptor(constant)
        assert descriptor.swizzle.span == 16 << pattern[0]
        ours = wgmma.operand_addresses(descriptor, rows, bits // 8, kind.name.startswith("MN"))
        row, k = np.meshgrid(np.arange(rows), index * step + np.arange(step), indexing="ij")
        offset = (layout.mode(0)(row) + layout.mode(1)(k)) * (bits // 8)
        np.testing.assert_array_equal(ours, oracle.cute_swizzle(offset, *pattern))


def test_read_operand_takes_what_the_addresses_say(seed):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, 8192, dtype=np.uint8)
    descriptor = wgmma.MatrixDescriptor(1024, 16, 1024, 0, Swizzle.B128)
    read = wgmma.read_operand(shared, descriptor, 32, "bf16")
    for row, k in ((0, 0), (1, 3), (9, 15), (31, 8)):
        at = swizzle(1024 + (row // 8) * 1024 + (row % 8) * 128 + 2 * k, Swizzle.B128)
        assert read[row, k] == int(shared[at]) | int(shared[at + 1]) << 8
    with pytest.raises(wgmma.MatrixDescriptorError, match="reaches shared address"):
        wgmma.read_operand(shared[:4096], descriptor, 64, "bf16")


def test_descriptor_errors():
    with pytest.raises(wgmma.MatrixDescriptorError, match="must be zero"):
        wgmma.decode_descriptor(1 << 14)
    with pytest.raises(wgmma.MatrixDescriptorError, match="base offset 3"):
        wgmma.decode_descriptor(3 << 49)
    with pytest.raises(wgmma.MatrixDescriptorError, match="16-bit"):
        wgmma.operand_addresses(wgmma.decode_descriptor(0), 64, 1, transposed=True)
    with pytest.raises(ValueError, match="k16 does not go with e4m3"):
        wgmma.parse_opcode("wgmma.mma_async.sync.aligned.m64n128k16.f32.e4m3.e4m3")


def _integers(rng, rows, k, name):
    """Small integers as element patterns, and their values."""
    values = rng.integers(-8 if name != "u8" else 0, 9, (rows, k))
    if name in ("s8", "u8"):
        return values.astype(np.int8).view(np.uint8), values
    return numeric.encode(values.astype(np.float32), name), values


@pytest.mark.parametrize("name", ["bf16", "f16", "tf32", "e4m3", "e5m2", "s8"])
@pytest.mark.parametrize("negate", [False, True])
def test_integer_products_are_exact(name, negate, seed):
    rng = np.random.default_rng(seed)
    k = 256 // tensor_core.OPERAND_BITS[name]
    kind = "s32" if name == "s8" else "f32"
    shape = wgmma.parse_opcode(f"wgmma.mma_async.sync.aligned.m64n24k{k}.{kind}.{name}.{name}")
    a, a_values = _integers(rng, 64, k, name)
    b, b_values = _integers(rng, 24, k, name)
    d_values = rng.integers(-1000, 1000, (64, 24))
    d = wgmma.matrix_to_accumulator(d_values.astype(np.int32 if kind == "s32" else np.float32), shape)
    out = wgmma.accumulator_to_matrix(wgmma.multiply(shape, a, b, d, negate_a=negate), shape)
    product = a_values @ b_values.T
    np.testing.assert_array_equal(out, d_values + (-product if negate else product))
    out = wgmma.accumulator_to_matrix(wgmma.multiply(shape, a, b, None, negate_a=negate), shape)
    np.testing.assert_array_equal(out, -product if negate else product)


@pytest.mark.parametrize("accumulator", ["f32", "f16"])
def test_random_products_are_within_the_bits_that_are_kept(accumulator, seed):
    rng = np.random.default_rng(seed)
    shape = wgmma.parse_opcode(f"wgmma.mma_async.sync.aligned.m64n64k16.{accumulator}.f16.f16")
    a, b = (numeric.f32_to_f16(rng.standard_normal((64, 16)).astype(np.float32)) for _ in range(2))
    d = numeric.f16_to_f32(numeric.f32_to_f16(rng.standard_normal((64, 64)).astype(np.float32)))
    out = wgmma.multiply(shape, a, b, wgmma.matrix_to_accumulator(d, shape))
    exact = d.astype(np.float64) + numeric.f16_to_f32(a).astype(np.float64) @ numeric.f16_to_f32(b).T
    error = np.abs(wgmma.accumulator_to_matrix(out, shape) - exact)
    # 17 terms are each cut at 2^-25 of the largest; the sum is cut to 24 bits, or rounded to 11.
    a_values, b_values = (np.abs(numeric.f16_to_f32(x).astype(np.float64)) for x in (a, b))
    terms = np.maximum((a_values[:, None] * b_values[None]).max(axis=-1) * 2, np.abs(d))
    rounding = np.abs(exact) * 2.0 ** (-23 if accumulator == "f32" else -11)
    assert (error <= rounding + 17 * 2.0**-25 * terms * 2).all()


def test_a_from_registers_round_trip(seed):
    rng = np.random.default_rng(seed)
    for name in ("bf16", "e4m3", "tf32"):
        registers = rng.integers(0, 2**32, (128, 4), dtype=np.uint32)
        matrix = wgmma.a_from_registers(registers, name)
        rows, columns = wgmma.a_coordinates(tensor_core.OPERAND_BITS[name])
        assert len(set(zip(rows.ravel().tolist(), columns.ravel().tolist(), strict=True))) == matrix.size
        np.testing.assert_array_equal(np.ascontiguousarray(matrix[rows, columns]).view(np.uint32), registers)
