"""The reference of attention's gradients, by autograd in float64 and in 16 bits, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from reference import tolerance
from reference.attention import attention
from reference.gradient_rounding import row_sum_errors
from tests.fuzz import attention_contents as contents
from tests.fuzz import attention_options as masks
from tests.fuzz.attention_contents import Operands
from tests.fuzz.attention_options import Extents, Piece

_FLOOR = 8 * torch.finfo(torch.float32).eps
"""Of |dP|, the sums of |dO| |V|: where a query sees one key, dP and its row's mean are the same sum in two
orders, whose difference is exactly 0."""
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Backward:
    """A call and its backward pass, all (B, S, H, D), packed rows with a batch of 1.

    received: gradients of the output and perhaps of the log-sum-exp (B, H, Sq). asked: the tensors whose
    gradients are asked for, by their first letters.
    """

    rows: Operands
    given: masks.Given
    received: tuple[torch.Tensor, ...]
    pieces: tuple[Piece, ...]
    sizes: Extents
    asked: str

    def check(self, results: Iterable[torch.Tensor]) -> None:
        """Compare gradients in the order of `attention`'s arguments with the reference."""
        exact, peer = (self._reference(dtype) for dtype in (torch.float64, self.rows.q.dtype))
        for name, error in self._errors(exact).items():
            peer[name] = exact[name] + (peer[name] - exact[name]).abs() + error
        floors, inputs = self._floors(), dict([*zip("qkv", self.rows), *beside(self.given)])
        found = iter(results)
        for name in (name for name in exact if name[0] in self.asked):
            x, own, expected = inputs[name], next(found), exact[name]
            assert own.dtype == x.dtype and own.numel() == x.numel(), (own.shape, x.shape, own.dtype, x.dtype)
            own = own.reshape(x.shape)
            assert bool(own.isfinite().all()), f"the gradient of {name} is not finite"
            # An error below the floor is none.
            error = own.double() - expected
            error = torch.where(error.abs() <= floors[name], 0.0, error)
            counted = (expected + error).to(own.dtype)
            tensors = (y.transpose(1, 2) if name in "qkv" else y for y in (counted, expected, peer[name]))
            tolerance.check(*tensors, ulps=contents.ULPS, case=f"gradient of {name}")

    def _reference(self, dtype: torch.dtype) -> Gradients:
        """Gradients by autograd of the reference in `dtype`, as float64."""
        inner = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = [
            (name, x.resolve_neg().to(inner)) for name, x in beside(self.given) if name[0] in self.asked
        ]
        tensors = [*((name, x.resolve_neg().to(dtype)) for name, x in zip("qkv", self.rows)), *tensors]
        leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors}
        others = {name: x for name, x in leaves.items() if name not in "qkv"}
        outputs: dict[torch.Tensor, torch.Tensor] = {}
        for piece in self.pieces:
            rules = masks.masking(replace(self.given, **others), piece.part, piece.spread)
            q, k, v = (x[:, rows] for x, rows in zip(leaves.values(), self._slices(piece)))
            results = attention(q, k, v, rules, scale=self.given.options.scale, dtype=dtype)
            # Nothing depends on keys that are not there, and without any neither does the log-sum-exp.
            own = zip(self._of(piece), results)
            outputs.update((x, gradient.to(x.dtype)) for gradient, x in own if x.requires_grad)
        copies = list(leaves.values())
        if not outputs:
            return {name: torch.zeros_like(x, dtype=torch.float64) for name, x in leaves.items()}
        found: Any = torch.autograd.grad(list(outputs), copies, list(outputs.values()), allow_unused=True)
        return {
            name: torch.zeros_like(x, dtype=torch.float64) if y is None else y.double()
            for (name, x), y in zip(leaves.items(), found)
        }

    def _errors(self, exact: Gradients) -> Gradients:
        """Errors of rounding that no average hides, see `gradient_rounding`."""
        found = {name: torch.zeros_like(exact[name]) for name in ("q", "k", "mask") if name in exact}
        for piece in self.pieces:
            rules = masks.masking(self.given, piece.part, piece.spread)
            own = Operands(*(x.resolve_neg()[:, rows] for x, rows in zip(self.rows, self._slices(piece))))
            d_out = self._of(piece)[0]
            scale = self.given.options.scale
            for name, error in row_sum_errors(own, rules, d_out, scale=scale).items():
                if name == "mask" and name in found:
                    masks.of_part(found[name], piece.part).add_(error)
                elif name in "qk":
                    found[name][:, self._slices(piece)["qk".index(name)]] += error
        if "mask" in found:
            found["mask"] += exact["mask"].abs() * torch.finfo(self.rows.q.dtype).eps / 2
        return found

    def _floors(self) -> dict[str, float]:
        """The largest errors that sums in float32 may make where the gradients are 0.

        A row's sum of dO * O is of the rounded output. The gradients of sinks, and of a mask that is one
        number for all keys, are such sums.
        """
        sizes, largest, longest, queries = self.sizes, 0.0, 0, 0
        tops = {"q": 0.0, "k": 0.0}
        for piece in self.pieces:
            q, k, v = (x.resolve_neg()[:, i].double().abs() for x, i in zip(self.rows, self._slices(piece)))
            if 0 in (q.numel(), k.numel(), v.numel()):
                continue
            values, d_out = v.repeat_interleave(sizes.group, dim=2), self._of(piece)[0].double().abs()
            largest = max(largest, float(torch.einsum("bihd,bjhd->bhij", d_out, values).max()))
            tops = {"q": max(tops["q"], float(q.max())), "k": max(tops["k"], float(k.max()))}
            longest, queries = max(longest, q.shape[1]), queries + q.shape[0] * q.shape[1]
        scale = self.given.options.scale or 1 / math.sqrt(sizes.dim)
        most, rows = largest * scale * _FLOOR, math.sqrt(longest * sizes.group)
        rounded, mask = torch.finfo(self.rows.q.dtype).eps * largest, self.given.mask
        floors = {"q": most * tops["k"], "k": most * tops["q"] * rows, "v": 0.0}
        floors["sinks"] = rounded * math.sqrt(queries)
        if mask is not None:
            summed = math.sqrt(queries * sizes.heads / max(mask.numel(), 1))
            one_for_all = mask.dim() == 0 or mask.shape[-1] == 1
            floors["mask"] = max(1.0, summed) * (rounded if one_for_all else _FLOOR * largest)
        return floors

    @staticmethod
    def _slices(piece: Piece) -> list[slice]:
        """The rows of q, of k and of v."""
        return [piece.queries, piece.keys, piece.keys]

    def _of(self, piece: Piece) -> list[torch.Tensor]:
        """The gradients that a piece's results get."""
        out, *lse = (x.resolve_neg() for x in self.received)
        return [out[:, piece.queries], *(x[..., piece.queries] for x in lse)]


def beside(given: masks.Given) -> list[tuple[str, torch.Tensor]]:
    """The tensors beside q, k and v that may have gradients, by their names."""
    tensors = (("mask", given.mask), ("sinks", given.sinks))
    return [(name, x) for name, x in tensors if x is not None and x.dtype.is_floating_point]


def leaves(rows: Operands, given: masks.Given, asked: str) -> Gradients:
    """The call's tensors by their names, those that are asked for as leaves; q, k and v come first."""
    tensors = {n: x.detach().requires_grad_(n in asked) for n, x in zip("qkv", rows)}
    return {**tensors, **{n: x.detach().requires_grad_() for n, x in beside(given) if n[0] in asked}}
