"""Entries of the call cache are found again for calls that may follow them, and for no other."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_dsl.ops import call_cache

X, Y = torch.zeros(4, 8), torch.zeros(8, 4)
STORAGE = torch.zeros(64)
LIKE = {
    "others": (torch.ones(4, 8), torch.ones(8, 4)),
    "no_grad": (X.clone(), Y),
    "an address of four bytes": (STORAGE[1:33].view(4, 8), Y),
}
UNLIKE = {
    "shape": (torch.zeros(4, 9), Y),
    "strides": (Y.mT, Y),
    "dtype": (X.half(), Y),
    "device": (X.to("meta"), Y),
    "layout": (X.to_sparse(), Y),
    "requires_grad": (X.clone().requires_grad_(), Y),
    "a parameter": (torch.nn.Parameter(X, requires_grad=False), Y),
    "negative": (torch.imag(torch.zeros(4, 8, dtype=torch.complex64).conj()), Y),
    "one twice": (X, X),
    "no tensor": (X, None),
}


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.fixture
def kept():
    found = {}
    call_cache.keep(found, "key", (X, Y), "plan")
    return found


@pytest.mark.parametrize("case", list(LIKE))
def test_calls_that_are_found(kept, case):
    with torch.set_grad_enabled(case != "no_grad"):
        assert call_cache.find(kept, "key", LIKE[case]) == "plan"


@pytest.mark.parametrize("case", list(UNLIKE))
def test_calls_that_are_not_found(kept, case):
    assert call_cache.find(kept, "key", UNLIKE[case]) is None
    assert call_cache.find(kept, "another", (X, Y)) is None


def test_nothing_is_found_where_something_watches(kept):
    for mode in (_Mode(), FakeTensorMode(), forward_ad.dual_level(), torch.inference_mode()):
        with mode:
            assert call_cache.find(kept, "key", (X, Y)) is None
    seen = []

    def ask(x):
        seen.append(call_cache.find(kept, "key", (x, Y)) or call_cache.find(kept, "key", (X, Y)))
        return x.sum()

    torch.func.vmap(ask)(torch.zeros(2, 4, 8))
    torch.func.grad(ask)(X)
    torch.func.jvp(ask, (X,), (X,))
    torch.compile(ask, backend="eager", fullgraph=True)(X)
    assert not any(seen) and call_cache.find(kept, "key", (X, Y)) == "plan"


def test_what_needs_gradients_is_found_without_them_only():
    found, leaf = {}, X.clone().requires_grad_()
    with torch.no_grad():
        call_cache.keep(found, "key", (leaf,), "plan")
        assert call_cache.find(found, "key", (leaf,)) == "plan"
    assert call_cache.find(found, "key", (leaf,)) is None


def test_one_tensor_in_two_places():
    found = {}
    call_cache.keep(found, "key", (X, Y, X), "plan")
    assert call_cache.find(found, "key", (LIKE["others"][0], Y, LIKE["others"][0])) == "plan"
    assert call_cache.find(found, "key", (X, Y, X.clone())) is None
    assert call_cache.find(found, "key", (X, X, X)) is None


def test_addresses():
    """They are looked at where a launch has refused one, and a call with such an address is not kept."""
    found, odd = {}, LIKE["an address of four bytes"]
    call_cache.keep(found, "key", odd, "slow plan")
    assert call_cache.find(found, "key", odd) is None
    call_cache.keep(found, "key", (X, Y), "plan")
    call_cache.refused(found, "key", ValueError("Misaligned Tensor data on argument #0"))
    assert call_cache.find(found, "key", odd) is None and call_cache.find(found, "key", (X, Y)) == "plan"


def test_a_call_is_kept_once():
    found = {}
    for _ in range(9):  # as where a mode sees the calls, so that they are not looked for
        call_cache.keep(found, "key", (X, Y), "plan")
    call_cache.keep(found, "key", (X.half(), Y), "another")
    assert call_cache.find(found, "key", (X.half(), Y)) == "another" and len(found["key"]) == 2


def test_only_some_calls_of_a_key_are_kept():
    found = {}
    for n in range(1, 10):
        call_cache.keep(found, "key", (torch.zeros(n),), n)
    hits = [call_cache.find(found, "key", (torch.zeros(n),)) for n in range(1, 10)]
    assert hits == [1, 2, 3, 4] + [None] * 5


def test_another_error_than_of_an_address_is_the_callers():
    found = {}
    call_cache.keep(found, "key", (X, Y), "plan")
    with pytest.raises(ValueError, match="a user's step"):
        call_cache.refused(found, "key", ValueError("a user's step"))
    assert call_cache.find(found, "key", LIKE["an address of four bytes"]) == "plan"


def test_how_a_launch_refuses_an_address():
    """The compiler writes this text into what it compiles."""
    (spec,) = importlib.util.find_spec("nvidia_cutlass_dsl").submodule_search_locations
    (path,) = Path(spec).rglob("tvm_ffi_builder/tvm_ffi_builder.py")
    assert f'"{call_cache._MISALIGNED} "' in path.read_text()
