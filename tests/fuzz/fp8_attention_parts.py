"""Parts of cases of dense and packed fp8 attention: factors, masks, configurations, comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels_dsl.config.attention import Sm90AttentionConfig
from kernels_dsl.config.attention_table import AttentionConfig
from reference import inputs
from reference import quantize as quantization
from reference.attention import Masking, attention
from reference.scaled_gemm import aligned_sums
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_values import E4M3, Fill
from tests.fuzz.memory import Arena
from tests.ops.attention import attention_fp8_cases as cases

GAIN = 100.0
"""The factor of N(0, 1), so that e4m3 has its digits; factors undo it."""
DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 208, 256)
_KEYS = 128
_OF_EXPONENTIALS = 1e-3  # what a log-sum-exp of exact scores may be off by
_TAILS = ((), (1,), (1, 1))


@dataclass(frozen=True)
class Masks:
    """Options that change or hide scores. window: (left, right), None for no window."""

    causal: bool
    window: tuple[int | None, int | None] | None
    top_left: bool
    softcap: float
    scale: float | None
    sinks: bool

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of a call, but for the sinks."""
        found: dict[str, Any] = {"causal": True} if self.causal else {}
        found |= {"window": self.window} if self.window is not None else {}
        found |= {"alignment": "top_left"} if self.top_left else {}
        found |= {"softcap": self.softcap} if self.softcap else {}
        return found | ({"scale": self.scale} if self.scale is not None else {})

    def masking(self, sinks: torch.Tensor | None, allowed: torch.Tensor | None = None) -> Masking:
        """The same for the reference."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return Masking(
            left=left, right=right, top_left=self.top_left, softcap=self.softcap, sinks=sinks, allowed=allowed
        )


def draw_masks(draw: Draw, config: AttentionConfig | None) -> Masks:
    """Masks that go with a configuration. Widths are data, whether there are any the kernel's."""
    pick, data = draw.kernel, draw.data
    kind = pick.choice(("full", "full", "causal", "causal", "window", "left", "right"))
    widths = [data.choice((0, 1, 17, 64, 100, 300)) for _ in range(2)]
    window: tuple[int | None, int | None] | None = {
        "window": (widths[0], widths[1]), "left": (widths[0], None), "right": (None, widths[1]),
    }.get(kind)  # fmt: skip
    watched = isinstance(config, Sm90AttentionConfig) and config.watch_sums
    sinks = pick.random() < 0.2 and not watched
    softcap = pick.random() < 0.15
    return Masks(
        causal=kind == "causal", window=window, top_left=pick.random() < 0.15,
        softcap=data.choice((2.0, 15.0)) if softcap else 0.0,
        scale=data.choice((0.05, 0.2)) if pick.random() < 0.2 else None, sinks=sinks,
    )  # fmt: skip


