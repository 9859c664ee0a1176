"""The question that `advise` answers, and its answer, as plain data that a file keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lowering.records import frozen

Block = tuple[int, int]
_COLUMNS = "{:>10}  {:>8}  {:>8}  {}"


def block_text(block: Block) -> str:
    """ "64x64"."""
    return f"{block[0]}x{block[1]}"


@frozen
class Question:
    """A product a @ w.t(): a (M, K), w (N, K). dtype: "bf16" or "fp16", of what is not fp8.

    density: the share of w's blocks that are kept, None to ask about dense calls and crossovers alone.
    blocks: the sizes of w's blocks to try.
    """

    m: int
    n: int
    k: int
    dtype: str
    density: float | None
    blocks: tuple[Block, ...]

    @property
    def shape(self) -> str:
        """ "8192x8192x8192": M, N and K."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def key(self) -> str:
        """A text that names the question."""
        return f"{self.shape}/{self.dtype}/{self.density}/{','.join(map(block_text, self.blocks))}"

    def __str__(self) -> str:
        kept = (
            "" if self.density is None else f", {self.density:.3%} of w's blocks kept".replace(".000%", "%")
        )
        return f"a @ w.t() of M, N, K = {self.shape}, {self.dtype}{kept}"


@frozen
class Choice:
    """A way to compute the product, and its time in milliseconds.

    dense_ms: our dense product's in the question's dtype, in the same run: ratios hold across runs, times do
    not. before_ms: what a caller pays besides for each new a, to quantize it; 0 where nothing.
    """

    call: str
    kind: str
    ms: float
    dense_ms: float
    before_ms: float = 0.0

    @property
    def speedup(self) -> float:
        """The dense product's time divided by this one's, without what comes before."""
        return self.dense_ms / self.ms

    @property
    def is_exact(self) -> bool:
        """True where the operands keep their dtype: not for fp8."""
        return not self.kind.startswith("fp8")


@frozen
class Crossover:
    """The density from which on the fastest dense product is faster than `bsr_gemm` with blocks of this size.

    None: the sparse product is faster even with all blocks. at_most: the dense product won at the lowest
    density that was measured, which this is.
    """

    block: Block
    density: float | None
    at_most: bool = False

    def __str__(self) -> str:
        if self.density is None:
            return f"{block_text(self.block)} at no density"
        return f"{block_text(self.block)} from {'at most ' * self.at_most}{self.density:.1%} on"


@frozen
class Advice:
    """The answer: choices by speed, the fastest first, and where dense overtakes sparse.

    source: what the figures are of: this GPU, or another one's results that are part of the source checkout.
    measured: True for this GPU. refused: what was not tried, and why.
    """

    question: Question
    source: str
    measured: bool
    choices: tuple[Choice, ...]
    crossovers: tuple[Crossover, ...]
    refused: tuple[str, ...]

    def fastest(self, exact: bool = False) -> Choice:
        """The fastest choice; with `exact`, of those that leave the operands in their dtype."""
        return next(choice for choice in self.choices if choice.is_exact or not exact)

    def crossover(self, block: Sequence[int]) -> Crossover | None:
        """That of a block size; None where there is no figure."""
        return next((found for found in self.crossovers if found.block == tuple(block)), None)

    def to_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [str(self.question), self.source]
        lines.append(_COLUMNS.format("ms", "x dense", "before", "call"))
        for choice in self.choices:
            before = f"{choice.before_ms:.4f}" if choice.before_ms else "-"
            lines.append(_COLUMNS.format(f"{choice.ms:.4f}", f"{choice.speedup:.2f}", before, choice.call))
        if any(choice.before_ms for choice in self.choices):
            lines.append("before: ms to quantize a, for each new a; w is quantized once")
        if self.crossovers:
            lines.append("dense is faster than bsr_gemm: " + ", ".join(map(str, self.crossovers)))
        lines += [f"not tried: {reason}" for reason in self.refused]
        return "\n".join(lines)


def answer(question: Question, source: str, data: dict[str, Any]) -> Advice:
    """The advice that `Advice.to_json` wrote. KeyError, TypeError and ValueError where it is none."""
    return Advice(
        question,
        source,
        bool(data["measured"]),
        tuple(Choice(**choice) for choice in data["choices"]),
        tuple(Crossover(**{**found, "block": pair(found["block"])}) for found in data["crossovers"]),
        tuple(map(str, data["refused"])),
    )


def pair(block: Sequence[int]) -> Block:
    """A block size. ValueError where it is no pair."""
    rows, columns = block
    return int(rows), int(columns)


def crossing(
    block: Block, densities: Sequence[float], ms: Sequence[float], dense: Sequence[float]
) -> Crossover:
    """The density where the dense product overtakes the sparse one, by linear interpolation between measured
    densities, which rise."""
    ratios = [sparse / whole for sparse, whole in zip(ms, dense)]
    for index, ratio in enumerate(ratios):
        if ratio >= 1.0:
            if index == 0:
                return Crossover(block, densities[0], at_most=True)
            before, step = ratios[index - 1], densities[index] - densities[index - 1]
            return Crossover(block, densities[index - 1] + step * (1.0 - before) / (ratio - before))
    return Crossover(block, None)
