"""Classes that moved are found under the modules that older pickles name."""

from __future__ import annotations

import pickle

import pytest
import torch

from kernels_dsl.nn.bsr_linear import BsrLinear
from kernels_dsl.nn.scaled_linear import ScaledLinear
from kernels_dsl.sparse.attention_blocks import causal_blocks
from kernels_dsl.sparse.tensor import BsrTensor

EARLIER = {
    "kernels_dsl.nn.bsr_linear": "kernels_dsl.ops.bsr.linear",
    "kernels_dsl.nn.scaled_linear": "kernels_dsl.ops.scaled.linear",
    "kernels_dsl.sparse.block_lists": "kernels_dsl.sparse.attention_blocks",
    "kernels_dsl.sparse.tensor": "kernels_dsl.ops.bsr.tensor",
}


def _values():
    matrix = BsrTensor.top_k(torch.ones(64, 64, dtype=torch.bfloat16), (16, 16), 2)
    return [causal_blocks(256, 256, device="cpu"), matrix, BsrLinear(matrix), ScaledLinear(64, 32)]


@pytest.mark.parametrize("value", _values(), ids=lambda value: type(value).__name__)
def test_an_older_pickle_is_read(value):
    kind = type(value)
    now = f"c{kind.__module__}\n{kind.__name__}\n".encode()
    written = pickle.dumps(value, protocol=2)  # which writes the names of classes as they are
    assert now in written
    older = written.replace(now, f"c{EARLIER[kind.__module__]}\n{kind.__name__}\n".encode())
    read = pickle.loads(older)
    assert type(read) is kind
    tensors = value.state_dict() if isinstance(value, torch.nn.Module) else vars(value)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(getattr(read, name), tensor)