@dataclass(frozen=True)
class Factor:
    """The factor of one operand. kind: "none", "one" (of all), "head", "kv" (a head of keys' for q), or
    "block" (of 128 keys). tail: modes of 1 at its end."""

    kind: str
    tail: tuple[int, ...]

    def shape(self, batch: int, heads: int, kv_heads: int, keys: int) -> tuple[int, ...]:
        """heads: of the operand."""
        if self.kind == "one":
            return self.tail
        if self.kind == "block":
            return (batch, heads, -(-keys // _KEYS), *self.tail[:1])
        return (batch, kv_heads if self.kind == "kv" else heads, *self.tail)

    def make(self, arena: Arena, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor | None:
        """The tensor: what undoes the gain, more or less; of blocks, their steps too."""
        if self.kind == "none":
            return None
        device = str(arena.device)

        def fill(generation: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed + generation)
            values = (0.8 + 0.4 * torch.rand(shape, generator=generator)) / GAIN
            if self.kind == "block":
                steps = torch.exp2(-(5.0 * torch.arange(shape[2]) % 9))
                values = values * steps.view(-1, *(1,) * (len(shape) - 3))
            return values.to(device)

        return arena.input(name, fill)


def draw_factors(draw: Draw, blocks: bool) -> tuple[Factor, Factor, Factor]:
    """Those of q, k and v. blocks: whether k or v have one for every 128 keys."""
    pick = draw.kernel
    found = [
        Factor(pick.choice(kinds), pick.choice(_TAILS))
        for kinds in (("none", "one", "head", "kv"), ("none", "one", "head"), ("none", "one", "head"))
    ]
    if blocks:
        for i in pick.choice(((1, 2), (1,), (2,))):
            found[i] = Factor("block", pick.choice(_TAILS[:2]))
    return found[0], found[1], found[2]


def values(shape: tuple[int, ...], factor: Factor, seed: int, device: str) -> Fill:
    """e4m3 values of N(0, 1), or times the gain where a factor undoes it."""
    gain = 1.0 if factor.kind == "none" else GAIN

    def fill(generation: int) -> torch.Tensor:
        x = inputs.normal(shape, torch.float32, seed=seed + generation, device=device, scale=gain)
        return x.clamp(-448.0, 448.0).to(E4M3)

    return fill


def exact_of(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """float64 values of x (B, S, H, D) times its factors."""
    found = quantization.from_fp8(x)
    if factor is None:
        return found
    if factor.numel() == 1:
        return found * factor.double().reshape(())
    batch, length, heads, _ = x.shape
    if factor.dim() > 2 and factor.shape[2] != 1:
        each = factor.double().reshape(*factor.shape[:3]).repeat_interleave(_KEYS, 2)[:, :, :length]
        return found * each.transpose(1, 2)[..., None]
    each = factor.double().reshape(factor.shape[:2])
    return found * each.repeat_interleave(heads // factor.shape[1], 1).view(batch, 1, heads, 1)


def check_attention(
    found: tuple[torch.Tensor, torch.Tensor | None],
    exact: list[torch.Tensor],
    masking: Masking,
    scale: float | None,
    walk: Any,
) -> None:
    """Output (B, Sq, H, Dv) and log-sum-exp against float64, as the operation's own tests do."""
    if found[0].numel() == 0 or exact[1].shape[1] == 0:
        expected, lse = attention(*exact, masking, scale=scale)
        assert found[0].shape == expected.shape and bool((found[0] == 0).all()), "no key: must be 0"
        assert found[1] is None or torch.allclose(found[1].double(), lse.double(), atol=1e-6, rtol=1e-6)
        return
    cases.compare((found[0], None), exact, masking, scale, walk)
    if found[1] is not None:
        _check_lse(found[1], exact, masking, scale)


def _check_lse(lse: torch.Tensor, exact: list[torch.Tensor], masking: Masking, scale: float | None) -> None:
    """Log-sum-exp within `LSE_TOLERANCE`, or within the error that tensor cores make of these scores."""
    _, expected = attention(*exact, masking, scale=scale)
    same = lse.double() == expected  # -inf among them
    error = float((lse - expected).abs().masked_fill(same, 0.0).max())
    if error < cases.LSE_TOLERANCE:
        return
    bound = max(cases.LSE_TOLERANCE, score_error(exact, scale) + _OF_EXPONENTIALS)
    assert error < bound, f"a log-sum-exp is off by {error:.2e}, more than {bound:.2e}"


def score_error(exact: list[torch.Tensor], scale: float | None) -> float:
    """The largest error of q @ k.T · scale as the tensor cores add fp8 products."""
    q, k = (x.transpose(1, 2) for x in exact[:2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group, worst = q.shape[1] // k.shape[1], 0.0
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            x, y = q[batch, head], k[batch, head // group].mT
            total = torch.zeros(x.shape[0], y.shape[1], dtype=torch.float64, device=x.device)
            worst = max(worst, float((aligned_sums(x, y, total) - x @ y).abs().max()))
    return worst * abs(scale)
