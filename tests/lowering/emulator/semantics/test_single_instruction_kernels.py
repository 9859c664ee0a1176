"""The kernels of single instructions, run in the emulator, against expectations worked out apart from it."""

from __future__ import annotations

import dsl_oracle as oracle
import numpy as np
import pytest
import torch

cutlass = pytest.importorskip("cutlass")

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup  # noqa: E402

from lowering.emulator.crosscheck import cases, ops, runner  # noqa: E402

CASES = list(cases.all_cases())
VALUE_TYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "s8": torch.int8, "f32": torch.float32, "tf32": torch.float32, "u8": torch.uint8, "s32": torch.int32,
}  # fmt: skip


def _values(words: np.ndarray, kind: str) -> np.ndarray:
    return torch.from_numpy(words.copy()).view(VALUE_TYPES[kind]).double().numpy()


def _layout(kind: str, name: str, rows: int, depth: int):
    """(swizzle, layout) of an operand's tile, from the DSL."""
    dtype = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN,
             "e5m2": cutlass.Float8E5M2, "s8": cutlass.Int8}[kind]  # fmt: skip

    def read():
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind[name], dtype)
        major = OperandMajorMode.K if name[0] == "K" else OperandMajorMode.MN
        return str(
            cute.tile_to_shape(atom, (rows, depth), order=(0, 1) if major == OperandMajorMode.K else (1, 0))
        )

    return oracle.composed(oracle.trace(read))


def _matrix(image: np.ndarray, kind: str, name: str, rows: int, depth: int) -> np.ndarray:
    """The logical (rows, depth) matrix in an image of shared memory."""
    pattern, layout = _layout(kind, name, rows, depth)
    values = _values(image, kind)
    size = image.nbytes // values.size
    row, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    offset = (layout.mode(0)(row) + layout.mode(1)(k)) * size
    return values[oracle.cute_swizzle(offset, *pattern) // size]


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("wgmma")], ids=lambda c: c.name)
def test_wgmma(case):
    spec = case.constants["case"]
    a_image, b_image, _ = case.inputs()
    a = _matrix(a_image, spec.kinds[0], spec.layouts[0], 64, spec.depth)
    b = _matrix(b_image, spec.kinds[1], spec.layouts[1], spec.n, spec.depth)
    accumulator = spec.kinds[2]
    got = _values(runner.run_case(case, "cpu").view(np.int32), accumulator).reshape(64, spec.n)
    if "integers" in case.name or accumulator == "s32":
        np.testing.assert_array_equal(got, a @ b.T)
        return
    # The largest sum of magnitudes times the bits that the accumulation keeps: fp8 13 of them.
    scale = (np.abs(a) @ np.abs(b).T).max()
    bits = 9 if accumulator == "f16" else 11 if spec.kinds[0] in ("e4m3", "e5m2") else 20
    np.testing.assert_allclose(got, a @ b.T, rtol=0, atol=scale * 2.0**-bits)


def _tma_elements(spec: cases.TmaCase):
    """(element index in memory or None, element index in the shared image) of each element of the box."""
    size = spec.element_bytes
    extents = list(spec.extents)
    if spec.operation != "load":
        extents[0] = -(-extents[0] * size // 16) * 16 // size  # stores are cut at 16 bytes
    for row, position in enumerate(np.ndindex(*reversed(spec.box[1:]))):
        for x in range(spec.box[0]):
            at = [c + i for c, i in zip(spec.at, (x, *reversed(position)), strict=True)]
            inside = all(0 <= a < e for a, e in zip(at, extents, strict=True))
            source = sum(a * p for a, p in zip(at, spec.pitches, strict=True)) if inside else None
            offset = spec.offset + row * spec.row_pitch + x * size
            yield source, oracle.cute_swizzle(offset, spec.swizzle, 4, 3) // size


def _nearest_tf32(value: torch.Tensor) -> torch.Tensor:
    """float32 to the nearest with a 10-bit mantissa, ties to even."""
    bits = value.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def _reduce(operation: str, kind: str, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if operation == "store":
        return new
    if operation in ("and", "or", "xor"):
        return {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}[operation](
            old, new
        )
    if kind == "s32" and operation in ("min", "max"):
        # The DSL encodes int32 tensors as unsigned, and the reduction follows the descriptor.
        flip = -(2**31)
        function = torch.minimum if operation == "min" else torch.maximum
        return function(old + flip, new + flip) - flip
    return {"add": torch.add, "min": torch.minimum, "max": torch.maximum}[operation](old, new)


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("tma")], ids=lambda c: c.name)
def test_tma(case):
    spec = case.constants["case"]
    memory, image, _ = (torch.from_numpy(a).view(VALUE_TYPES[spec.kind]) for a in case.inputs())
    got = torch.from_numpy(runner.run_case(case, "cpu").view(np.int32).copy()).view(VALUE_TYPES[spec.kind])
    expected = (image if spec.operation == "load" else memory).clone()
    for source, shared in _tma_elements(spec):
        if spec.operation == "load":
            value = memory[source : source + 1] if source is not None else torch.zeros_like(memory[:1])
            expected[shared] = _nearest_tf32(value)[0] if spec.kind == "tf32" else value[0]
        elif source is not None:
            expected[source] = _reduce(spec.operation, spec.kind, memory[source], image[shared])
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("shared")], ids=lambda c: c.name)
def test_ldmatrix_and_stmatrix(case):
    image, offsets, held, _ = (a.view(np.uint32) for a in case.inputs())
    got = runner.run_case(case, "cpu")
    count, transposed = case.constants["count"], ".trans" in case.name
    halves = np.ascontiguousarray(image).view(np.uint16).reshape(len(image), -1).copy()
    registers = np.ascontiguousarray(held).view(np.uint16).reshape(len(held), 32, count, 2)
    loaded = np.zeros((len(image), 32, count, 2), np.uint16)
    for block in range(len(image)):
        for matrix in range(count):
            for lane in range(32):
                for half in range(2):
                    row, column = lane // 4, 2 * (lane % 4) + half
                    if transposed:
                        row, column = column, row
                    at = int(offsets[block, 8 * matrix + row, 0]) // 2 + column
                    loaded[block, lane, matrix, half] = halves[block, at]
                    if case.constants["store"]:
                        halves[block, at] = registers[block, lane, matrix, half]
    expected = halves if case.constants["store"] else loaded
    np.testing.assert_array_equal(got, expected.reshape(-1).view(np.uint32))


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith("mma")], ids=lambda c: c.name)
def test_mma_runs(case):
    """The products are tested at the level of the semantics; here: the kernel delivers all of them."""
    words = runner.run_case(case, "cpu")
    half = len(words) // 2
    assert np.count_nonzero(words[:half]) > half // 2
    assert np.count_nonzero(words[half:]) > half // 2


