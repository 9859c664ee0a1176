"""Training with attention: a model of transformers, checkpoints, autocast, loss curves.

TEST_ALL_KERNELS=1 trains the model without a window and padding too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kernels_dsl
from lowering import emulator
from tests.ops.attention.gradient_cases import leaves
from tests.samples import ALL

LLAMA = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip


@pytest.fixture
def emulated():
    torch.compiler.reset()
    with emulator.run(arch="sm_90a", check=False):
        yield


def _model(implementation: str, dtype: torch.dtype, **options: Any) -> Any:
    """Mistral without a window is Llama."""
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra `hf`")
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, **options))
    model.to(dtype).train().set_attn_implementation(implementation)
    return model


def _steps(model: Any, count: int, **inputs: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps, and the gradients of the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for _ in range(count):
        loss = model(**inputs).loss
        loss.backward()
        first = first or {name: p.grad.double().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def _closer_than_twice(own: torch.Tensor, peer: torch.Tensor, exact: torch.Tensor) -> bool:
    """The tolerance rule for a whole tensor: an error at most twice PyTorch's."""
    return float((own - exact).norm()) <= 2 * float((peer - exact).norm()) + 0.002 * float(exact.norm())


@pytest.mark.parametrize(("window", "padded"), [(8, True)] + [(None, False)] * ALL)
def test_a_model_of_transformers_trains(emulated, window, padded):
    name = kernels_dsl.register_transformers_attention()
    ids = torch.randint(0, 16, (1, 20), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(ids), ids.clone()
    if padded:
        mask[0, :6], labels[0, :7] = 0, -100
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    losses, gradients = {}, {}
    for kind, dtype, chosen in (
        ("exact", torch.float32, "eager"), ("peer", torch.bfloat16, "eager"), ("own", torch.bfloat16, name)
    ):  # fmt: skip
        model = _model(chosen, dtype, sliding_window=window)
        losses[kind], gradients[kind] = _steps(model, 2, **inputs)
    for parameter, exact in gradients["exact"].items():
        own, peer = gradients["own"][parameter], gradients["peer"][parameter]
        assert _closer_than_twice(own, peer, exact), parameter
    for own, exact in zip(losses["own"], losses["exact"]):
        assert abs(own - exact) < 0.02 * exact
    assert losses["own"][-1] < losses["own"][0]


def test_a_model_of_float32_under_autocast(emulated):
    """Its rotary embedding makes q and k float32, beside v in 16 bits."""
    name = kernels_dsl.register_transformers_attention()
    ids = torch.randint(0, 16, (1, 20), generator=torch.Generator().manual_seed(1))
    found = []
    for chosen in ("eager", name):
        model = _model(chosen, torch.float32, sliding_window=None)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        found.append([loss.item(), model.model.layers[0].self_attn.q_proj.weight.grad])
    assert abs(found[0][0] - found[1][0]) < 0.02
    assert float((found[0][1] - found[1][1]).norm()) < 0.05 * float(found[0][1].norm())


def test_autocast(emulated, seed):
    call = kernels_dsl.attention
    tensors = leaves((2, 1), (20, 20), (64, 64), seed)
    wide = [x.detach().float().requires_grad_() for x in tensors]
    expected = call(*tensors)
    with pytest.raises(TypeError, match=r"is torch\.float32, must be torch\.bfloat16"):
        call(*wide)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(*wide)
        mixed = call(*wide[:2], tensors[2])
        assert kernels_dsl.attention_supports(*wide) is None
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected) and torch.equal(mixed, expected)
    gradients = torch.autograd.grad(found.float().square().sum(), wide)
    own = torch.autograd.grad(expected.float().square().sum(), tensors)
    assert all(x.dtype == torch.float32 and torch.equal(x.to(y), y) for x, y in zip(gradients, own))


