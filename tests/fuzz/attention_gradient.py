"""Cases of attention's gradients: of q, k, v, an additive mask and sinks, through the output and perhaps the
log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reference import tolerance
from reference.attention import Masking, attention
from reference.gradient_rounding import mask_error, row_sum_errors
from reference.inputs import normal
from tests.fuzz import attention_contents as contents
from tests.fuzz import attention_options as masks
from tests.fuzz.attention_contents import Contents, Layouts, Operands
from tests.fuzz.attention_dense import DTYPES, NAMES, draw_sizes
from tests.fuzz.attention_functions import FUNCTIONS
from tests.fuzz.attention_options import Extents, Options, Part
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations

_FLOOR = 8 * torch.finfo(torch.float32).eps
"""Of |dP|, the sums of |dO| |V|: where a query sees one key, dP and its row's mean are the same sum in two
orders, whose difference is exactly 0."""


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
        gradients = [arena.input("d_out", values(out_shape, self.dtype), self.given)]
        if self.through_lse:
            shape = (s.batch, s.heads, s.q_len)
            gradients.append(arena.input("d_lse", values(shape, torch.float32)))
        return Call(
            run=self._run(Operations(settings), rows, given, gradients),
            check=lambda results: self._check(results, rows, given, gradients),
            arguments=NAMES,
            repeats=self.deterministic is not False,
        )

    def _run(
        self, operations: Operations, rows: Operands, given: masks.Given, gradients: list[torch.Tensor]
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        options = {**given.keywords(), "return_lse": True, "deterministic": self.deterministic}

        def run() -> tuple[torch.Tensor, ...]:
            tensors = [x.detach().requires_grad_(name in self.asked) for name, x in zip("qkv", rows)]
            beside = {n: x.detach().requires_grad_() for n, x in _beside(given) if n[0] in self.asked}
            found = operations.attention(*tensors, **{**options, **beside})
            leaves = [x for x in (*tensors, *beside.values()) if x.requires_grad]
            return torch.autograd.grad(found[: len(gradients)], leaves, gradients)

        return run

    def _check(
        self,
        results: tuple[torch.Tensor, ...],
        rows: Operands,
        given: masks.Given,
        gradients: list[torch.Tensor],
    ) -> None:
        operands = Operands(*(x.resolve_neg() for x in rows))
        received = [x.resolve_neg() for x in gradients]
        exact, peer = (
            self._reference(operands, given, received, dtype) for dtype in (torch.float64, self.dtype)
        )
        rules, scale = masks.masking(given, Part(*self._extents)), self.options.scale
        for name, error in row_sum_errors(operands, rules, received[0], scale=scale).items():
            peer[name] = exact[name] + (peer[name] - exact[name]).abs() + error
        if "mask" in exact:
            error = mask_error(exact["mask"], operands, rules, received[0], scale=scale)
            peer["mask"] = exact["mask"] + (peer["mask"] - exact["mask"]).abs() + error
        floors = self._floors(operands, received[0], given)
        found = iter(results)
        inputs = dict([*zip("qkv", operands), *_beside(given)])
        for name, expected in exact.items():
            if name[0] in self.asked:
                x, theirs = inputs[name], peer[name]
                own = next(found)
                assert own.shape == x.shape and own.dtype == x.dtype, (own.shape, own.dtype)
                assert bool(own.isfinite().all()), f"the gradient of {name} is not finite"
                # An error below the floor is none.
                error = own.double() - expected
                error = torch.where(error.abs() <= floors[name], 0.0, error)
                counted = (expected + error).to(own.dtype)
                tensors = (y.transpose(1, 2) if name in "qkv" else y for y in (counted, expected, theirs))
                tolerance.check(*tensors, ulps=contents.ULPS, case=f"gradient of {name}")

    def _floors(self, operands: Operands, d_out: torch.Tensor, given: masks.Given) -> dict[str, float]:
        """The largest errors that sums in float32 may make where the gradients are 0.

        A row's sum of dO * O is of the rounded output. The gradients of sinks, and of a mask that is one
        number for all keys, are such sums.
        """
        q, k, v = (x.double().abs() for x in operands)
        if 0 in (q.numel(), k.numel(), v.numel()):
            return dict.fromkeys(("q", "k", "v", "mask", "sinks"), 0.0)
        scale = self.options.scale or 1 / math.sqrt(self.sizes.dim)
        values = v.repeat_interleave(self.sizes.group, dim=2)
        largest = float(torch.einsum("bihd,bjhd->bhij", d_out.double().abs(), values).max())
        most = largest * scale * _FLOOR
        rows = math.sqrt(self.sizes.q_len * self.sizes.group)
        floors = {"q": most * float(k.max()), "k": most * float(q.max()) * rows, "v": 0.0}
        rounded, queries = torch.finfo(self.dtype).eps * largest, self.sizes.batch * self.sizes.q_len
        floors["sinks"] = rounded * math.sqrt(queries)
        if given.mask is not None:
            summed = math.sqrt(queries * self.sizes.heads / max(given.mask.numel(), 1))
            one_for_all = given.mask.dim() == 0 or given.mask.shape[-1] == 1
            floors["mask"] = max(1.0, summed) * (rounded if one_for_all else _FLOOR * largest)
        return floors

    @property
    def _extents(self) -> tuple[int, int, int, int]:
        s = self.sizes
        return s.batch, s.heads, s.q_len, s.k_len

    def _reference(
        self, operands: Operands, given: masks.Given, gradients: list[torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Gradients by autograd of the reference in `dtype`, as float64."""
        inner = torch.float64 if dtype == torch.float64 else torch.float32
        asked = [(name, x.resolve_neg().to(inner)) for name, x in _beside(given) if name[0] in self.asked]
        beside = {name: x.detach().requires_grad_() for name, x in asked}
        rules = masks.masking(replace(given, **beside), Part(*self._extents))
        rows = {name: x.detach().to(dtype).requires_grad_() for name, x in zip("qkv", operands)}
        return _autograd({**rows, **beside}, rules, self.options.scale, gradients, dtype)


