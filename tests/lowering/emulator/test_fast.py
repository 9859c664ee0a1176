"""The compiled functions of the emulator agree with its NumPy code bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels_dsl
from lowering import emulator
from lowering.emulator import fast, ptx, shadow, stats
from lowering.emulator.semantics import numeric, tensor_core
from lowering.emulator.semantics.tensor_core import Accumulation

pytestmark = pytest.mark.skipif(fast.kernels() is None, reason="needs numba (the extra emulator-fast)")
INSTRUCTION = ptx.Instruction("ld", ("ld",), (), None, 1, (0, 0), "ld")
MODELS = [(dtype, model) for (kind, dtype), model in tensor_core.ACCUMULATION.items()] + [
    ("bf16", Accumulation(8, 24)),
    ("e5m2", Accumulation(16, 24)),
]  # several groups in one instruction


def patterns(rng, dtype, shape):
    """Any patterns at all: infinities, NaN, denormals, both zeros."""
    bits = tensor_core.OPERAND_BITS[dtype]
    out = rng.integers(0, 1 << bits, shape, dtype=np.uint64).astype(tensor_core.storage_type(dtype))
    out[rng.random(shape) < 0.2] = 0
    return out


def ordinary(rng, dtype, shape):
    """Finite values of many magnitudes, half of them in pairs that cancel."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)
    values[:, 1::2] = np.where(rng.random(values[:, 1::2].shape) < 0.5, -values[:, ::2], values[:, 1::2])
    values[rng.random(shape) < 0.1] *= 1e-30
    return numeric.encode(values.astype(np.float32), dtype, "rna" if dtype == "tf32" else "rn")


def addends(rng, shape, make):
    if make is patterns:
        return rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scale = 2.0 ** rng.integers(-149, 127, shape)
    return (rng.standard_normal(shape) * scale).astype(np.float32)


@pytest.mark.parametrize("make", [patterns, ordinary])
@pytest.mark.parametrize(("dtype", "model"), MODELS)
def test_tensor_core_sums(dtype, model, make, seed):
    rng = np.random.default_rng(seed)
    depth = 256 // tensor_core.OPERAND_BITS[dtype]
    for rows, columns in ((16, 8), (64, 24)):
        a, b = (tensor_core.operand_values(make(rng, dtype, (n, depth)), dtype) for n in (rows, columns))
        a[0], b[0] = 0, -0.0
        for c in (None, addends(rng, (rows, columns), make), np.full((rows, columns), -0.0, np.float32)):
            got = tensor_core.multiply_add(a, b, c, "f32", accumulation=model)
            with fast.reference():
                expected = tensor_core.multiply_add(a, b, c, "f32", accumulation=model)
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def outcome(call, **settings):
    """Output, findings, counts by source line, and the whole timeline of a call."""
    with emulator.run(**settings) as session:
        out = call()
    lines = {line: dict(counts) for line, counts in session.stats.by_line.items()}
    return out, [str(r) for r in session.reports], lines, session.timeline.events


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_whole_kernels(arch):
    torch.manual_seed(0)
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(96, 64).bfloat16().t()
    c, d = torch.randn(136, 200).bfloat16(), torch.randn(72, 200).bfloat16().t()
    q, k, v = (torch.randn(1, 96, 1, 64).bfloat16() for _ in range(3))
    calls = (
        lambda: kernels_dsl.gemm(a, b),
        lambda: kernels_dsl.gemm(c, d),
        lambda: kernels_dsl.attention(q, k, v),
    )
    for call in calls:
        quick = outcome(call, arch=arch, seed=3)
        with fast.reference():
            reference = outcome(call, arch=arch, seed=3)
        assert torch.equal(reference[0], quick[0])
        assert reference[1:] == quick[1:]


def test_indices_out_of_bounds_are_left_to_numpy():
    shared = shadow.Shadow(64, shadow.Domain(4))
    for outside in (np.array([0, 64]), np.array([3, -65])):
        with pytest.raises(IndexError):
            shared.read(outside, 0, 1, np.zeros(5, np.int32), INSTRUCTION)
        with pytest.raises(IndexError):
            shared.write(outside, 0, 1, np.zeros(5, np.int32), True, INSTRUCTION)


def test_bank_conflicts_and_pieces(seed):
    rng = np.random.default_rng(seed)
    compiled = fast.kernels()
    for size in (1, 2, 4, 8, 16):
        for count in (1, 7, 32):
            offsets = rng.integers(0, 64, count) * size
            runs = [offsets, np.arange(count) * size, rng.permutation(count) * size + 48]
            for addresses in (np.asarray(r, np.int64) for r in runs):
                first, second = stats.Stats(), stats.Stats()
                first.shared_access(INSTRUCTION, addresses, size)
                quick = shadow.byte_index(addresses, size)
                with fast.reference():
                    second.shared_access(INSTRUCTION, addresses, size)
                    slow = shadow.byte_index(addresses, size)
                assert first.total == second.total
                bytes_of_slow = np.arange(4096)[slow]
                np.testing.assert_array_equal(np.sort(quick.bytes()), np.sort(bytes_of_slow))
            memory = rng.integers(0, 256, 4096).astype(np.uint8)
            expected = memory[offsets[:, None] + np.arange(size)]
            np.testing.assert_array_equal(compiled.rows(memory, offsets, size), expected)


def test_random_numbers_are_those_of_numpy(seed):
    from lowering.emulator.fast import chance

    mine, theirs, counts = (np.random.default_rng(seed + i) for i in (0, 0, 1))
    state, word, double = chance.source_of(mine)
    for i in range(2000):
        count = int(counts.integers(1, 200 if i % 5 else 1 << 32))
        assert chance.below(count, state, word) == theirs.integers(count)
        if i % 3 == 0:
            assert chance.fraction(state, double) == theirs.random()
        if i % 7 == 0:
            assert mine.integers(2, 200) == theirs.integers(2, 200)
    assert mine.bit_generator.state == theirs.bit_generator.state


def test_histories_are_kept_alike(seed):
    from lowering.emulator import history
    from lowering.emulator.fast import opcodes as o
    from lowering.emulator.fast import past

    class Warp:
        row, past = None, []

    rows, numbers = np.empty((o.PAST_ROOM, 2), np.int64), np.zeros(o.WARP_COLUMNS, np.int64)
    numbers[o.PAST_AT], numbers[o.BEGAN] = rows.__array_interface__["data"][0], -1
    steps = [ptx.Instruction("bar", ("bar",), (), None, i, (0, 0), "bar") for i in range(9)]
    for clock, step in enumerate(np.random.default_rng(seed).integers(len(steps), size=3 * o.PAST_ROOM)):
        history.remember(Warp, steps[step], clock)
        past.remember(numbers, step, clock)
    kept = [(steps[step], clock) for step, clock in rows[: numbers[o.PAST_USED]].tolist()]
    assert kept == [tuple(one) for one in Warp.past]
    assert 2 * history.HISTORY + 1 == o.PAST_ROOM
