"""Cases of gradients of packed sequences: rows of no sequence, and keys that do not count and hold NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from reference.inputs import normal
from tests.fuzz.attention_contents import Operands
from tests.fuzz.attention_gradient import differentiable, draw_asked
from tests.fuzz.attention_gradient_check import Backward, leaves
from tests.fuzz.attention_packed import NAMES, Laid, PackedCase, draw_packed
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations


@dataclass(frozen=True)
class PackedGradientCase:
    """The backward pass of `call`. Other fields as in `attention_gradient.GradientCase`."""

    draw: Draw = field(repr=False)
    call: PackedCase
    given: Layout
    through_lse: bool
    asked: str
    deterministic: bool | None

    @property
    def mode(self) -> Mode:
        """The way of calling."""
        return self.call.mode

    def __str__(self) -> str:
        return f"gradient {described(self)}"

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["gradient of packed sequences"]
        names += ["packed gradient of log-sum-exp"] if self.through_lse else []
        names += ["gradient of a mask"] if "m" in self.asked else []
        names += ["gradient of sinks"] if "s" in self.asked else []
        names += ["gradient in free order"] if self.deterministic is False else []
        names += (
            [f"packed gradient with {name}" for name in self.call.lists.features] if self.call.lists else []
        )
        left_out = ("attention_varlen", "log-sum-exp")
        return (*names, *(name for name in self.call.features if name not in left_out))

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        laid = self.call.lay_out(arena, settings)
        seeds, lengths = Draw("packed gradients", self.draw.number, settings), self.call.lengths
        sizes, device = self.call.sizes, settings.device

        def values(shape: tuple[int, ...], dtype: torch.dtype, rows: int) -> Callable[[int], torch.Tensor]:
            """Normal numbers, NaN in rows that are of no sequence."""
            seed, lost = seeds.value_seed(), torch.ones(lengths.q_rows, dtype=torch.bool, device=device)
            lost[lengths.covered] = False
            lost = lost.view([-1 if mode == rows else 1 for mode in range(len(shape))])
            return lambda g: normal(shape, dtype, seed=seed + g, device=device).masked_fill(lost, torch.nan)

        shape = (lengths.q_rows, sizes.heads, sizes.dim_v)
        received = [arena.input("d_out", values(shape, self.call.dtype, 0), self.given)]
        if self.through_lse:
            received.append(arena.input("d_lse", values((sizes.heads, lengths.q_rows), torch.float32, 1)))
        return Call(
            run=self._run(Operations(settings), laid, received),
            check=lambda results: self._backward(laid, tuple(received)).check(results),
            arguments=NAMES,
            repeats=self.deterministic is not False,
        )

    def _run(
        self, operations: Operations, laid: Laid, received: list[torch.Tensor]
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        options = {**laid.options, "return_lse": True, "deterministic": self.deterministic}

        def run() -> tuple[torch.Tensor, ...]:
            blocks = {} if laid.lists is None else {"blocks": laid.lists.make()}
            tensors = leaves(laid.rows, laid.given, self.asked)
            q, k, v = (tensors.pop(name) for name in "qkv")
            found = operations.attention_varlen(q, k, v, **{**options, **tensors, **blocks})
            asked = [x for x in (q, k, v, *tensors.values()) if x.requires_grad]
            return torch.autograd.grad(found[: len(received)], asked, received)

        return run

    def _backward(self, laid: Laid, received: tuple[torch.Tensor, ...]) -> Backward:
        lists = None if laid.lists is None else laid.lists.on_cpu()
        pieces = tuple(self.call.sequences(laid, lists))
        rows, received = Operands(*(x[None] for x in laid.rows)), tuple(x[None] for x in received)
        return Backward(rows, laid.given, received, pieces, self.call.sizes, self.asked)


def draw_packed_gradient(draw: Draw) -> PackedGradientCase:
    """A case of gradients of `attention_varlen`: all that it takes and has gradients for."""
    call = draw_packed(draw, with_config=False)
    options = differentiable(call.options)
    lookup = draw.data.random() < 0.25
    if call.lookup and not lookup:
        options = replace(options, scale=None)
    call = replace(
        call, options=options, layouts=replace(call.layouts, out=None), family=None, checked=False,
        lookup=call.lookup and lookup, mode=draw.mode(graph=False),
    )  # fmt: skip
    return PackedGradientCase(
        draw, call, draw.layout(3), through_lse=draw.kernel.random() < 0.3, asked=draw_asked(draw, options),
        deterministic=draw.kernel.choice((None, None, True, False)),
    )  # fmt: skip
