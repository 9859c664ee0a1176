"""transformers' continuous batching on this attention, in the emulator."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import kernels_dsl
from kernels_dsl.integrations import transformers_paged
from lowering import emulator

transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `hf`")
LAYER = SimpleNamespace(is_causal=True)


@pytest.fixture
def calls(monkeypatch):
    """The names of the operations that were called."""
    called: list[str] = []
    for name in ("append_kv", "attention_decode", "attention_varlen"):
        inner = getattr(transformers_paged, name)
        monkeypatch.setattr(
            transformers_paged, name, lambda *a, _n=name, _f=inner, **o: called.append(_n) or _f(*a, **o)
        )
    return called


def _model():
    """A model whose most likely tokens after these prompts lead by twice what bf16 rounds off its logits."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3)  # tokens that differ
    return transformers.LlamaForCausalLM(config).eval().bfloat16()


def _generate(model, name: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    model.set_attn_implementation(name)
    settings = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=8, max_batch_tokens=32, max_requests_per_batch=4, max_blocks_per_request=4,
        auto_switch_to_flash=False, use_cuda_graph=False,
    )  # fmt: skip
    wanted = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    out = model.generate_batch(
        prompts, generation_config=wanted, continuous_batching_config=settings, warmup=False
    )
    assert [x.error for x in out.values()] == [None] * len(prompts)
    return [x.generated_tokens for x in out.values()]


@pytest.mark.parametrize("on_pages", [False, True])
def test_a_model_generates_what_it_does_with_eager_attention(calls, monkeypatch, on_pages):
    """Token for token, with keys that transformers gathers (as on a CPU) and on the pages (as on a GPU)."""
    from transformers.generation.continuous_batching import initialization

    if on_pages:
        cuda = SimpleNamespace(is_available=lambda: True)
        monkeypatch.setattr(initialization, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
    model, name = _model(), kernels_dsl.register_transformers_paged_attention()
    prompts = [torch.randint(64, (length,)).tolist() for length in (5, 15)]
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(initialization, "torch", torch)
        expected = _generate(model, "eager", prompts, 3)
    with emulator.run(arch="sm_90a"), torch.no_grad():
        assert _generate(model, name, prompts, 3) == expected
    steps = ["append_kv", "attention_decode"] if on_pages else ["attention_varlen"]
    assert calls == ["attention_varlen"] * 2 + 4 * steps


def test_padding_is_not_written(calls, seed):
    """A sequence without keys, as those that fill a captured batch."""
    cache = torch.full((2, 4, 16, 1, 64), float("nan"), dtype=torch.bfloat16)
    cache[:, 1, :3] = 1.0
    q, k, v = (torch.ones(1, heads, 2, 64, dtype=torch.bfloat16) for heads in (2, 1, 1))
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 1, 1), (0, 4, 4)))
    table = torch.tensor([[1, 9], [0, 0]], dtype=torch.int32)
    with emulator.run(arch="sm_90a"):
        out, _ = transformers_paged.paged_attention_forward(
            LAYER, q, k, v, None, cu_seq_lens_q=starts_q, cu_seq_lens_k=starts_k, max_length_q=1,
            block_table=table, k_cache=cache[0], v_cache=cache[1],
        )  # fmt: skip
    assert calls == ["append_kv", "attention_decode"] and out.shape == (1, 2, 2, 64)
    assert (out[0, 0] == 1).all() and (out[0, 1] == 0).all()
    assert (cache[:, 1, :4] == 1).all() and int(cache.isnan().sum()) == cache.numel() - 2 * 4 * 64


def test_the_options_of_a_layer(monkeypatch):
    given = {}
    monkeypatch.setattr(
        transformers_paged, "attention_varlen", lambda q, *_, **options: given.update(options) or q
    )
    x, starts = torch.zeros(1, 2, 8, 64), torch.tensor([0, 8], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 8}
    forward = transformers_paged.paged_attention_forward
    out, weights = forward(LAYER, x, x, x, None, sliding_window=5, scaling=0.5, softcap=30.0, **lengths)
    assert out.shape == (1, 8, 2, 64) and weights is None
    assert given == {"causal": True, "window": (4, None), "scale": 0.5, "softcap": 30.0, "sinks": None}
    for wrong, words in (
        ({"dropout": 0.1}, "dropout is 0.1, must be 0"),
        ({"position_bias": x}, "position_bias is given"),
        ({"max_length_q": None}, "max_length_q is None"),
    ):
        with pytest.raises(ValueError, match=words):
            forward(LAYER, x, x, x, None, **{**lengths, **wrong})
    with pytest.raises(ValueError, match="attention_mask is given"):
        forward(LAYER, x, x, x, x, **lengths)


def test_names(monkeypatch):
    with pytest.raises(ValueError, match="name is 'ours', must have 'flash' in it and then 2 or 3"):
        kernels_dsl.register_transformers_paged_attention("ours")
    from transformers import modeling_flash_attention_utils as utils

    name = kernels_dsl.register_transformers_paged_attention("ours_flash_3")
    functions, _ = utils.lazy_import_flash_attention(name)
    assert functions[0] is kernels_dsl.flash_attn.flash_attn_func
    monkeypatch.delattr(utils, "_lazy_imports")
    with pytest.raises(ImportError, match=r"must be as 5\.24"):
        kernels_dsl.register_transformers_paged_attention()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"must be 5\.24 or later: kernels-dsl\[hf\]"):
        kernels_dsl.register_transformers_paged_attention()
