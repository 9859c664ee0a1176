"""This attention behind the calls of PyTorch and transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

import kernels_dsl
from kernels_dsl.integrations import torch_attention, transformers_attention
from reference.attention import Masking
from tests.fuzz import attention_contents as contents
from tests.fuzz.attention_contents import Contents, Layouts, Operands
from tests.fuzz.attention_dense import DTYPES
from tests.fuzz.attention_options import Extents
from tests.fuzz.case import Call, Mode, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.memory import PLAIN, Arena

REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")
TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def names(settings: Settings) -> list[str]:
    """Features that can be drawn here."""
    registered = ["register_torch_attention"] if settings.device == "cuda" and REGISTRY else []
    registered += ["register_transformers_attention"] if TRANSFORMERS else []
    return [*registered, "torch's dense call", "a layer of transformers"]


@contextmanager
def _activated() -> Iterator[None]:
    """PyTorch's FlashAttention is this one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.nn.attention.activate_flash_attention_impl(kernels_dsl.register_torch_attention("kernels_dsl fuzz"))
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@dataclass(frozen=True)
class IntegrationCase:
    """One call. `name`: of `names`. Lengths are equal where PyTorch's own function asks for it."""

    draw: Draw = field(repr=False)
    name: str
    sizes: Extents
    dtype: torch.dtype
    causal: bool
    window: int | None
    mode: Mode = Mode.PLAIN

    def __str__(self) -> str:
        return f"{self.name} {self.sizes} {self.dtype} causal={self.causal} window={self.window}"

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return (self.name,)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, s = Draw("integration values", self.draw.number, settings), self.sizes
        made = Contents(s, s.batch, s.q_len, s.k_len, self.dtype, False, settings.device, seeds.value_seed())
        layouts = Layouts(PLAIN, PLAIN, PLAIN, None, "apart")
        values = [made.values(generation) for generation in (0, 1)]
        rows = contents.lay_out(arena, layouts, "apart", values, packed=False)
        left = None if self.window is None else self.window - 1
        rules = Masking(left, 0 if self.causal else left)
        return Call(
            run=lambda: self._run(rows),
            check=lambda results: contents.check(results[0], None, rows, rules, None),
            arguments=(),
        )

    def _run(self, rows: Operands) -> tuple[torch.Tensor, ...]:
        tensors = [x.transpose(1, 2) for x in rows]
        if self.name == "register_torch_attention":
            with _activated():
                sdpa = torch.nn.functional.scaled_dot_product_attention
                return (sdpa(*tensors, is_causal=self.causal).transpose(1, 2),)
        if self.name == "torch's dense call":
            return (torch_attention.scaled_dot_product(*tensors, 0.0, self.causal)[0].transpose(1, 2),)
        forward = transformers_attention.attention_forward
        if self.name == "register_transformers_attention":
            from transformers import AttentionInterface

            name = kernels_dsl.register_transformers_attention("kernels_dsl fuzz")
            forward = AttentionInterface()[name]
        layer = SimpleNamespace(is_causal=self.causal)
        return (forward(layer, *tensors, None, sliding_window=self.window)[0],)


def draw_integration(draw: Draw) -> IntegrationCase:
    """A call of one of the integrations."""
    data, small = draw.data, draw.settings.small
    name = draw.kernel.choice(names(draw.settings))
    pool = (1, 17, 64, 70) if small else (1, 17, 64, 129, 300, 700)
    of_torch = name in ("register_torch_attention", "torch's dense call")
    q_len = data.choice(pool)
    k_len = q_len if name == "register_torch_attention" else data.choice(pool)
    dim = draw.kernel.choice((32, 64, 128))
    group = 1 if of_torch else draw.kernel.choice((1, 2))
    sizes = Extents(data.choice((1, 2)), q_len, k_len, data.choice((1, 2)), group, dim, dim)
    causal = draw.kernel.random() < 0.5
    window = data.choice((1, 5, 100)) if not of_torch and draw.kernel.random() < 0.3 else None
    return IntegrationCase(draw, name, sizes, draw.kernel.choice(DTYPES), causal, window)