def _beside(given: masks.Given) -> list[tuple[str, torch.Tensor]]:
    """The tensors beside q, k and v that may have gradients, by their names."""
    tensors = (("mask", given.mask), ("sinks", given.sinks))
    return [(name, x) for name, x in tensors if x is not None and x.dtype.is_floating_point]


def _autograd(
    leaves: dict[str, torch.Tensor],
    rules: Masking,
    scale: float | None,
    gradients: list[torch.Tensor],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Gradients of `leaves`, of which the first are q, k and v, as float64."""
    copies = list(leaves.values())
    found = attention(*copies[:3], rules, scale=scale, dtype=dtype)[: len(gradients)]
    # Nothing depends on keys that are not there, and without any neither does the log-sum-exp.
    given = {x: d.to(x.dtype) for d, x in zip(gradients, found) if x.requires_grad}
    results: Any = torch.autograd.grad(list(given), copies, list(given.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x, dtype=torch.float64) if y is None else y.double()
        for (name, x), y in zip(leaves.items(), results)
    }


def draw_gradient(draw: Draw) -> GradientCase:
    """A case of gradients: all that `attention` takes and has gradients for."""
    pick, data = draw.kernel, draw.data
    sizes = draw_sizes(draw, None)
    options = masks.draw_options(draw)
    if options.functions is not None and "number" in FUNCTIONS[options.functions].aux:
        options = replace(options, functions=None)  # a node of autograd takes tensors alone
    lookup = data.random() < 0.25
    if lookup:
        options = replace(options, scale=contents.LOOKUP_SCALE)
    layouts = contents.draw_layouts(draw, 4, with_out=0.0)
    asked = pick.choice(("qkv", "qkv", "q", "kv", "k", "v", "qv"))
    if options.mask is not None and options.mask.dtype != torch.bool:
        asked = pick.choice((asked, asked + "m", "m"))
    if options.sinks is not None:
        asked = pick.choice((asked, asked + "s"))
    return GradientCase(
        draw, sizes, pick.choice(DTYPES), layouts, draw.layout(4), options,
        through_lse=pick.random() < 0.3, asked=asked,
        deterministic=pick.choice((None, None, True, False)), lookup=lookup, mode=draw.mode(graph=False),
    )  # fmt: skip