@pytest.mark.parametrize(("reentrant", "compiled"), [(False, False), (True, False), (False, True)])
def test_checkpoints(emulated, reentrant, compiled, seed):
    q, k, v = leaves((1, 1), (20, 20), (64, 64), seed)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernels_dsl.attention(q * 2, k, v, causal=True) * 3

    def kept(*tensors: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, *tensors, use_reentrant=reentrant)

    call: Callable[..., torch.Tensor] = kept
    if compiled:
        call = torch.compile(kept, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(call(q, k, v).float().square().sum(), (q, k, v)) if not reentrant else None
    if found is None:  # which works with backward() alone
        call(q, k, v).float().square().sum().backward()
        found = (q.grad, k.grad, v.grad)
    expected = torch.autograd.grad(layer(q, k, v).float().square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


class Block(torch.nn.Module):
    """A transformer of one layer on tokens, by any function of attention."""

    def __init__(self, attend: Callable[..., torch.Tensor], width: int, heads: int) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.embedding = torch.nn.Embedding(32, width)
        self.positions = torch.nn.Embedding(512, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, 32)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return self.out(x + self.attend(q, k, v).flatten(-2))


BLOCK = 64


def _listed(rows: int, device: str) -> kernels_dsl.BlockLists:
    """Lists of two blocks for each block of queries: its own, and as a whole one that of two before."""
    own = torch.arange(-(-rows // BLOCK), dtype=torch.int32, device=device).view(1, 1, -1)
    whole = own >= 2
    return kernels_dsl.BlockLists(
        torch.ones_like(own), own[..., None], whole.int(), torch.where(whole, own - 2, 0)[..., None],
        block=(BLOCK, BLOCK),
    )  # fmt: skip


def _math(window: int | None, listed: bool = False) -> Callable[..., torch.Tensor]:
    """PyTorch's math backend. `listed`: under the mask that `_listed` means."""

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        rows = tensors[0].shape[1]
        i, j = (torch.arange(rows, device=tensors[0].device).view(shape) for shape in ((-1, 1), (1, -1)))
        mask = (j <= i) & (i - j <= (rows if window is None else window))
        if listed:
            before = i // BLOCK - j // BLOCK
            mask = mask & ((before == 0) | (before == 2))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return sdpa(*[x.transpose(1, 2) for x in tensors], attn_mask=mask).transpose(1, 2)

    return attend


def _curve(
    attend: Callable[..., torch.Tensor], length: int, steps: int, device: str, dtype: torch.dtype
) -> torch.Tensor:
    """Losses of learning to repeat the token of three places before, under autocast to `dtype`."""
    torch.manual_seed(0)
    model = Block(attend, 128, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 32, (max(1, length // 40), length), generator=generator).to(device)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = model(tokens)[:, 3:].flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, :-3].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def _compare_curves(
    window: int | None, length: int, steps: int, device: str, listed: bool = False
) -> torch.Tensor:
    """The losses with this attention. They are as close to float32's as those of PyTorch in 16 bits."""

    blocks = _listed(length, device) if listed else None

    def own(*tensors: torch.Tensor) -> torch.Tensor:
        sides = None if window is None else (window, 0)
        return kernels_dsl.attention(*tensors, causal=True, window=sides, blocks=blocks)

    exact, peer, found = (
        _curve(attend, length, steps, device, dtype)
        for attend, dtype in (
            (_math(window, listed), torch.float32), (_math(window, listed), torch.bfloat16),
            (own, torch.bfloat16),
        )
    )  # fmt: skip
    bound = 2 * float((peer - exact).abs().max()) + 0.02 * float(exact[0])
    assert float((found - exact).abs().max()) <= bound
    return found


def test_a_loss_curve(emulated):
    _compare_curves(None, 20, 3, "cpu")


def test_a_loss_curve_of_listed_blocks(emulated):
    _compare_curves(None, 70, 2, "cpu", listed=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "listed"), [(None, False), (100, False), (None, True)])
def test_200_steps_on_the_gpu(window, listed):
    losses = _compare_curves(window, 300, 200, "cuda", listed)
    assert float(losses[-20:].mean()) < 0.5 * float(losses[0])
