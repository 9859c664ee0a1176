"""Cases of `quantize_qkv`: scales of heads and of blocks of keys, with rotations and without."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels_dsl.ops.attention.fp8_inputs import rotations
from reference import quantize as reference
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_quantize import awkward
from tests.fuzz.fp8_values import E4M3, check_same
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

NAMES = ("q", "k", "v", "rotate", "scaling")
_NAMES = ("k", "k_descale", "q", "q_descale", "v", "v_descale")
_LENGTHS = (1, 2, 17, 64, 100, 127, 128, 129, 256, 300, 513, 1000, 2000)
_KEYS = 128


@dataclass(frozen=True)
class QkvCase:
    """One call. `lengths`: of q, and of k and v. `wrong`: the tensor that is not what it must be."""

    draw: Draw = field(repr=False)
    batch: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    layouts: tuple[Layout, Layout, Layout]
    rotate: bool
    scaling: str
    wrong: str | None
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        names = ["quantize_qkv", f"mode {self.mode.value}", f"quantize_qkv {self.scaling}"]
        names += ["quantize_qkv rotated"] if self.rotate else []
        return tuple(names + (["empty"] if 0 in (*self.lengths, self.batch) else []))

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds = Draw("fp8 qkv values", self.draw.number, self.draw.settings)
        operations, device = Operations(settings), settings.device
        made = []
        for i, name in enumerate("qkv"):
            length, heads, dim = self.lengths[min(i, 1)], self.heads[min(i, 1)], self.dims[i // 2]
            shape = (self.batch, length, heads, dim)
            if self.wrong == name:
                shape = (self.batch, length, heads, dim, 1)
            seed = seeds.value_seed()
            fill = awkward(shape, self.dtype, seed, device, False)
            if self.rotate and i < 2:
                fill = filler(shape, self.dtype, seed, device, False)
            made.append(arena.input(name, fill, self.layouts[i] if len(shape) == 4 else Layout()))

        def run() -> tuple[torch.Tensor, ...]:
            found = operations.quantize_qkv(*made, rotate=self.rotate, scaling=self.scaling)
            assert sorted(found) == sorted(_NAMES)
            return tuple(found[name] for name in _NAMES)

        return Call(run, lambda found: self._check(found, made), NAMES, must_refuse=self.wrong)

    def _check(self, found: tuple[torch.Tensor, ...], tensors: list[torch.Tensor]) -> None:
        results = dict(zip(_NAMES, found))
        turns = [None, None, None]
        if self.rotate:
            turns = [*rotations(self.dims[0], self.dtype, tensors[0].device), None]
        for name, tensor, turn in zip("qkv", tensors, turns):
            x = tensor.resolve_neg().transpose(1, 2)
            values, scales = results[name].transpose(1, 2), results[f"{name}_descale"]
            blocks = self.scaling == "block" and name != "q"
            if turn is not None:
                self._check_rotated(values, scales, x.double() @ turn.double(), name, blocks)
                continue
            expected = self._expected(x, blocks)
            check_same(scales, expected[1], f"scales of {name}")
            check_same(values, expected[0], f"values of {name}")

    def _expected(self, x: torch.Tensor, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, scales) of x (B, H, S, D)."""
        if not blocks:
            return reference.quantize(x, E4M3, scaling="matrix")
        if x.shape[-1] <= _KEYS:
            return reference.quantize(x, E4M3, scaling="128x128")
        parts = x.reshape(*x.shape[:2], x.shape[2] // _KEYS, _KEYS, x.shape[3])
        values, scale = reference.quantize(parts, E4M3, scaling="matrix")
        return values.flatten(2, 3), scale[..., 0]

    def _check_rotated(
        self, values: torch.Tensor, scales: torch.Tensor, exact: torch.Tensor, name: str, blocks: bool
    ) -> None:
        """Rotated tensors are rounded to their dtype first, by whatever multiplies them."""
        wanted = self._expected(exact.to(self.dtype), blocks)[1]
        eps = torch.finfo(self.dtype).eps
        assert scales.shape == wanted.shape and values.shape == exact.shape, name
        assert bool(((scales - wanted).abs() <= 4 * eps * wanted).all()), f"scales of {name}"
        each = scales.double()
        each = each.repeat_interleave(_KEYS, 2)[:, :, : exact.shape[2]] if blocks else each
        bound = exact.abs() * (1 / 16 + 2 * eps) + each * 2.0**-9
        bound = bound + eps * exact.abs().amax(-1, keepdim=True) if exact.numel() else bound
        error = (reference.from_fp8(values) * each - exact).abs()
        assert bool((error <= bound).all()), (
            f"values of {name}: {float((error - bound).max())} over the bound"
        )


def draw_qkv(draw: Draw) -> QkvCase:
    """A case of `quantize_qkv`."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    scaling, rotate = pick.choice(("head", "head", "block")), pick.random() < 0.3
    dims = (16, 48, 64, 96, 128) if small else (8, 16, 40, 64, 80, 96, 128, 192, 256)
    dim = pick.choice(dims)
    dim_v = draw.often(dim, *dims)
    pool = _LENGTHS[:8] if small else _LENGTHS
    multiple = _KEYS if scaling == "block" and max(dim, dim_v) > _KEYS else 1
    k_len = draw.extent(pool[:9], multiple, zero=0.0 if multiple > 1 else 0.03)
    q_len = k_len if pick.random() < 0.6 else draw.extent(pool)
    kv_heads = data.choice((1, 2) if small else (1, 2, 3, 8))
    return QkvCase(
        draw, data.choice((1, 2) if small else (1, 2, 3, 0)), (q_len, k_len),
        heads=(kv_heads * data.choice((1, 2, 4)), kv_heads), dims=(dim, dim_v),
        dtype=pick.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        layouts=(draw.layout(4), draw.layout(4), draw.layout(4)), rotate=rotate, scaling=scaling,
        wrong=data.choice("qkv") if data.random() < 0.03 else None, mode=draw.mode(),
    )  # fmt: skip
