"""Attention with one tensor spread over more than 2³¹ elements, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from reference.attention import Masking
from tests.fuzz import attention_contents as contents
from tests.fuzz.attention_contents import Contents, Operands
from tests.fuzz.attention_options import Extents
from tests.fuzz.case import Call, Mode, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_huge import alone_on_the_gpu
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations

_BEYOND = 1 << 31
WHICH = ("q", "k", "v", "out", "mask")
_FILL = 7.0


@dataclass(frozen=True)
class HugeCase:
    """One call. `which`: the tensor that is far apart; `mode_apart`: in which of its modes (batch, rows or
    heads; the last but one of a mask). `odd`: by a distance that no vector access divides."""

    draw: Draw = field(repr=False)
    which: str
    mode_apart: int
    sizes: Extents
    odd: bool
    family: str | None
    mode: Mode = Mode.PLAIN

    def __str__(self) -> str:
        return f"huge {self.which} mode={self.mode_apart} {self.sizes} odd={self.odd} family={self.family}"

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return ("attention", "beyond 2^31 elements", f"huge {self.which}")

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`; the far one is made within the call, alone on the GPU."""
        seeds, operations, s = (
            Draw("huge attention", self.draw.number, settings),
            Operations(settings),
            self.sizes,
        )
        made = Contents(
            s, s.batch, s.q_len, s.k_len, torch.bfloat16, True, settings.device, seeds.value_seed()
        )
        values = [made.values(generation) for generation in (0, 1)]
        rows = Operands(*(
            arena.input(name, lambda g, place=place: values[g][place]) for place, name in enumerate("qkv")
        ))  # fmt: skip
        generator = torch.Generator(settings.device).manual_seed(seeds.value_seed())
        mask = torch.rand((s.q_len, s.k_len), generator=generator, device=settings.device) < 0.7
        mask = arena.input("mask", lambda _: mask.clone())
        rules = Masking(allowed=mask[None, None])
        return Call(
            run=lambda: self._run(operations, rows, mask),
            check=lambda results: contents.check(*results, rows, rules, contents.LOOKUP_SCALE),
            arguments=("q", "k", "v", "out", "mask"),
        )

    def _run(self, operations: Operations, rows: Operands, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The output and log-sum-exp; what lies between the far elements stays as it was."""
        options: dict[str, Any] = {"scale": contents.LOOKUP_SCALE, "return_lse": True, "family": self.family}
        tensors: dict[str, torch.Tensor] = {**rows._asdict(), "mask": mask}
        with alone_on_the_gpu():
            shape = (
                tensors[self.which].shape if self.which != "out" else (*rows.q.shape[:3], self.sizes.dim_v)
            )
            dtype = torch.bool if self.which == "mask" else torch.bfloat16
            memory, far = _spread(tuple(shape), self.mode_apart, self.odd, dtype, rows.q.device)
            if self.which == "out":
                options["out"] = far
            else:
                far.copy_(tensors[self.which])
                tensors[self.which] = far
            out, lse = operations.attention(**tensors, **options)
            out, fill = out.clone(), memory[-1].clone()
            far.fill_(fill)
            assert int((memory != fill).sum()) == 0, "what lies between the far elements was written"
            del far, memory, tensors, options
        return out, lse


def _spread(
    shape: tuple[int, ...], apart: int, odd: bool, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of one value, and a view of `shape` in it of which mode `apart` reaches past 2³¹ elements."""
    pitch = -(-_BEYOND // (shape[apart] - 1) // 64) * 64 + int(odd)
    strides, step = [0] * len(shape), 1
    for mode in reversed(range(len(shape))):
        if mode != apart:
            strides[mode], step = step, step * shape[mode]
    strides[apart] = pitch
    assert step <= pitch
    fill: Any = True if dtype == torch.bool else _FILL
    memory = torch.full((pitch * (shape[apart] - 1) + step + 64,), fill, dtype=dtype, device=device)
    return memory, memory.as_strided(shape, strides)


def draw_huge(draw: Draw) -> HugeCase:
    """A case with far rows, heads or sequences."""
    data = draw.data
    which = data.choice(WHICH)
    q_len, k_len = (data.choice((2, 33, 64, 130, 257)) for _ in range(2))
    sizes = Extents(2, q_len, k_len, 2, data.choice((1, 2)), 64, data.choice((64, 32)))
    apart = 0 if which == "mask" else data.choice((0, 1, 1, 2))
    return HugeCase(draw, which, apart, sizes, data.random() < 0.2, data.choice((None, None, "sm80")))