def _emulate(op: ops.Op, group: str) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    case = cases.elementwise_case(group, (op,))
    inputs = tuple(a.view(np.uint32) for a in case.inputs()[0])
    return inputs, runner.run_case(case, "cpu")


def _by_label(members, label):
    return next(op for op in members if op.label == label)


@pytest.mark.parametrize(
    ("label", "function"),
    [
        ("add.rn.f32", np.add), ("sub.rn.f32", np.subtract), ("mul.rn.f32", np.multiply),
        ("div.rn.f32", np.divide), ("fma.rn.f32", None), ("sqrt.rn.f32", lambda a, b: np.sqrt(a)),
    ],
)  # fmt: skip
def test_float_arithmetic(label, function):
    (a, b, c, _), got = _emulate(_by_label(ops.FLOAT, label), "float")
    x, y, z = (v.view(np.float32) for v in (a, b, c))
    with np.errstate(all="ignore"):
        if function is None:
            # Exact in long double only where the addend is near; the rest is tested with rationals elsewhere.
            wide = x.astype(np.longdouble) * y + z
            expected = wide.astype(np.float32)
            near = np.abs(wide - expected.astype(np.longdouble)) < np.spacing(np.abs(expected)) * 0.499
            keep = near | ~np.isfinite(expected) | (wide == expected)
        else:
            expected, keep = function(x, y), np.ones(x.size, bool)
    got = got.view(np.float32)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    assert same[keep].all()
    assert keep.mean() > 0.9


def test_packed_conversion_order():
    (a, b, _, _), got = _emulate(_by_label(ops.CONVERSIONS, "cvt.rn.bf16x2.f32"), "conversions")
    pair = torch.from_numpy(np.stack([b, a], 1).view(np.float32).copy()).to(torch.bfloat16)
    finite = ~torch.isnan(pair.float()).any(1).numpy()
    expected = pair.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(-1, 2)[finite], expected[finite])


def test_approximations_are_near():
    for label, function in (("ex2.approx.ftz.f32", np.exp2), ("rcp.approx.ftz.f32", lambda x: 1 / x)):
        (a, *_), got = _emulate(_by_label(ops.APPROXIMATE, label), "approximate")
        with np.errstate(all="ignore"):
            x = a.view(np.float32).astype(np.float64)
            expected = function(x)
        keep = (np.abs(expected) > 2.0**-125) & (np.abs(expected) < 2.0**126) & (np.abs(x) > 2.0**-125)
        np.testing.assert_allclose(got.view(np.float32)[keep], expected[keep], rtol=2.0**-22)


def test_integer_instructions():
    for label, function in (
        ("mul.hi.u32", lambda a, b, c: a * b >> 32), ("mad.lo.s32", lambda a, b, c: a * b + c),
        ("div.u32", lambda a, b, c: a // b), ("rem.u32", lambda a, b, c: a % b),
        ("popc.b32", lambda a, b, c: bin(a).count("1")), ("shl.b32", lambda a, b, c: a << min(b, 32)),
        ("bfe.u32", lambda a, b, c: (a >> (b & 255)) & ((1 << (c & 255)) - 1)),
        ("lop3.b32 0x96", lambda a, b, c: a ^ b ^ c),
    ):  # fmt: skip
        (a, b, c, _), got = _emulate(_by_label(ops.INTEGER, label), "integer")
        expected = [function(int(x), int(y), int(z)) & 0xFFFFFFFF for x, y, z in zip(a, b, c, strict=True)]
        np.testing.assert_array_equal(got, expected, err_msg=label)
