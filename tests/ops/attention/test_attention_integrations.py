"""Attention behind the calls of others: PyTorch's FlashAttention backend, models of transformers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import kernels_dsl
from kernels_dsl.integrations import torch_attention as attention_torch
from kernels_dsl.integrations import transformers_attention as attention_transformers
from kernels_dsl.ops.attention import gradient
from lowering import emulator
from reference.attention import Masking
from tests.ops.attention.attention_cases import check_close, inputs

REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")
needs_registry = pytest.mark.skipif(not REGISTRY, reason="this torch has no registry of FlashAttention")


@pytest.fixture
def emulated():
    with emulator.run(arch="sm_90a"):
        yield


@pytest.fixture
def registered():
    yield kernels_dsl.register_torch_attention("kernels_dsl test")
    torch.nn.attention.restore_flash_attention_impl()


def _replaced() -> bool:
    """Stands in for PyTorch's FlashAttention is somebody else's, on a build without CUDA."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{attention_torch._SDPA}", "CUDA")


def test_without_a_registry(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"must have torch\.nn\.attention\.register_flash_attention_impl"):
        kernels_dsl.register_torch_attention()


@needs_registry
def test_registering_activates_nothing(registered):
    assert registered in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None


@needs_registry
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch's own kernel is there too")
def test_activating_and_restoring(registered):
    assert not _replaced()
    torch.nn.attention.activate_flash_attention_impl(registered)
    assert _replaced()
    torch.nn.attention.restore_flash_attention_impl()
    assert not _replaced()


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_dense_call(emulated, causal, seed):
    q, k, v = inputs((1, 70, 2, 64), (1, 70, 2, 64), 64, seed)
    views = [x.transpose(1, 2) for x in (q, k, v)]
    views[0].requires_grad_()  # as autograd hands it on
    out, lse, _, _, max_q, max_k, *_ = attention_torch.scaled_dot_product(*views, 0.0, causal, scale=0.2)
    assert (max_q, max_k) == (70, 70) and not out.requires_grad
    check_close((out.transpose(1, 2), lse), (q, k, v), Masking(right=0 if causal else None), 0.2)


def test_torchs_packed_call(emulated, seed):
    lengths = (40, 0, 70)
    starts = torch.tensor([0, 40, 40, 110], dtype=torch.int32)
    q, k, v = inputs((110, 2, 64), (110, 1, 64), 64, seed)
    window = {"window_size_left": 20, "window_size_right": -1}
    out, lse, *_ = attention_torch.flash_forward(
        *(q, k, v), starts, starts, *(70, 70, 0.0, False, False), **window
    )
    for first, length in zip(starts.tolist(), lengths):
        rows = slice(first, first + length)
        if length:
            check_close(
                (out[None, rows], lse[None, :, rows]),
                tuple(x[None, rows] for x in (q, k, v)),
                Masking(left=20),
            )


@pytest.fixture
def on_the_cpu():
    """The kernels are those of PyTorch's operators for CPU tensors, for which PyTorch has none."""
    handle = attention_torch._activated("CPU")
    yield
    handle.remove()


@needs_registry
def test_gradients_of_torchs_dense_call(emulated, on_the_cpu, seed):
    tensors = [x.transpose(1, 2) for x in inputs((1, 70, 2, 64), (1, 90, 2, 64), 64, seed)]
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, 0.0, True, scale=0.2)[0]
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    found = torch.autograd.grad(out, leaves, d_out)
    own = [x.transpose(1, 2).detach().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(
        kernels_dsl.attention(*own, causal=True, scale=0.2), own, d_out.transpose(1, 2)
    )
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(found, expected))


