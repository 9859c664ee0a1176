"""TMA: descriptors as the compiled host code encodes them; boxes against a naive copy and DSL layouts."""

from __future__ import annotations

import dsl_oracle as oracle
import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass")

from lowering.emulator.semantics import numeric, tma  # noqa: E402
from lowering.emulator.semantics.swizzle import Swizzle  # noqa: E402

ADDRESS = 0x7F00_0010_0040 & ~0xF
MODES = {None: Swizzle.NONE, 1: Swizzle.B32, 2: Swizzle.B64, 3: Swizzle.B128}
TYPES = [
    (cutlass.Uint8, tma.ElementType.U8), (cutlass.Float8E4M3FN, tma.ElementType.U8),
    (cutlass.Int16, tma.ElementType.U16), (cutlass.Float16, tma.ElementType.F16),
    (cutlass.BFloat16, tma.ElementType.BF16), (cutlass.Int32, tma.ElementType.U32),
    (cutlass.Float32, tma.ElementType.F32), (cutlass.TFloat32, tma.ElementType.TF32),
    (cutlass.Int64, tma.ElementType.U64), (cutlass.Float64, tma.ElementType.F64),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "element"), TYPES, ids=[t.__name__ for t, _ in TYPES])
def test_element_type(dtype, element):
    tensor = tma.decode_descriptor(oracle.tma_descriptor(dtype, (1024, 512), (16, 8), None, ADDRESS))
    assert tensor.element == element
    assert tensor.strides == (element.bytes, 1024 * element.bytes)
    assert (tensor.extents, tensor.box, tensor.address) == ((1024, 512), (16, 8), ADDRESS)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("store", [False, True])
def test_rank_extents_strides_box(rank, store):
    extents, box = (1000, 48, 56, 64, 72)[:rank], (64, 3, 5, 7, 9)[:rank]
    words = oracle.tma_descriptor(cutlass.Float16, extents, box, None, ADDRESS, store=store)
    tensor = tma.decode_descriptor(words)
    assert tensor.rank == rank
    assert (tensor.extents, tensor.box) == (extents, box)
    assert tensor.strides == tuple(2 * int(np.prod(extents[:d])) for d in range(rank))
    assert tensor.element_strides == (1,) * rank
    assert not tensor.nan_fill
    assert tensor.transaction_bytes == 2 * int(np.prod(box))


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_swizzle_mode(bits):
    box = (8 << bits, 8)
    tensor = tma.decode_descriptor(oracle.tma_descriptor(cutlass.Float16, (1024, 512), box, bits, ADDRESS))
    assert tensor.swizzle == MODES[bits]
    assert tensor.box == box


def test_large_strides_and_extents():
    """Strides over 2^32 * 16 bytes use the extra four bits; extents the full 32."""
    row = (1 << 40) + 4096
    tensor = tma.decode_descriptor(
        oracle.tma_descriptor(cutlass.Uint8, (1 << 30, 7), (64, 7), None, ADDRESS, strides=(1, row))
    )
    assert tensor.strides == (1, row & ((1 << 40) - 1))
    row = (1 << 39) + 4096
    tensor = tma.decode_descriptor(
        oracle.tma_descriptor(cutlass.Uint8, (1 << 30, 7), (64, 7), None, ADDRESS, strides=(1, row))
    )
    assert tensor.strides == (1, row)
    assert tensor.extents == (1 << 30, 7)


def _words(**fields) -> np.ndarray:
    """A good descriptor of a (64, 32) f16 tensor with some words changed."""
    words = _good_words()
    for name, value in fields.items():
        words[int(name[1:])] = value
    return words


def _good_words() -> np.ndarray:
    """Words of a (64, 32) f16 tensor, box (32, 8), swizzle 64B, as the DSL's host code wrote them."""
    words = np.zeros(16, np.uint64)
    words[:8] = [0x7F0000100000, 0x0000000800044312, 0, 0, 0x0000001F0000003F, 0, 0x1F00000000000000, 7]
    return words


def test_unknown_bits_are_errors():
    assert tma.decode_descriptor(_words()).swizzle == Swizzle.B64
    flags = 0x0000000800044312
    for name, value, message in (
        ("w0", 0x7F0000100001, "bits 0x1 have no known"),
        ("w1", flags | 1 << 22, "bits 0x400000 have no known"),
        ("w1", flags & ~2, "not a tensor map"),
        ("w1", flags | 1 << 11, "interleaved"),
        ("w1", flags | 0x70, "rank 8"),
        ("w1", flags | 0x780, "element type 15"),
        ("w3", 1 << 48, "no known"),
        ("w6", 1 << 47, "no known"),
        ("w7", 1 << 32, "no known"),
    ):
        with pytest.raises(tma.TensorMapError, match=message):
            tma.decode_descriptor(_words(**{name: value}))
    with pytest.raises(tma.TensorMapError, match="128 bytes"):
        tma.decode_descriptor(b"\0" * 32)


