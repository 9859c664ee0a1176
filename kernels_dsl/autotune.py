"""The autotuner: measures the configurations that fit a call and keeps the fastest on disk.

What it finds is used by every later `gemm` of the same problem on the same kind of GPU, in this process and
in others (see `config.tuned`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kernels_dsl.checks.options import boolean, instance, integer
from kernels_dsl.config import gemm_table
from kernels_dsl.config.gemm import GemmConfig
from kernels_dsl.config.problem import GemmProblem
from kernels_dsl.measure import interleaved
from kernels_dsl.ops.gemm.decide import tuned_record
from kernels_dsl.ops.gemm.gemm import clear_plans, gemm, plan_for, supports
from kernels_dsl.ops.gemm.product_options import CONFIGS
from kernels_dsl.ops.target import Target, target_of
from lowering.records import frozen

log = logging.getLogger("kernels_dsl")

MOST_CANDIDATES = 16
FINALISTS = 3
RASTER_GROUPS = (4, 8, 16)


@frozen
class Measured:
    """A configuration and the milliseconds that a call took with it (median)."""

    config: GemmConfig
    ms: float


def feasible(
    problem: GemmProblem, target: Target, family: str, most: int = MOST_CANDIDATES
) -> list[GemmConfig]:
    """The configurations of `family` that the model gives the best times, at most `most`, best first."""
    found = sorted(
        gemm_table.candidates(problem, target.device, family),
        key=lambda candidate: gemm_table.estimate(candidate, problem, target.device),
    )
    return [candidate.config for candidate in found[:most]]


def raster_variants(config: GemmConfig) -> list[GemmConfig]:
    """`config` with its tiles visited in other orders."""
    made = (other for group in RASTER_GROUPS for other in config.in_orders(group))
    return [other for other in made if other != config]


def _measure(
    a: torch.Tensor, b: torch.Tensor, configs: Iterable[GemmConfig], rounds: int, options: dict[str, Any]
) -> list[Measured]:
    fitting = [config for config in configs if supports(a, b, config=config, **options) is None]
    calls = {
        str(number): (lambda _set, config=config: gemm(a, b, config=config, **options))
        for number, config in enumerate(fitting)
    }
    timings = interleaved(calls, rounds=rounds) if calls else {}
    found = [Measured(config, timings[str(number)].ms) for number, config in enumerate(fitting)]
    return sorted(found, key=lambda measured: measured.ms)


def autotune_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    family: str | None = None,
    configs: Sequence[GemmConfig] | None = None,
    rounds: int = 20,
    record: bool = True,
    **options: Any,
) -> list[Measured]:
    """Measure configurations for `gemm(a, b, **options)` on the current GPU; the fastest first.

    `configs` None takes the most promising of the table, and then other orders of tiles for the best of them.
    With `record`, the winner is kept on disk beside the kernel cache and used from now on. `options` are
    arguments of `gemm`; `out` is made here if it is not among them. Takes seconds, most of them compiling.
    ValueError where no configuration fits, where the call launches nothing, and in the emulator, which has
    no times to measure.
    """
    integer("rounds", rounds, least=1)
    boolean("record", record)
    if "config" in options:
        raise TypeError("config is given, must not: autotune_gemm tries those of configs")
    for number, config in enumerate(instance("configs", configs, list, tuple, type(None)) or ()):
        instance(f"configs[{number}]", config, *CONFIGS)
    if options.get("batch_invariant", False):
        raise ValueError("batch_invariant is given, must not: the winner would be that of all calls")
    with torch.no_grad():
        plan = plan_for(a, b, family=family, **options)
        if target_of(a).emulated:
            raise ValueError(f"a is on {a.device}, must be on a CUDA device: the emulator has no times")
        if plan.decision is None:
            raise ValueError("the call has nothing to tune: its result is empty")
        target, problem = target_of(a), plan.decision.problem
        options.setdefault("out", gemm(a, b, family=family, **options))
        wanted = list(configs) if configs is not None else feasible(problem, target, plan.decision.family)
        results = _measure(a, b, wanted, rounds, options)
        if not results:
            raise ValueError(f"configs has none that fits {problem} on {target.device.name}")
        if configs is None:
            finalists = [variant for best in results[:FINALISTS] for variant in raster_variants(best.config)]
            again = [best.config for best in results[:FINALISTS]]
            # Compared with each other in one run: times of different runs differ by more than orders do.
            results = _measure(a, b, again + finalists, rounds, options) + results[FINALISTS:]
    if record:
        tuned_record().put(problem, target.device, results[0].config, results[0].ms * 1e-3)
        clear_plans()
    log.info("fastest of %d for %s: %s, %.4f ms", len(results), problem, results[0].config, results[0].ms)
    return results
