"""Calls of fp8 operations with a tensor whose rows reach past 2³¹ elements, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from reference.buffers import bits
from tests.fuzz.case import Call, Mode, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.fp8_values import E4M3, INTEGERS, check_same, operand
from tests.fuzz.gemm_huge import alone_on_the_gpu
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

_BEYOND = 1 << 31
_BETWEEN = 7
"""The value of every byte between far rows."""
_PLACES = ("quantize x", "scaled_gemm a", "scaled_gemm b", "scaled_gemm out", "attention_fp8 q",
           "attention_fp8 k", "attention_fp8 out")  # fmt: skip


class _Far:
    """A place like `near` (rows, width), its rows so far apart that the last is past 2³¹ elements."""

    def __init__(self, near: torch.Tensor) -> None:
        pitch = -(-_BEYOND // (near.shape[0] - 1) // 64) * 64
        self.memory = torch.empty(near.shape[0] * pitch, dtype=near.dtype, device=near.device)
        self.bytes = self.memory.view(torch.uint8)
        self.bytes.fill_(_BETWEEN)
        self.rows = self.memory.as_strided(near.shape, (pitch, 1))
        self.rows.copy_(near)

    def check_between(self) -> None:
        """AssertionError where anything but the rows was written."""
        bits(self.rows).zero_()
        wrong = int((self.bytes != _BETWEEN).sum()) - self.rows.numel() * self.memory.element_size()
        assert wrong == 0, f"{wrong} bytes between the rows were written"


@dataclass(frozen=True)
class HugeCase:
    """One call with a far tensor, compared with the same call on one that is not."""

    draw: Draw = field(repr=False)
    which: str
    m: int
    n: int
    k: int
    mode: Mode = Mode.PLAIN

    def __str__(self) -> str:
        return f"huge {self.which} m={self.m} n={self.n} k={self.k}"

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        return (self.which.split()[0], "fp8 beyond 2^31 elements", f"huge {self.which}")

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`; the far one is made within the call, alone on the GPU."""
        seeds, device = Draw("fp8 huge values", self.draw.number, self.draw.settings), settings.device
        operations = Operations(settings)
        operation, name = self.which.split()
        x = arena.input("x", filler((self.m, self.k), torch.bfloat16, seeds.value_seed(), device, False))
        made = {}
        for of, rows in (("a", self.m), ("b", self.n)):
            fill = operand((rows, self.k), E4M3, seeds.value_seed(), device, INTEGERS)
            made[of] = arena.input(of, fill)
        one = arena.input("scale", lambda g: torch.ones(()))

        def call(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            if operation == "quantize":
                return operations.quantize(tensors["x"], scaling="row")[0]
            if operation == "scaled_gemm":
                a, b = tensors["a"], tensors["b"].mT
                return operations.scaled_gemm(a, b, one, one, out=tensors.get("out"))
            q, k = (tensors[part][None, :, None] for part in ("q", "k"))
            out = tensors["out"][None, :, None] if "out" in tensors else None
            return operations.attention_fp8(q, k, k, out=out, scale=0.1)[0, :, 0]

        given = {"x": x, **made, "q": made["a"], "k": made["b"]}

        def run() -> tuple[torch.Tensor, ...]:
            near = call(given).clone()
            with alone_on_the_gpu():
                far = _Far(given.get(name, near))
                found = call({**given, name: far.rows}).clone()
                far.check_between()
                del far
            return near, found

        return Call(run, lambda found: check_same(found[1], found[0], self.which), (name,))


def draw_huge(draw: Draw) -> HugeCase:
    """A case with far rows. K is a head dimension, too."""
    m, n = (draw.data.choice((2, 33, 64, 130, 257)) for _ in range(2))
    return HugeCase(draw, draw.data.choice(_PLACES), m, n, draw.data.choice((64, 128, 256)))
