"""The kernels that make block lists, in the emulator, against the same lists made by torch operations."""

from __future__ import annotations

import pytest
import torch

from kernels_dsl.config import lists as config
from kernels_dsl.sparse import attention_blocks as builders
from lowering import emulator


@pytest.fixture
def by_kernel(monkeypatch):
    """`made(build)`: what `build` makes by torch, and by the emulated kernels."""

    def made(build):
        expected = build()
        with emulator.run(arch="sm_90a") as session, monkeypatch.context() as patch:
            patch.setattr(builders, "runs_kernels", lambda device: True)
            found = build()
        assert len(session.launches) == 1
        return expected, found

    return made


def _same(expected, found) -> None:
    """Equal counts, and equal entries up to them."""
    assert found.block == expected.block
    for counts, indices, a, b in zip(
        expected.tensors[::2], expected.tensors[1::2], found.tensors[::2], found.tensors[1::2]
    ):
        if counts is None:
            assert a is None and b is None
            continue
        assert torch.equal(counts, a) and indices.shape == b.shape
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[listed], b[listed])


@pytest.mark.parametrize(
    ("window", "lengths"),
    [((None, 0), (300, 430)), ((100, 0), (430, 200)), ((64, 70), (300, 1000)), ((5, None), (200, 200)),
     ((None, None), (100, 300))],
)  # fmt: skip
def test_windows(window, lengths, by_kernel):
    for alignment in ("bottom_right", "top_left"):
        options = {"left": window[0], "right": window[1], "block": (128, 64), "alignment": alignment}
        _same(*by_kernel(lambda o=options: builders.window_blocks(*lengths, device="cpu", **o)))


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal, by_kernel):
    documents = torch.tensor([[0] * 100 + [1] * 29 + [5] * 1171, [2**40] * 1300])
    options = {"causal": causal, "block": (64, 128), "max_blocks": 4}
    _same(*by_kernel(lambda: builders.document_blocks(documents, **options)))


@pytest.mark.parametrize(
    ("columns", "k", "dtype"), [(7, 3, torch.float32), (100, 40, torch.bfloat16), (1100, 33, torch.float16)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_topk(columns, k, dtype, causal, seed, by_kernel):
    """Different scores, since torch is free to choose among equal ones: with infinities, NaN, rows that are
    nearly empty; strided. A row has a thread, a warp or a CTA."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(columns, generator=generator) - columns // 2 for _ in range(2 * 5 * 2)]
    scores = torch.stack(rows).view(2, 5, 2, columns).to(dtype).transpose(1, 2)
    scores[0, 0, 0] = -torch.inf
    scores[0, 0, 0, 2] = 1.0
    scores[0, 0, 1] = torch.nan
    scores[0, 0, 2, ::2] = torch.nan
    scores[0, 1, 0, 1] = torch.inf
    lengths = {"q_len": 5 * 64 - 3, "k_len": columns * 128}
    _same(*by_kernel(lambda: builders.topk_blocks(scores, k, causal=causal, block=(64, 128), **lengths)))


def test_equal_scores_take_the_first(by_kernel):
    """In a warp and over the warps of a CTA."""
    for columns in (70, 1100):
        scores = torch.zeros(1, 1, 1, columns)
        scores[..., 5::7] = 1.0
        k = len(range(5, columns, 7)) + 9
        _, found = by_kernel(lambda s=scores, k=k: builders.topk_blocks(s, k))
        ones = set(range(5, columns, 7))
        zeros = [i for i in range(columns) if i not in ones][:9]
        assert found.full_indices.flatten().tolist() == sorted([*ones, *zeros])


def test_rows_too_long_for_the_kernel():
    assert config.topk_spec(32 * 32 * 32, False, (1, 1)) is not None
    assert config.topk_spec(32 * 32 * 32 + 1, False, (1, 1)) is None
