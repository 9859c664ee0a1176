"""Products whose operands or result reach past 2³¹ elements, and `autotune_gemm`, on a GPU."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reference import gemm as reference
from reference import tolerance
from tests.fuzz.case import Call, Mode, Settings
from tests.fuzz.draw import Draw
from tests.fuzz.gemm_dense import fitting
from tests.fuzz.memory import Arena
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

_BEYOND = 1 << 31


@contextmanager
def alone_on_the_gpu() -> Iterator[None]:
    """Only one process at a time holds tensors of gigabytes."""
    with open(Path(tempfile.gettempdir()) / "kernels_dsl_fuzz_huge.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            torch.cuda.empty_cache()
            fcntl.flock(lock, fcntl.LOCK_UN)


@dataclass(frozen=True)
class HugeCase:
    """One call. `which`: the tensor whose rows lie so far apart that the last is past 2³¹ elements, or
    "tune"."""

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
        return (
            ("autotune_gemm",)
            if self.which == "tune"
            else ("gemm", "beyond 2^31 elements", f"huge {self.which}")
        )

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`; the far ones are made within the call, alone on the GPU."""
        seeds, operations = Draw("huge values", self.draw.number, self.draw.settings), Operations(settings)
        fills = [
            filler(shape, torch.bfloat16, seeds.value_seed(), settings.device, True)
            for shape in ((self.m, self.k), (self.k, self.n))
        ]
        a, b = (arena.input(name, fill) for name, fill in zip("ab", fills))
        return Call(
            run=lambda: (
                self._tuned(operations, a, b) if self.which == "tune" else self._far(operations, a, b),
            ),
            check=lambda results: tolerance.check_exact(results[0], reference.gemm(a, b)),
            arguments=("a", "b", "out", "configs"),
            supports=None,
        )

    def _tuned(self, operations: Operations, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        configs = None if self.m < 3 else [fitting(config, a, b) for config in _few()]
        found = operations.autotune_gemm(a, b, rounds=2, record=False, configs=configs)
        assert found
        return operations.gemm(a, b, config=found[0].config)

    def _far(self, operations: Operations, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The product with one tensor spread over more than 2³¹ elements. What lies between stays."""
        with alone_on_the_gpu():
            rows = {"a": self.m, "b": self.k, "out": self.m}[self.which]
            width = self.k if self.which == "a" else self.n
            pitch = -(-_BEYOND // (rows - 1) // 64) * 64
            memory = torch.full((rows * pitch,), 7.0, dtype=torch.bfloat16, device=a.device)
            far = memory.as_strided((rows, width), (pitch, 1))
            if self.which == "out":
                operations.gemm(a, b, out=far)
            else:
                far.copy_(a if self.which == "a" else b)
            result = operations.gemm(far if self.which == "a" else a, far if self.which == "b" else b).clone()
            if self.which == "out":
                result = far.clone()
            far.fill_(7.0)
            assert int((memory != 7.0).sum()) == 0, "rows between the rows were written"
            del far, memory
        return result


def _few() -> list:
    from kernels_dsl.config.gemm_table import TABLES

    return [candidate.config for candidate in TABLES["sm80"][-3:]]


def draw_huge(draw: Draw) -> HugeCase:
    """A case with far rows, or of the tuner."""
    which = ("a", "b", "out", "tune")[draw.block % 4]
    m, n, k = (draw.data.choice((2, 33, 64, 130, 257)) for _ in range(3))
    return HugeCase(draw, which, m, n, k)