@needs_registry
def test_gradients_of_torchs_packed_call(emulated, on_the_cpu, seed):
    starts = torch.tensor([0, 10, 10, 40], dtype=torch.int32)
    leaves = [x.requires_grad_() for x in inputs((40, 2, 64), (40, 1, 64), 64, seed)]
    lengths = (starts, starts, 30, 30)
    options = {"scale": 0.2, "window_size_left": 20, "window_size_right": 0}
    out = torch.ops.aten._flash_attention_forward(*leaves, *lengths, 0.0, False, False, **options)[0]
    found = torch.autograd.grad(out.float().square().sum(), leaves)
    own = kernels_dsl.attention_varlen(*leaves, *lengths, scale=0.2, window=(20, 0))
    expected = torch.autograd.grad(own.float().square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize(("dropout", "lse_shape"), [(0.1, (1, 2, 70)), (0.0, (1, 2, 128))])
def test_gradients_left_to_torchs_kernel(monkeypatch, dropout, lse_shape):
    monkeypatch.setattr(attention_torch, "_original", lambda name: lambda *_, **__: name)
    x, lse = torch.zeros(1, 2, 70, 64), torch.zeros(lse_shape)
    call = attention_torch._or_original("theirs", attention_torch.scaled_dot_product_backward)
    lengths, of_dropout = (None, None, 70, 70), (None, None)
    assert call("keys", *[x] * 5, lse, *lengths, dropout, False, *of_dropout) == "theirs"


def test_torchs_kernel_runs_what_this_one_does_not(monkeypatch):
    monkeypatch.setattr(attention_torch, "_original", lambda name: lambda *args, **_: (name, args))
    call = attention_torch._or_original("n", attention_torch.scaled_dot_product)
    assert call("keys", 1, 2, 3, 0.5) == ("n", ("keys", 1, 2, 3, 0.5))
    monkeypatch.setattr(attention_torch, "_original", lambda name: None)
    with pytest.raises(attention_torch.Declined):
        attention_torch._or_original("n", attention_torch.scaled_dot_product)("keys", 1, 2, 3, 0.5)


@needs_registry
@pytest.mark.gpu
@pytest.mark.sm90
def test_torch_on_the_gpu(registered, seed, monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = inputs((2, 300, 4, 64), (2, 300, 4, 64), 64, seed, device="cuda")
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    calls = []
    inner = attention_torch.attention
    monkeypatch.setattr(attention_torch, "attention", lambda *a, **o: calls.append(1) or inner(*a, **o))

    def run(dropout=0.0):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            sdpa = torch.nn.functional.scaled_dot_product_attention
            out = sdpa(*leaves, is_causal=True, dropout_p=dropout)
        return out, torch.autograd.grad(out.float().square().sum(), leaves)

    inner_backward = gradient.gradients_of
    monkeypatch.setattr(gradient, "gradients_of", lambda *a, **o: calls.append(2) or inner_backward(*a, **o))
    expected, gradients = run()
    torch.nn.attention.activate_flash_attention_impl(registered)
    found, own_gradients = run()
    assert calls == [1, 2]
    check_close((found.transpose(1, 2), _lse(q, k, v)), (q, k, v), Masking(right=0))
    for own, theirs in zip(own_gradients, gradients):
        assert float((own - theirs).abs().max()) < 0.02 * float(theirs.abs().max())
    run(dropout=0.5)
    assert calls == [1, 2]
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.equal(run()[0], expected) and calls == [1, 2]


def _lse(q, k, v):
    return kernels_dsl.attention(q, k, v, causal=True, return_lse=True)[1]


LAYER = SimpleNamespace(is_causal=True)


def _heads_first(tensors):
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize(
    ("options", "masking"),
    [
        ({}, Masking(right=0)),
        ({"sliding_window": 20, "scaling": 0.2}, Masking(left=19, right=0)),
        ({"is_causal": False, "softcap": 3.0}, Masking(softcap=3.0)),
    ],
)
def test_a_layer(emulated, options, masking, seed):
    tensors = inputs((1, 50, 2, 64), (1, 70, 1, 64), 64, seed)
    out, weights = attention_transformers.attention_forward(LAYER, *_heads_first(tensors), None, **options)
    assert weights is None and out.shape == (1, 50, 2, 64)
    lse = kernels_dsl.ops.attention.attention.attention(
        *tensors, causal=masking.right == 0, return_lse=True, scale=options.get("scaling"),
        window=None if masking.left is None else (19, 0), softcap=masking.softcap,
    )[1]  # fmt: skip
    check_close((out, lse), tensors, masking, options.get("scaling"))


def test_a_layer_with_a_mask(emulated, seed):
    """A mask says everything: causality and window are not added to it. It may be longer than the keys."""
    tensors = inputs((1, 50, 2, 64), (1, 70, 1, 64), 64, seed)
    mask = torch.rand((1, 1, 50, 90), generator=torch.Generator().manual_seed(seed)) < 0.7
    out, _ = attention_transformers.attention_forward(LAYER, *_heads_first(tensors), mask, sliding_window=5)
    _, lse = kernels_dsl.attention(*tensors, mask=mask[..., :70], return_lse=True)
    check_close((out, lse), tensors, Masking(allowed=mask[..., :70]))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dropout": 0.1}, "dropout is 0.1, must be 0"), ({"position_bias": 1}, "position_bias is given")],
)
def test_a_layer_that_asks_for_too_much(options, message):
    with pytest.raises(ValueError, match=message):
        attention_transformers.attention_forward(LAYER, None, None, None, None, **options)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"must be 5 or later: kernels-dsl\[hf\]"):
        kernels_dsl.register_transformers_attention()


