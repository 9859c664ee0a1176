"""The backend for vLLM: its forward pass in the emulator, and what vLLM's own classes ask of it."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels_dsl import vllm_backend
from lowering import emulator
from reference.attention import Masking, attention
from tests.ops.serving import vllm_stand_in as stand_in

FP8 = torch.float8_e4m3fn
HEADS, KV_HEADS, DIM, PAGE = 16, 2, 64, 16
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.02), _v_scale=torch.tensor(0.03))
BACKEND = "kernels_dsl.vllm_backend.backend"


def _with_stand_in(monkeypatch, **options) -> ModuleType:
    for name, module in stand_in.modules({}, **options).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, BACKEND, raising=False)
    found = importlib.import_module(BACKEND)
    monkeypatch.delitem(sys.modules, BACKEND)  # not kept for tests with vLLM itself
    return found


@pytest.fixture
def backend(monkeypatch) -> ModuleType:
    """The backend's module, on the stand-in for vLLM's base modules."""
    return _with_stand_in(monkeypatch)


class Step:
    """A step of a server: requests of (new, all) tokens whose earlier keys are in the cache already."""

    common: Any = stand_in.Common

    def __init__(self, module: ModuleType, lengths, seed: int, cache_dtype: str = "auto", alone=None) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = FP8 if cache_dtype.startswith("fp8") else torch.bfloat16
        self.lengths = lengths
        each = [
            [torch.randn((n, h, DIM), generator=generator).bfloat16() for n, h in shapes]
            for shapes in (((new, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)) for new, keys in lengths)
        ]
        if alone is not None:
            each, self.lengths = [each[alone]], [lengths[alone]]
        self.q, self.k, self.v = ([x[n] for x in each] for n in range(3))
        counts = [-(-keys // PAGE) for _, keys in self.lengths]
        shape = (sum(counts) + 1, KV_HEADS, PAGE, 2 * DIM)
        self.cache = torch.full(shape, math.nan).to(dtype)
        if dtype == FP8:
            self.cache = self.cache.view(torch.uint8)  # as vLLM allocates it
        order = torch.randperm(shape[0], generator=generator).tolist()
        self.table = torch.full((len(counts) + 1, max(counts) + 1), -7, dtype=torch.int32)
        for b, count in enumerate(counts):
            self.table[b, :count] = torch.tensor([order.pop() for _ in range(count)])
        self.impl = module.KernelsDslImpl(HEADS, DIM, 0.125, KV_HEADS, None, None, cache_dtype)
        self.builder = module.KernelsDslMetadataBuilder(SimpleNamespace(block_size=PAGE), ["0"], None, "cpu")

    def slots(self, b: int, first: int, last: int) -> torch.Tensor:
        """Slots of the cache for tokens of a request."""
        places = torch.arange(first, last)
        return self.table[b, places // PAGE].long() * PAGE + places % PAGE

    def metadata(self):
        """The step as this backend's builder makes it."""
        new = torch.tensor([0, *(n for n, _ in self.lengths)])
        slots = [self.slots(b, keys - n, keys) for b, (n, keys) in enumerate(self.lengths)]
        starts = new.cumsum(0).to(torch.int32)
        common = self.common(
            query_start_loc=starts, query_start_loc_cpu=starts, num_reqs=len(slots),
            seq_lens=torch.tensor([keys for _, keys in self.lengths] + [0], dtype=torch.int32),  # and padding
            num_actual_tokens=int(new.sum()), max_query_len=int(new.max()),
            max_seq_len=max(keys for _, keys in self.lengths), block_table_tensor=self.table,
            slot_mapping=torch.cat(slots),
        )  # fmt: skip
        return self.builder.build(0, common)

    def run(self) -> torch.Tensor:
        """The output, by the calls that vLLM makes of a layer; three padded tokens lie behind it."""
        earlier = [range(keys - n) for n, keys in self.lengths]
        slots = torch.cat([self.slots(b, 0, len(old)) for b, old in enumerate(earlier)])
        old_k, old_v = (torch.cat([x[: len(old)] for x, old in zip(xs, earlier)]) for xs in (self.k, self.v))
        self.impl.do_kv_cache_update(LAYER, old_k, old_v, self.cache, slots)
        step = self.metadata()
        k, v = (torch.cat([x[len(old) :] for x, old in zip(xs, earlier)]) for xs in (self.k, self.v))
        q, k, v = (torch.cat([x, x.new_zeros(3, *x.shape[1:])]) for x in (torch.cat(self.q), k, v))
        self.impl.do_kv_cache_update(LAYER, k, v, self.cache, step.slot_mapping)
        output = torch.full((q.shape[0], HEADS, DIM), 7.0, dtype=q.dtype)
        assert self.impl.forward(LAYER, q, k, v, self.cache, step, output) is output
        assert (output[step.num_actual_tokens :] == 7.0).all()
        return output[: step.num_actual_tokens]

    def check(self, output: torch.Tensor, masking: Masking) -> None:
        """Compares with float64; of fp8 with what the cache holds."""
        eps, first = torch.finfo(output.dtype).eps, 0
        for q, k, v in zip(self.q, self.k, self.v):
            if self.cache.dtype == torch.uint8:
                k, v = (
                    (x.float() / s).clamp(-448, 448).to(FP8).double() * s.double()
                    for x, s in ((k, LAYER._k_scale), (v, LAYER._v_scale))
                )
            wanted, _ = attention(q[None], k[None], v[None], masking, scale=0.125)
            found = output[None, first : first + len(q)].double()
            torch.testing.assert_close(found, wanted, rtol=2 * eps, atol=2 * eps)
            first += len(q)