def test_padding_is_not_looked_at():
    words = _words()
    words[8:] = 0xDEADBEEF
    assert tma.decode_descriptor(words) == tma.decode_descriptor(_words())


def _naive(tensor: tma.TensorMap, coords, base: int):
    """(global address, shared address, valid) of each element, one at a time."""
    for position in np.ndindex(*reversed(tensor.box)):
        index = position[::-1]
        at = [c + i for c, i in zip(coords, index, strict=True)]
        valid = all(0 <= x < e for x, e in zip(at, tensor.extents, strict=True))
        address = tensor.address + sum(x * s for x, s in zip(at, tensor.strides, strict=True))
        row = 0
        for d in reversed(range(1, tensor.rank)):
            row = row * tensor.box[d] + index[d]
        shared = base + row * tensor.row_pitch + index[0] * tensor.element.bytes
        bits = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 2, Swizzle.B128: 3}[tensor.swizzle]
        yield address, oracle.cute_swizzle(shared, bits, 4, 3), valid


@pytest.mark.parametrize("mode", list(Swizzle))
@pytest.mark.parametrize("coords", [(0, 0, 0), (-8, 2, 1), (40, -3, 2), (96, 6, 2), (8, 20, 0)])
def test_box_map_against_naive(mode, coords):
    tensor = tma.TensorMap(
        address=1 << 20, element=tma.ElementType.BF16, extents=(100, 7, 3), strides=(2, 208, 1600),
        box=(16, 5, 2), element_strides=(1, 1, 1), swizzle=mode, l2_promotion=0, nan_fill=False,
    )  # fmt: skip
    found = tma.box_map(tensor, coords, 1152)
    expected = list(_naive(tensor, coords, 1152))
    assert found.transaction_bytes == 320
    np.testing.assert_array_equal(found.valid, [v for _, _, v in expected])
    np.testing.assert_array_equal(found.shared_address, [s for _, s, _ in expected])
    np.testing.assert_array_equal(found.global_address, [g for g, _, _ in expected])


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_box_lies_where_the_layout_says(bits):
    """The box of a K-major tile of 16 rows is the swizzled layout that the descriptor was made from."""
    inner = 8 << bits
    words = oracle.tma_descriptor(cutlass.Float16, (1024, 512), (inner, 16), bits, ADDRESS)
    found = tma.box_map(tma.decode_descriptor(words), (0, 0), 2048)
    k, row = np.meshgrid(np.arange(inner), np.arange(16), indexing="xy")
    expected = oracle.cute_swizzle(2048 + 2 * (k + inner * row), bits, 4, 3)
    np.testing.assert_array_equal(found.shared_address, expected.reshape(-1))


def test_element_strides():
    """A stride of 2 along dimension 1 moves every other row; dimension 0 has none in this layout."""
    tensor = tma.TensorMap(
        address=0, element=tma.ElementType.U8, extents=(64, 9), strides=(1, 64), box=(16, 5),
        element_strides=(1, 2), swizzle=Swizzle.NONE, l2_promotion=0, nan_fill=False,
    )  # fmt: skip
    found = tma.box_map(tensor, (0, 5), 0)
    assert found.transaction_bytes == 48
    np.testing.assert_array_equal(found.global_address[::16], [5 * 64, 7 * 64, 9 * 64])
    np.testing.assert_array_equal(found.valid[::16], [True, True, False])


def test_box_errors():
    tensor = tma.decode_descriptor(_words())
    with pytest.raises(tma.TensorMapError, match="got 3 coordinates"):
        tma.box_map(tensor, (0, 0, 0), 0)
    with pytest.raises(tma.TensorMapError, match="128-byte aligned"):
        tma.box_map(tensor, (0, 0), 64)
    for start in (-4, 4, 12):
        with pytest.raises(tma.TensorMapError, match=f"element {start}, {2 * start} bytes into its row"):
            tma.box_map(tensor, (start, 0), 0)


def test_a_store_is_cut_at_16_bytes_and_must_not_start_before_the_tensor():
    tensor = tma.TensorMap(
        address=0, element=tma.ElementType.BF16, extents=(100, 30), strides=(2, 208), box=(64, 16),
        element_strides=(1, 1), swizzle=Swizzle.NONE, l2_promotion=0, nan_fill=False,
    )  # fmt: skip
    loaded = tma.box_map(tensor, (64, 20), 0).valid.reshape(16, 64)
    stored = tma.box_map(tensor, (64, 20), 0, store=True).valid.reshape(16, 64)
    assert loaded[:10].all(axis=0).sum() == 36 and stored[:10].all(axis=0).sum() == 40
    assert not loaded[10:].any() and not stored[10:].any()
    for coords in ((-8, 3), (8, -3)):
        tma.box_map(tensor, coords, 0)
        with pytest.raises(tma.TensorMapError, match="must not be negative"):
            tma.box_map(tensor, coords, 0, store=True)


