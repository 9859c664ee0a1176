"""`mma.sync`, `ldmatrix`, `stmatrix`, `movmatrix`: fragments against what the CuTe DSL's atoms report."""

from __future__ import annotations

import dsl_oracle as oracle
import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass")

from cutlass.cute.nvgpu import warp  # noqa: E402

from lowering.emulator.semantics import ldmatrix, mma, numeric, tensor_core  # noqa: E402

OPS = {
    ("bf16", 16): lambda: warp.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (16, 8, 16)),
    ("f16", 8): lambda: warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float16, (16, 8, 8)),
    ("tf32", 8): lambda: warp.MmaTF32Op((16, 8, 8)),
    ("tf32", 4): lambda: warp.MmaTF32Op((16, 8, 4)),
    ("e4m3", 32): lambda: warp.MmaFP8Op(cutlass.Float8E4M3FN, cutlass.Float32, (16, 8, 32)),
    ("e5m2", 16): lambda: warp.MmaFP8Op(cutlass.Float8E5M2, cutlass.Float32, (16, 8, 16)),
}


def _offsets(layout: oracle.Layout) -> np.ndarray:
    threads, values = layout.mode(0), layout.mode(1)
    return threads(np.arange(threads.size))[:, None] + values(np.arange(values.size))[None, :]


@pytest.mark.parametrize(("name", "k"), OPS, ids=str)
def test_fragments(name, k):
    layouts = oracle.mma_layouts(OPS[name, k])
    bits = tensor_core.OPERAND_BITS[name]
    row, column = mma.a_coordinates(k, bits)
    np.testing.assert_array_equal(row + 16 * column, _offsets(layouts["A"]))
    k_index, n_index = mma.b_coordinates(k, bits)
    np.testing.assert_array_equal(n_index + 8 * k_index, _offsets(layouts["B"]))
    row, column = mma.accumulator_coordinates()
    np.testing.assert_array_equal(row + 16 * column, _offsets(layouts["C"]))


def _registers(matrix, coordinates):
    return np.ascontiguousarray(matrix[..., coordinates[0], coordinates[1]]).view(np.uint32)


@pytest.mark.parametrize(
    "opcode",
    [f"m16n8k{k}.row.col.f32.{name}.{name}.f32" for name, k in OPS]
    + ["m16n8k16.row.col.f16.f16.f16.f16", "m16n8k32.row.col.satfinite.s32.s8.u8.s32"],
)
def test_integer_products_are_exact(opcode, seed):
    rng = np.random.default_rng(seed)
    shape = mma.parse_opcode("mma.sync.aligned." + opcode)
    a = rng.integers(-8, 9, (3, 16, shape.k))
    b = rng.integers(0, 9, (3, shape.k, 8))
    c = rng.integers(-100, 100, (3, 16, 8))

    def patterns(values, name):
        if name in ("s8", "u8"):
            return values.astype(np.int8).view(np.uint8)
        return numeric.encode(values.astype(np.float32), name)

    bits = tensor_core.OPERAND_BITS[shape.a]
    kind = np.int32 if shape.d == "s32" else np.float32
    addend = tensor_core.accumulator_registers(
        c.astype(kind)[..., mma.accumulator_coordinates()[0], mma.accumulator_coordinates()[1]], shape.c
    )
    a_registers = _registers(patterns(a, shape.a), mma.a_coordinates(shape.k, bits))
    assert a_registers.shape == (3, 32, shape.a_registers)
    b_registers = _registers(patterns(b, shape.b), mma.b_coordinates(shape.k, bits))
    assert b_registers.shape == (3, 32, shape.b_registers)
    out = mma.multiply(shape, a_registers, b_registers, addend)
    assert out.shape == (3, 32, shape.accumulator_registers)
    rows, columns = mma.accumulator_coordinates()
    np.testing.assert_array_equal(
        tensor_core.accumulator_elements(out, shape.d), (a @ b + c)[..., rows, columns]
    )


def test_integer_accumulators_wrap_or_saturate():
    for suffix, expected in (("", -(2**31)), (".satfinite", 2**31 - 1)):
        shape = mma.parse_opcode(f"mma.sync.aligned.m16n8k32.row.col{suffix}.s32.s8.s8.s32")
        a = np.zeros((32, 4), np.uint32)
        a[0, 0] = 1  # A[0, 0] = 1
        b = np.zeros((32, 2), np.uint32)
        b[0, 0] = 1  # B[0, 0] = 1
        c = np.full((32, 4), 2**31 - 1, np.uint32)
        out = mma.multiply(shape, a, b, c).view(np.int32)
        assert out[0, 0] == expected
        assert (out.ravel()[1:] == 2**31 - 1).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(transposed, count, seed):
    """The atom's layouts say which element of the rows each (lane, register element) gets."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 65536, (count, 8, 8)).astype(np.uint16)
    held = ldmatrix.distribute(rows, transposed).view(np.uint16)
    source, destination = oracle.copy_layouts(
        lambda: warp.LdMatrix8x8x16bOp(transposed, count), cutlass.Float16
    )
    _compare(rows, held, source, destination, count)
    np.testing.assert_array_equal(ldmatrix.collect(held.view(np.uint32), transposed), rows)
    source, destination = oracle.copy_layouts(
        lambda: warp.StMatrix8x8x16bOp(transposed, count), cutlass.Float16
    )
    _compare(rows, held, destination, source, count)


def _compare(rows, held, memory: oracle.Layout, registers: oracle.Layout, count: int) -> None:
    """Both layouts map (lane, value) to one index space: equal indices are the same element."""
    by_index = {}
    offsets = _offsets(memory)
    for lane in range(8 * count):
        for position in range(8):
            by_index[int(offsets[lane, position])] = rows[lane // 8, lane % 8, position]
    expected = np.vectorize(by_index.__getitem__)(_offsets(registers))
    np.testing.assert_array_equal(held, expected)


def test_row_addresses():
    lanes = np.arange(64).reshape(2, 32) * 16
    for count in (1, 2, 4):
        rows = ldmatrix.row_addresses(lanes, count)
        assert rows.shape == (2, count, 8)
        assert rows[1, count - 1, 7] == (32 + 8 * count - 1) * 16
    with pytest.raises(ValueError, match="count was 3"):
        ldmatrix.row_addresses(lanes, 3)


def test_movmatrix_transposes(seed):
    rng = np.random.default_rng(seed)
    registers = rng.integers(0, 2**32, (5, 32), dtype=np.uint32)
    moved = ldmatrix.movmatrix(registers)
    before = ldmatrix.collect(registers[..., None])[:, 0]
    after = ldmatrix.collect(moved[..., None])[:, 0]
    np.testing.assert_array_equal(after, before.transpose(0, 2, 1))


def test_opcodes_that_do_not_fit():
    for opcode in (
        "mma.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
    ):
        with pytest.raises(ValueError, match="opcode was"):
            mma.parse_opcode(opcode)