def _model(kind: str, **options):
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `hf`")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return model, kernels_dsl.register_transformers_attention()


def _check_model(model, name, ids, device, **inputs_):
    """Logits against those in float32, with twice the error that PyTorch's attention has in bf16."""
    found = {}
    for dtype, chosen in ((torch.float32, "eager"), (torch.bfloat16, "sdpa"), (torch.bfloat16, name)):
        model.to(dtype).set_attn_implementation(chosen)
        with torch.no_grad():
            out = model(ids.to(device), use_cache=True, **inputs_)
            after = model(ids[:, :1].to(device), past_key_values=out.past_key_values, **_longer(inputs_))
        found[chosen] = [x.logits.float() for x in (out, after)]
    for exact, peer, own in zip(found["eager"], found["sdpa"], found[name]):
        bound = 2 * float((peer - exact).abs().max()) + 0.01 * float(exact.abs().max())
        assert float((own - exact).abs().max()) <= bound


def _longer(inputs_):
    return {k: torch.cat([x, torch.ones_like(x[:, :1])], dim=1) for k, x in inputs_.items()}


@pytest.mark.parametrize(("kind", "options"), [("Llama", {}), ("Mistral", {"sliding_window": 24})])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_and_its_cache(emulated, kind, options, padded):
    model, name = _model(kind, **options)
    ids = torch.randint(0, 32, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    _check_model(model, name, ids, "cpu", attention_mask=mask)


def test_masks_are_only_made_where_needed(monkeypatch):
    pytest.importorskip("transformers", reason="transformers comes with the extra `hf`")
    make = attention_transformers.attention_mask_of
    ones = torch.ones(1, 8, dtype=torch.bool)
    window = SimpleNamespace(sliding_window=4)
    assert make(1, 8, 8, attention_mask=ones) is None
    assert make(1, 3, 8, 5, attention_mask=ones) is None
    assert make(1, 8, 8, local_size=4, config=window) is None
    assert make(1, 8, 8, local_size=4, config=SimpleNamespace(attention_chunk_size=4)) is not None
    assert make(1, 3, 8, 0, attention_mask=ones[:, :3]) is not None  # a static cache: keys that are to come
    assert make(1, 8, 8, attention_mask=ones, allow_is_causal_skip=False) is not None
    ones[0, 0] = False
    assert make(1, 8, 8, attention_mask=ones).shape == (1, 1, 8, 8)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(("kind", "options"), [("Llama", {}), ("Mistral", {"sliding_window": 100})])
def test_a_model_on_the_gpu(kind, options):
    model, name = _model(kind, **options)
    ids = torch.randint(0, 32, (2, 500), generator=torch.Generator().manual_seed(1))
    _check_model(model.cuda(), name, ids, "cuda", attention_mask=torch.ones_like(ids).cuda())
