"""Cases of `merge_states`, with gradients: states that have seen no key, and hold NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from reference import tolerance
from reference.inputs import normal
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = ("out", "lse", "out_dtype")
_LSE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class MergeCase:
    """One call. `shape`: of the states' outputs (n, …, H, Dv). `unseen`: odds of a state without keys."""

    draw: Draw = field(repr=False)
    shape: tuple[int, ...]
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    out: Layout
    lse: Layout
    unseen: float
    gradients: bool
    mode: Mode

    def __str__(self) -> str:
        return "merge " + described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["merge_states", f"mode {self.mode.value}"]
        names += ["gradient of merge_states"] if self.gradients else []
        names += ["empty"] if 0 in self.shape else []
        return tuple(names + (["states without keys"] if self.unseen else []))

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, operations = Draw("merge values", self.draw.number, settings), Operations(settings)
        device, seed, of_gradient = settings.device, seeds.value_seed(), seeds.value_seed()

        def sums(generation: int) -> torch.Tensor:
            values = normal(self.shape[:-1], torch.float32, seed=seed + generation, device=device, scale=8.0)
            picks = torch.Generator().manual_seed(seed + generation)
            unseen = torch.rand(values.shape, generator=picks) < self.unseen
            return values.masked_fill(unseen.to(device), -math.inf)

        def outputs(generation: int) -> torch.Tensor:
            values = normal(self.shape, self.dtype, seed=seed + 2 + generation, device=device)
            return values.masked_fill((sums(generation) == -math.inf)[..., None], torch.nan)

        out, lse = arena.input("out", outputs, self.out), arena.input("lse", sums, self.lse)
        result = self.out_dtype or self.dtype
        received = ()
        if self.gradients:
            received = (
                arena.input("d_out", lambda g: normal(self.shape[1:], result, seed=of_gradient + g)),
                arena.input(
                    "d_lse", lambda g: normal(self.shape[1:-1], torch.float32, seed=of_gradient + g + 2)
                ),
            )

        def run() -> tuple[torch.Tensor, ...]:
            if not self.gradients:
                return tuple(operations.merge_states(out, lse, out_dtype=self.out_dtype))
            leaves = [x.detach().requires_grad_() for x in (out, lse)]
            found = operations.merge_states(*leaves, out_dtype=self.out_dtype)
            return (*(x.detach() for x in found), *torch.autograd.grad(found, leaves, received))

        return Call(
            run=run,
            check=lambda found: self._check(found, out, lse, received),
            arguments=NAMES,
            must_refuse="out" if self.shape[0] == 0 else None,
        )

    def _check(
        self,
        found: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        lse: torch.Tensor,
        received: tuple[torch.Tensor, ...],
    ) -> None:
        merged, merged_lse = found[:2]
        assert tuple(merged.shape) == self.shape[1:] and merged.dtype == (self.out_dtype or self.dtype)
        assert tuple(merged_lse.shape) == self.shape[1:-1] and merged_lse.dtype == torch.float32
        empty = (lse == -math.inf)[..., None]
        states = out.resolve_neg().double().masked_fill(empty, 0.0)
        exact, exact_lse = _merged(states, lse.resolve_neg().double())
        like, _ = _merged(states.float(), lse.resolve_neg())
        tolerance.check(merged, exact, like.to(merged.dtype), ulps=2.0)
        close = (merged_lse == exact_lse) | ((merged_lse - exact_lse).abs() < _LSE_TOLERANCE)
        assert bool(close.all()), f"{int((~close).sum())} log-sum-exps differ"
        if self.gradients:
            self._check_gradients(found[2:], states, lse.resolve_neg(), received)

    def _check_gradients(
        self,
        found: tuple[torch.Tensor, ...],
        states: torch.Tensor,
        lse: torch.Tensor,
        received: tuple[torch.Tensor, ...],
    ) -> None:
        """With float64; a state without keys, and a row without any, have none."""
        exact, like = (
            torch.autograd.grad(_merged(*leaves), leaves, [x.to(dtype) for x in received])
            for dtype in (torch.float64, torch.float32)
            for leaves in [[x.detach().to(dtype).requires_grad_() for x in (states, lse)]]
        )
        for name, x, y, z in zip(("out", "lse"), found, exact, like):
            assert bool(x.isfinite().all()), f"the gradient of {name} is not finite"
            tolerance.check(x, y.nan_to_num(0.0), z.nan_to_num(0.0).to(x.dtype), ulps=8.0, case=f"d_{name}")


def _merged(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    merged = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(merged == -math.inf, 0.0, merged))
    return (weights[..., None] * out).sum(0), merged


def draw_merge(draw: Draw) -> MergeCase:
    """A case of `merge_states`."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    rows = (1, 2, 3, 7, 16, 33) if small else (1, 2, 3, 7, 16, 33, 64, 129, 500)
    middle = tuple(draw.extent(rows) for _ in range(pick.choice((0, 1, 2, 2))))
    states = 0 if data.random() < 0.03 else data.choice((1, 2, 3, 5) if small else (1, 2, 3, 5, 8, 31))
    columns = draw.extent((1, 7, 8, 24, 64, 72, 128) if small else (1, 7, 8, 64, 72, 128, 256, 500))
    shape = (states, *middle, draw.extent((1, 2, 3, 5)), columns)
    dtype = pick.choice(DTYPES)
    return MergeCase(
        draw, shape, dtype, pick.choice((None, None, *DTYPES)), draw.layout(len(shape), expand=False),
        draw.layout(len(shape) - 1, expand=False), data.choice((0.0, 0.1, 0.5, 1.0)),
        pick.random() < 0.3 and draw.settings.plant is None, draw.mode(graph=False),
    )  # fmt: skip
