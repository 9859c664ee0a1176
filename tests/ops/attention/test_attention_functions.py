"""Score and mask functions through torch.compile: names that say what a function does; emulated kernels."""

from __future__ import annotations

import pytest
import torch

import kernels_dsl
from kernels_dsl.ops.attention import functions
from kernels_dsl.ops.attention import register as attention_register  # noqa: F401  (defines the operator)
from kernels_dsl.sparse.attention_blocks import document_blocks, document_mask
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.attention_cases import check_close, inputs

SLOPE = 0.125


def _alibi(score, b, h, i, j):
    return score - (i - j) * SLOPE


def _every_third(b, h, i, j):
    return (i - j) % 3 == 0


def _every(step):
    def mask(b, h, i, j):
        return (i - j) % step == 0

    return mask


def _with_default(b, h, i, j, step=2):
    return (i - j) % step == 0


@pytest.fixture(autouse=True)
def _emulated():
    torch.compiler.reset()
    with emulator.run(arch="sm_90a", check=False):
        yield


def _tensors(seed, length=40):
    return inputs((1, length, 2, 64), (1, length, 1, 64), 64, seed)


def _compiled(function):
    """Compiled in one graph, and the list of its compiles."""
    compiles = []

    def backend(graph, example_inputs):
        compiles.append(graph)
        return graph.forward

    return torch.compile(function, fullgraph=True, backend=backend), compiles


def test_functions_in_one_graph(seed):
    tensors = _tensors(seed)

    def model(q, k, v):
        options = {"score_mod": _alibi, "mask_mod": _every_third}
        return kernels_dsl.attention(q, k, v, return_lse=True, **options)

    compiled, compiles = _compiled(model)
    check_close(compiled(*tensors), tensors, Masking(score_mod=_alibi, mask_mod=_every_third))
    compiled(*tensors)
    assert len(compiles) == 1  # tracing the kernel did not touch what torch.compile looks at


def test_lists_and_tensors_that_a_function_reads(seed):
    tensors = _tensors(seed, 130)
    documents = torch.tensor([[0] * 30 + [1] * 40 + [2] * 60], dtype=torch.int32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(q, k, v, documents):
        lists = document_blocks(documents, block=(64, 64))
        options = {"mask_mod": document_mask, "aux": (documents,), "causal": True, "return_lse": True}
        return kernels_dsl.attention(q, k, v, blocks=lists, **options)

    same = documents[0, :, None] == documents[0, None, :]
    check_close(model(*tensors, documents), tensors, Masking(right=0, allowed=same[None, None]))


def test_closures_are_told_apart(seed):
    tensors = _tensors(seed)
    compiled, _ = _compiled(lambda mask, *t: kernels_dsl.attention(*t, mask_mod=mask, return_lse=True))
    for step in (2, 5):
        mask = kernels_dsl.kernel_function(_every(step))
        check_close(compiled(mask, *tensors), tensors, Masking(mask_mod=_every(step)))
    eager = kernels_dsl.attention(*tensors, mask_mod=mask, return_lse=True)
    check_close(eager, tensors, Masking(mask_mod=_every(5)))


@pytest.mark.parametrize("mask", [_every(2), _with_default], ids=["closure", "default"])
def test_what_torch_compile_cannot_tell_apart_is_refused(mask, seed):
    compiled, _ = _compiled(lambda *t: kernels_dsl.attention(*t, mask_mod=mask))
    with pytest.raises(Exception, match=r"mask_mod closes over values or has defaults, must be passed"):
        compiled(*_tensors(seed))


def test_numbers_in_aux_are_refused(seed):
    compiled, _ = _compiled(lambda *t: kernels_dsl.attention(*t, mask_mod=_every_third, aux=(3,)))
    with pytest.raises(Exception, match=r"aux\[0\] is a int, must be a torch\.Tensor under torch\.compile"):
        compiled(*_tensors(seed))


def test_opcheck(seed):
    documents = torch.zeros(1, 10, dtype=torch.int32)
    tensors = (*_tensors(seed, 10), *(None,) * 10, [documents])
    name = kernels_dsl.kernel_function(document_mask).name
    options = {"mask_mod": name, "return_lse": True}
    torch.library.opcheck(torch.ops.kernels_dsl.attention.default, tensors, options)


def test_names():
    two, three = (kernels_dsl.kernel_function(_every(step)) for step in (2, 3))
    assert two.name != three.name
    assert kernels_dsl.kernel_function(_every(2)).name == two.name
    assert kernels_dsl.kernel_function(two) is two
    with pytest.raises(TypeError, match="Tensor cannot be a key"):
        kernels_dsl.kernel_function(_every(torch.ones(2)))


def test_a_name_from_another_process(monkeypatch):
    """A module's function is found by its name; one that has changed, or that nobody can find, is not."""
    name = kernels_dsl.kernel_function(document_mask).name
    local = kernels_dsl.kernel_function(_every(7)).name
    monkeypatch.setattr(functions, "_BY_NAME", {})
    assert functions.function_of(name).__qualname__ == "document_mask"
    for lost in (local, name[:-1] + "?"):
        with pytest.raises(RuntimeError, match="names a score or mask function that this process does not"):
            functions.function_of(lost)