def test_a_mixed_step(backend, kernels, seed):
    """A prompt, a chunk of another, and two requests that decode, in the order in which vLLM has them."""
    step = Step(backend, [(1, 20), (1, 17), (9, 9), (5, 30)], seed)
    with emulator.run(arch="sm_90a"):
        step.check(step.run(), Masking(right=0))
    assert kernels == ["attention_varlen"]


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_the_bits_of_a_request_are_its_own(monkeypatch, kernels, cache_dtype, seed):
    """With VLLM_BATCH_INVARIANT, alone and beside a prompt."""
    module = _with_stand_in(monkeypatch, batch_invariant=True)
    lengths = [(1, 40), (9, 9)]
    with emulator.run(arch="sm_89"):
        both = Step(module, lengths, seed, cache_dtype)
        found = both.run()
        alone = Step(module, lengths, seed, cache_dtype, alone=0)
        assert torch.equal(alone.run(), found[:1])
    both.check(found, Masking(right=0))
    assert kernels == ["attention_decode"] * 2


def test_options_of_a_layer(backend, monkeypatch):
    given = {}
    monkeypatch.setattr(backend, "paged_attention", lambda *_, **options: given.update(options))
    sinks = torch.zeros(HEADS)
    impl = backend.KernelsDslImpl(
        HEADS, DIM, 0.5, KV_HEADS, sliding_window=5, logits_soft_cap=30.0, attn_type="decoder", sinks=sinks
    )
    x = torch.zeros(1, HEADS, DIM, dtype=torch.bfloat16)
    step = backend.KernelsDslMetadata(1, 1, 9, *[torch.zeros(1, dtype=torch.int32)] * 4)
    cache = torch.zeros(1, KV_HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16)
    impl.forward(LAYER, x, x, x, cache, step, x.clone())
    assert (given["window"], given["softcap"], given["scale"]) == ((4, None), 30.0, 0.5)
    assert given["sinks"] is sinks and not given["batch_invariant"] and "k_scale" not in given
    assert (impl.forward(LAYER, x, x, x, cache, None, torch.ones_like(x)) == 0).all()
    with pytest.raises(ValueError, match="output_scale is given"):
        impl.forward(LAYER, x, x, x, cache, step, x, output_scale=sinks)
    with pytest.raises(ValueError, match="alibi_slopes is given"):
        backend.KernelsDslImpl(HEADS, DIM, 0.5, KV_HEADS, [1.0])
    with pytest.raises(ValueError, match="attn_type is encoder_only"):
        backend.KernelsDslImpl(HEADS, DIM, 0.5, KV_HEADS, attn_type="encoder_only")
    builder = backend.KernelsDslMetadataBuilder(None, [], None, "cpu")
    with pytest.raises(ValueError, match="causal is not True"):
        builder.build(0, SimpleNamespace(causal=torch.ones(1)))
    other = builder.update_block_table(step, torch.ones(3, 2), sinks)
    assert other.block_table.shape == (1, 2) and other.slot_mapping is sinks and other is not step


