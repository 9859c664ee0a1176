"""Plans that are kept with matrices and layers between calls: copied, pickled, loaded and changed ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.ops.bsr import bsr as bsr_module
from kernels_dsl.ops.bsr.torch_matrices import from_torch
from kernels_dsl.sparse import pattern as pattern_module
from kernels_dsl.sparse.tensor import BsrTensor
from lowering import emulator, recording


def _matrix(columns: list[int], value: float = 1.0) -> BsrTensor:
    """Two block rows of three blocks each, of which one is kept."""
    values = torch.full((2, 16, 16), value).bfloat16()
    return BsrTensor(torch.tensor([0, 1, 2]), torch.tensor(columns), values, (32, 48))


def _used(matrix: BsrTensor) -> BsrTensor:
    """As after a call on a GPU: what is kept can neither be pickled nor belongs to another pattern."""
    matrix._kept["a call"] = lambda: None
    return matrix


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_keep_nothing_of_calls(again) -> None:
    matrix = _used(_matrix([2, 0])).t()
    made = again(matrix)
    assert made.transposed and torch.equal(made.to_dense(), matrix.to_dense())
    assert made._kept == {} and matrix._kept
    layer = BsrLinear(_matrix([2, 0]), torch.ones(32).bfloat16(), "relu")
    _used(layer.weight)
    other = again(layer)
    assert torch.equal(other.weight.to_dense(), layer.weight.to_dense()) and other.activation == "relu"
    assert other.weight._kept == {} and layer.weight._kept


def test_a_loaded_pattern_is_that_of_the_next_call() -> None:
    """And of this layer alone, even if several were made of one matrix."""
    matrix = _matrix([2, 0])
    layers = [BsrLinear(matrix), BsrLinear(matrix)]
    for layer in layers:
        _used(layer.weight)
    layers[0].load_state_dict(BsrLinear(_matrix([1, 1], 3.0)).state_dict())
    assert torch.equal(layers[0].weight.to_dense(), _matrix([1, 1], 3.0).to_dense())
    assert layers[0].weight._kept == {}
    assert torch.equal(layers[1].weight.to_dense(), matrix.to_dense()) and layers[1].weight._kept
    layers[1].col_indices.fill_(1)  # as a broadcast of buffers does
    assert layers[1].weight._kept == {} and layers[1].weight is layers[1].weight


def test_a_torch_matrix_that_was_changed_in_place() -> None:
    first, second = (_matrix(columns).to_torch() for columns in ([2, 0], [1, 1]))
    found = _used(from_torch(first))
    assert from_torch(first) is found
    first.copy_(second)
    now = from_torch(first)
    assert now._kept == {} and torch.equal(now.to_dense(), second.to_dense())
    assert from_torch(first) is now


def test_a_layer_under_autocast_and_its_refusals() -> None:
    layer = BsrLinear(_matrix([2, 0]))
    x = torch.ones(3, 48, requires_grad=True)
    with emulator.run(arch="sm_89"), torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, torch.full((3, 32), 16.0).bfloat16())
    for shape in ((4, 24), (0, 24), ()):
        with pytest.raises(ValueError, match=r"x has shape .* must end on in_features, 48"):
            layer(torch.ones(shape).bfloat16())


def test_patterns_are_kept_as_long_as_their_indices_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of many layers each is found; of patterns that come and go the last ones are kept."""
    kept = type(pattern_module._PATTERNS)()
    monkeypatch.setattr(pattern_module, "_PATTERNS", kept)
    monkeypatch.setattr(pattern_module, "_MAX_PATTERNS", 3)
    monkeypatch.setattr(pattern_module, "_MAX_LIVE_PATTERNS", 6)
    matrices = [_matrix([0, 1]) for _ in range(6)]
    find = lambda x: pattern_module.pattern_of(x.crow_indices, x.col_indices, 2, 3)  # noqa: E731
    found = [find(x) for x in matrices]
    assert [find(x) for x in matrices] == found
    for _ in range(5):
        find(_matrix([0, 1]))
    assert len(kept) == 6 and [find(x) for x in matrices[1:]] == found[1:] and find(matrices[0]) != found[0]


@pytest.mark.parametrize("arch", ("sm_90a", "sm_89"))
def test_lists_are_made_for_a_launch_alone(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """`bsr_supports` makes none: loading PyTorch's kernels for them takes 80 ms."""
    monkeypatch.setattr(pattern_module, "_PATTERNS", type(pattern_module._PATTERNS)())
    made = []
    by_row = pattern_module.Pattern.by_row.func
    monkeypatch.setattr(
        pattern_module.Pattern, "by_row", property(lambda self: made.append(1) or by_row(self))
    )
    matrix, b = _matrix([2, 0]), torch.ones(48, 32).bfloat16()
    with recording.record(arch) as recorded:
        assert bsr_module.bsr_supports(matrix, b) is None
        assert (made, len(recorded)) == ([], 0)
        bsr_module.bsr_gemm(matrix, b)
        assert (made, len(recorded)) == ([1], 1)