def test_maps_that_the_hardware_refuses():
    with pytest.raises(tma.TensorMapError, match="over the 64 bytes"):
        tma.decode_descriptor(_words(w6=0x3F << 56))
    with pytest.raises(tma.TensorMapError, match="62 bytes is not a multiple of 16"):
        tma.decode_descriptor(_words(w6=0x1E << 56))
    nan_fill, int32 = 1 << 15, 0x0000000800044012 | 3 << 7
    assert tma.decode_descriptor(_words(w1=0x0000000800044312 | nan_fill)).nan_fill
    assert not tma.decode_descriptor(_words(w1=int32, w6=0x0F << 56)).nan_fill
    with pytest.raises(tma.TensorMapError, match="NaN fill of S32"):
        tma.decode_descriptor(_words(w1=int32 | nan_fill, w6=0x0F << 56))


def test_fill_and_conversion(seed):
    flags = 0x0000000800044312
    assert tma.fill_value(tma.decode_descriptor(_words())) == 0
    assert tma.fill_value(tma.decode_descriptor(_words(w1=flags | 1 << 15))) == 0x7FFF
    rounding = (flags & ~0x780) | 7 << 7 | 1 << 16
    tensor = tma.decode_descriptor(_words(w1=rounding, w6=0x0F << 56))
    assert tensor.element == tma.ElementType.TF32
    bits = np.random.default_rng(seed).integers(0, 2**32, 10000, dtype=np.uint32)
    bits = bits[np.isfinite(bits.view(np.float32))]
    expected = numeric.f32_to_tf32(bits.view(np.float32), "rn")
    np.testing.assert_array_equal(tma.convert_on_load(tensor, bits), expected)
    # Ties, overflow, NaNs and subnormals as an H200 loaded them.
    hardware = {
        0x3F800FFF: 0x3F800000, 0x3F801000: 0x3F800000, 0x3F801001: 0x3F802000, 0x3F803000: 0x3F804000,
        0xBF801000: 0xBF800000, 0xBF803000: 0xBF804000, 0x7F7FF000: 0x7F800000, 0x7F800000: 0x7F800000,
        0xFF800000: 0xFF800000, 0x7FC00000: 0x7FFFE000, 0x7F800001: 0x7FFFE000, 0x7FFFFFFF: 0x7FFFE000,
        0x00000001: 0x00000000, 0x00001000: 0x00000000, 0x807FFFFF: 0x80800000,
    }  # fmt: skip
    loaded, kept = (np.array(list(x), dtype=np.uint32) for x in (hardware, hardware.values()))
    np.testing.assert_array_equal(tma.convert_on_load(tensor, loaded), kept)


@pytest.mark.parametrize("operation", ["add", "min", "max", "inc", "dec", "and", "or", "xor"])
def test_integer_reductions(operation, seed):
    rng = np.random.default_rng(seed)
    old, new = (rng.integers(0, 8, 64, dtype=np.uint32) - np.uint32(2) for _ in range(2))
    got = tma.reduce_elements(operation, tma.ElementType.U32, old, new)
    rule = {
        "add": lambda a, b: (a + b) & 0xFFFFFFFF, "min": min, "max": max,
        "inc": lambda a, b: 0 if a >= b else a + 1, "dec": lambda a, b: b if a == 0 or a > b else a - 1,
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    }[operation]  # fmt: skip
    np.testing.assert_array_equal(got, [rule(int(a), int(b)) for a, b in zip(old, new, strict=True)])


def test_signed_and_floating_reductions(seed):
    rng = np.random.default_rng(seed)
    old, new = (rng.integers(-9, 9, 64, dtype=np.int32) for _ in range(2))
    got = tma.reduce_elements("min", tma.ElementType.S32, old.view(np.uint32), new.view(np.uint32))
    np.testing.assert_array_equal(got.view(np.int32), np.minimum(old, new))
    a, b = (rng.standard_normal(4096).astype(np.float32) for _ in range(2))
    got = tma.reduce_elements("add", tma.ElementType.F32, a.view(np.uint32), b.view(np.uint32))
    np.testing.assert_array_equal(got.view(np.float32), a + b)
    x, y = numeric.f32_to_bf16(a), numeric.f32_to_bf16(b)
    exact = numeric.bf16_to_f32(x).astype(np.float64) + numeric.bf16_to_f32(y)
    got = tma.reduce_elements("add", tma.ElementType.BF16, x, y)
    np.testing.assert_array_equal(got, numeric.encode(exact, "bf16"))
    got = tma.reduce_elements("max", tma.ElementType.BF16, x, y)
    expected = np.maximum(numeric.bf16_to_f32(x), numeric.bf16_to_f32(y))
    np.testing.assert_array_equal(numeric.bf16_to_f32(got), expected)
    for operation, element in (
        ("xor", tma.ElementType.F16),
        ("inc", tma.ElementType.S32),
        ("add", tma.ElementType.U8),
    ):
        bits = np.zeros(4, tma.storage_type(element))
        with pytest.raises(tma.TensorMapError, match="does not exist"):
            tma.reduce_elements(operation, element, bits, bits)
