"""fp8 attention on Ada without a GPU: the PTX of the SM80-class kernel for sm_89 runs in the emulator."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.config.attention_sm80 import Sm80AttentionConfig
from kernels_dsl.sparse.block_lists import BlockLists
from lowering import emulator
from reference.attention import Masking, allowed_by_lists
from tests.ops.attention.attention_fp8_cases import run, run_packed

ONE = torch.ones(1, 4, 1, 64).to(torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def _emulated():
    with emulator.run(arch="sm_89") as session:
        yield
    assert not session.reports


def test_heads_of_keys_and_uneven_dims(seed):
    """Two heads share one of keys; dims that are padded; the last keys are no whole vector."""
    run(((2, 40, 2, 48), (2, 137, 1, 48), (2, 137, 1, 112)), seed, Masking())


def test_causal_over_several_blocks(seed):
    shapes = ((1, 130, 1, 128), (1, 300, 1, 128), (1, 300, 1, 128))
    run(shapes, seed, Masking(right=0), causal=True, lse=False)


def test_window_softcap_and_sinks_with_descales_of_blocks(seed):
    sinks = torch.tensor([-1.0, 3.0])
    masking = Masking(left=200, right=9, softcap=3.0, sinks=sinks)
    shapes = ((1, 40, 2, 64), (1, 300, 2, 64), (1, 300, 2, 64))
    run(shapes, seed, masking, by_block="kv", softcap=3.0, window=(200, 9), sinks=sinks)


def test_packed_with_lists(seed):
    """Lists of each sequence's own, unsorted, with blocks past the keys; NaN behind what counts."""
    q_lens, k_lens, block = (70, 1, 0, 65), (150, 5, 3, 130), (64, 64)
    counts = torch.tensor([[3, 1], [2, 0], [0, 0], [2, 1]]).int()[:, None]
    indices = torch.tensor([[2, 0, 1], [1, -9, 99]]).int()[None, None].repeat(4, 1, 1, 1)
    lists = BlockLists(counts, indices, block=block)
    allowed = allowed_by_lists(lists.tensors, block, (4, 1, 128, 192))
    maskings = [
        Masking(right=20, allowed=allowed[n : n + 1, :, :i, :j])
        for n, (i, j) in enumerate(zip(q_lens, k_lens))
    ]
    run_packed(q_lens, k_lens, 13, seed, maskings=maskings, window=(None, 20), blocks=lists)


GOOD = {"tile_m": 128, "tile_n": 64, "dim": 64, "dim_v": 64, "element_bytes": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"element_bytes": 2}, "element_bytes is 2, must be 1 for these operands"),
        ({"tile_n": 32}, "tile_n is 32, must be 64 or 128 with fp8"),
        ({"dim": 96}, "a head dimension of a tile is 96, must be a multiple of 64 up to 256"),
        ({"lazy_rescale": True}, "lazy_rescale is True, must be False"),
        ({"dim": 256, "dim_v": 256, "warps": 8}, "it takes 131072 bytes of shared memory"),
    ],
)
def test_configurations_that_do_not_fit_are_named(change, message):
    reason = kernels_dsl.attention_fp8_supports(
        ONE, ONE, ONE, config=Sm80AttentionConfig(**{**GOOD, **change})
    )
    assert reason is not None and message in reason


def test_families():
    assert kernels_dsl.attention_fp8_supports(ONE, ONE, ONE, config=Sm80AttentionConfig(**GOOD)) is None
    hopper = Sm90AttentionConfig(128, 128, 64, 64)
    assert "family is 'sm90', must be one of" in kernels_dsl.attention_fp8_supports(
        ONE, ONE, ONE, config=hopper
    )
    with emulator.run(arch="sm_120a"):
        assert kernels_dsl.attention_fp8_supports(ONE, ONE, ONE) is None