def test_what_is_supported(backend):
    own = backend.KernelsDslBackend
    assert [own.supports_head_size(n) for n in (8, 128, 256, 12, 264, 0)] == [True] * 3 + [False] * 3
    ampere, ada = (SimpleNamespace(major=8, minor=n) for n in (0, 9))
    turing = SimpleNamespace(major=7, minor=5)
    assert own.supports_compute_capability(ampere) and not own.supports_compute_capability(turing)
    assert own.supports_batch_invariance() and own.supports_sink() and own.supports_sliding_window()
    rest = (16, False, False, False, False)
    why = own.supports_combination
    assert why(128, torch.bfloat16, "fp8", *rest, ada) is None
    assert "need compute capability 8.9" in why(128, torch.bfloat16, "fp8", *rest, ampere)
    assert "must be a multiple of 16" in why(72, torch.bfloat16, "fp8", *rest, ada)
    assert "kv_cache_dtype is float16" in why(128, torch.bfloat16, "float16", *rest, ada)
    assert own.get_impl_cls() is backend.KernelsDslImpl and own.get_name() == vllm_backend.NAME
    assert own.get_builder_cls() is backend.KernelsDslMetadataBuilder


def test_registering(monkeypatch, caplog):
    """Nothing without vLLM, once with it, a warning for one without a registry."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm_backend.register()
    registered: dict[str, str] = {}
    for name, module in stand_in.modules(registered).items():
        monkeypatch.setitem(sys.modules, name, module)
    vllm_backend.register()
    vllm_backend.register()
    assert registered == {vllm_backend.NAME: vllm_backend.BACKEND} and not caplog.records
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    vllm_backend.register()
    assert "must have a registry of attention backends as 0.33" in caplog.text


def test_the_entry_point():
    """As pyproject.toml has it; an installation may be older."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert 'entry-points."vllm.general_plugins"]\nkernels_dsl = "kernels_dsl.vllm_backend:register"' in text
    point = metadata.EntryPoint("kernels_dsl", "kernels_dsl.vllm_backend:register", "vllm.general_plugins")
    assert point.load() is vllm_backend.register


def test_vllms_own_classes():
    """Every abstract method is there, with vLLM's arguments, and a server's choice is accepted."""
    pytest.importorskip("vllm.v1.attention.backend", reason="vLLM is not installed")
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention import backend as base

    own = importlib.import_module(BACKEND)
    pairs = (
        (own.KernelsDslBackend, base.AttentionBackend), (own.KernelsDslImpl, base.AttentionImpl),
        (own.KernelsDslMetadataBuilder, base.AttentionMetadataBuilder),
    )  # fmt: skip
    for ours, theirs in pairs:
        assert not ours.__abstractmethods__
        for name, function in vars(ours).items():
            known = getattr(theirs, name, None)
            if inspect.isfunction(inspect.unwrap(getattr(function, "__func__", function))) and known:
                wanted = [*inspect.signature(known).parameters]
                assert [*inspect.signature(getattr(ours, name)).parameters][: len(wanted)] == wanted, name
    read = set(own.KernelsDslMetadataBuilder.build.__code__.co_names)
    assert read & set(base.CommonAttentionMetadata.__dataclass_fields__) == {
        "causal", "query_start_loc", "num_actual_tokens", "max_query_len", "max_seq_len", "seq_lens",
        "block_table_tensor", "slot_mapping",
    }  # fmt: skip
    reasons = own.KernelsDslBackend.validate_configuration(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype="fp8", block_size=16, use_mla=False,
        has_sink=True, use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False,
        device_capability=DeviceCapability(9, 0), attn_type="decoder", has_sliding_window=True,
        use_batch_invariant=True,
    )  # fmt: skip
    assert reasons == []
    assert not own.KernelsDslBackend.supports_device_cpu_query_lens_mismatch()
    vllm_backend.register()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    assert registry.AttentionBackendEnum[vllm_backend.NAME].get_class() is own.KernelsDslBackend


def test_a_mixed_step_on_vllms_own_classes(seed):
    """Metadata by this backend's builder of vLLM's own record."""
    base = pytest.importorskip("vllm.v1.attention.backend", reason="vLLM is not installed")

    class OwnStep(Step):
        common = base.CommonAttentionMetadata

    step = OwnStep(importlib.import_module(BACKEND), [(1, 20), (9, 9), (5, 30)], seed)
    with emulator.run(arch="sm_90a"):
        step.check(step.run(), Masking(right=0))
