"""Cases of attention's gradients: of q, k, v, an additive mask and sinks, through the output and perhaps the
log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from reference.inputs import normal
from tests.fuzz import attention_contents as contents
from tests.fuzz import attention_lists as block_lists
from tests.fuzz import attention_options as masks
from tests.fuzz.attention_contents import Contents, Layouts, Operands
from tests.fuzz.attention_dense import DTYPES, NAMES, draw_sizes
from tests.fuzz.attention_functions import FUNCTIONS
from tests.fuzz.attention_gradient_check import Backward, leaves
from tests.fuzz.attention_lists import ListsOf
from tests.fuzz.attention_options import Extents, Options, Part, Piece
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations

LISTS = ("random", "random", "window", "topk", "BlockMask")


@dataclass(frozen=True)
class GradientCase:
    """One call and its backward pass. `given`: the layout of the output's gradient. `through_lse`: the
    log-sum-exp has one too. `asked`: the tensors whose gradients are asked for, by their first letters."""

    draw: Draw = field(repr=False)
    sizes: Extents
    dtype: torch.dtype
    layouts: Layouts
    given: Layout
    options: Options
    lists: ListsOf | None
    through_lse: bool
    asked: str
    deterministic: bool | None
    lookup: bool
    mode: Mode

    def __str__(self) -> str:
        return f"gradient {described(self)}"

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["gradient of attention", f"mode {self.mode.value}", *self.options.features]
        names += [f"gradient with {name}" for name in self.lists.features] if self.lists else []
        names += ["gradient of log-sum-exp"] if self.through_lse else []
        names += ["gradient of a mask"] if "m" in self.asked else []
        names += ["gradient of sinks"] if "s" in self.asked else []
        names += ["gradient in free order"] if self.deterministic is False else []
        return (*names, *self.layouts.features)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, s, device = Draw("gradient values", self.draw.number, settings), self.sizes, settings.device
        made = Contents(s, s.batch, s.q_len, s.k_len, self.dtype, self.lookup, device, seeds.value_seed())
        storage = contents.storage_for(self.layouts.storage, s, s.q_len == s.k_len)
        rows = contents.lay_out(arena, self.layouts, storage, [made.values(g) for g in (0, 1)], packed=False)
        given = masks.give(self.options, s, arena, seeds)

        def values(shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
            seed = seeds.value_seed()
            return lambda generation: normal(shape, dtype, seed=seed + generation, device=device)

        out_shape = (s.batch, s.q_len, s.heads, s.dim_v)
        received = [arena.input("d_out", values(out_shape, self.dtype), self.given)]
        if self.through_lse:
            shape = (s.batch, s.heads, s.q_len)
            received.append(arena.input("d_lse", values(shape, torch.float32)))
        lists = None
        if self.lists is not None:
            lists = block_lists.lay_out(self.lists, given, s, arena, seeds)
        return Call(
            run=self._run(Operations(settings), rows, given, received, lists),
            check=lambda results: self._backward(rows, given, tuple(received), lists).check(results),
            arguments=NAMES,
            repeats=self.deterministic is not False,
        )

    def _run(
        self,
        operations: Operations,
        rows: Operands,
        given: masks.Given,
        received: list[torch.Tensor],
        lists: block_lists.Made | None,
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        options = {**given.keywords(), "return_lse": True, "deterministic": self.deterministic}
        if self.lists is not None and self.lists.kind == "BlockMask":
            options.pop("mask_mod")

        def run() -> tuple[torch.Tensor, ...]:
            blocks = {} if lists is None else {"blocks": lists.make()}
            tensors = leaves(rows, given, self.asked)
            q, k, v = (tensors.pop(name) for name in "qkv")
            found = operations.attention(q, k, v, **{**options, **tensors, **blocks})
            asked = [x for x in (q, k, v, *tensors.values()) if x.requires_grad]
            return torch.autograd.grad(found[: len(received)], asked, received)

        return run

    def _backward(
        self,
        rows: Operands,
        given: masks.Given,
        received: tuple[torch.Tensor, ...],
        lists: block_lists.Made | None,
    ) -> Backward:
        sizes, spread = self.sizes, None
        if lists is not None and lists.listed:
            spread = block_lists.spread(lists.on_cpu(), sizes, rows.q.device)
        part = Part(sizes.batch, sizes.heads, sizes.q_len, sizes.k_len)
        piece = Piece(slice(0, sizes.q_len), slice(0, sizes.k_len), part, spread)
        return Backward(rows, given, received, (piece,), sizes, self.asked)


def draw_asked(draw: Draw, options: Options) -> str:
    """The tensors whose gradients are asked for, by their first letters."""
    pick = draw.kernel
    asked = pick.choice(("qkv", "qkv", "q", "kv", "k", "v", "qv"))
    if options.mask is not None and options.mask.dtype != torch.bool:
        asked = pick.choice((asked, asked + "m", "m"))
    if options.sinks is not None:
        asked = pick.choice((asked, asked + "s"))
    return asked


def draw_gradient(draw: Draw) -> GradientCase:
    """A case of gradients: all that `attention` takes and has gradients for."""
    pick, data = draw.kernel, draw.data
    sizes = draw_sizes(draw, None)
    options = differentiable(masks.draw_options(draw))
    lookup = data.random() < 0.25
    if lookup:
        options = replace(options, scale=contents.LOOKUP_SCALE)
    layouts = contents.draw_layouts(draw, 4, with_out=0.0)
    asked, dtype, given = draw_asked(draw, options), pick.choice(DTYPES), draw.layout(4)
    through_lse, deterministic = pick.random() < 0.3, pick.choice((None, None, True, False))
    mode, lists = draw.mode(graph=False), block_lists.draw_lists(draw, LISTS, None, 0.3)
    if lists is not None and lists.kind == "BlockMask":
        options = block_lists.fit(lists, options)
        some = {name: max(getattr(sizes, name), 1) for name in ("q_len", "k_len", "batch")}
        sizes = replace(sizes, **some)
    return GradientCase(
        draw, sizes, dtype, layouts, given, options, lists, through_lse, asked, deterministic, lookup, mode
    )


def differentiable(options: Options) -> Options:
    """`options` without a function that takes a number: a node of autograd takes tensors alone."""
    if options.functions is not None and "number" in FUNCTIONS[options.functions].aux:
        return replace(options, functions=None)
    return options
