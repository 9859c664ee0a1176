"""`advise`: measures once which call is the fastest for a shape on this GPU, and keeps the answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from kernels_dsl._version import __version__
from kernels_dsl.advice import calls
from kernels_dsl.advice.committed import from_results
from kernels_dsl.advice.records import Advice, Block, Choice, Crossover, Question, answer, crossing
from kernels_dsl.checks.options import boolean, instance, integer, real
from kernels_dsl.config.tuned import RecordFile
from kernels_dsl.measure import Call, interleaved
from kernels_dsl.sparse.tensor import BLOCK_STEP, MAX_BLOCK
from lowering import cache

log = logging.getLogger("kernels_dsl")

BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128))
ROUNDS, WARMUPS = 10, 2

Timer = Callable[[Mapping[str, Call]], Mapping[str, float]]
"""Milliseconds of each call; all of one mapping are timed in turns."""


def advise(
    m: int,
    n: int,
    k: int,
    *,
    density: float | None = None,
    blocks: Sequence[Sequence[int]] = BLOCKS,
    dtype: torch.dtype = torch.bfloat16,
    again: bool = False,
) -> Advice:
    """Says which call is the fastest for a @ w.t(), a (m, k), w (n, k): dense, fp8 or block-sparse.

    density: the share of w's blocks that are kept, above 0 and up to 1; None leaves the sparse calls out of
    the choices. blocks: the sizes of w's blocks to try, each two multiples of 16 up to 512; for each, the
    answer says from which density on the dense product is the faster. dtype: torch.bfloat16 or torch.float16,
    of a and w where they are not fp8. fp8 rounds the operands: `fastest(exact=True)` of the result leaves it
    out.

    On a GPU all is measured in turns on random operands, some hundred milliseconds and the compiles of
    kernels that are not cached, and kept in the cache folder, for the same GPU, driver, versions and
    question. `again` measures anew. Without a GPU the answer comes from results of an H200 that the source
    checkout holds, and says so; LookupError where they have none of this shape.

    Raises TypeError and ValueError that name the argument; ValueError where the GPU runs none of the kernels.
    """
    question = _question(m, n, k, density, blocks, dtype)
    boolean("again", again)
    if torch.cuda.is_available():
        return _on_gpu(question, again)
    found = from_results(question)
    if found is None:
        raise LookupError(
            f"advise needs a GPU for {question}: there is none here, and the results in benchmarks/ of the "
            "source checkout have none of this shape"
        )
    return found


def _question(
    m: int, n: int, k: int, density: float | None, blocks: Sequence[Sequence[int]], dtype: torch.dtype
) -> Question:
    """The arguments, checked."""
    sizes = [integer(name, size, least=1) for name, size in {"m": m, "n": n, "k": k}.items()]
    if density is not None and real("density", density, above=0.0) > 1.0:
        raise ValueError(f"density is {density}, must be above 0 and at most 1")
    names = {kind: name for name, kind in calls.DTYPES.items()}
    if dtype not in names:
        raise ValueError(f"dtype is {dtype}, must be torch.bfloat16 or torch.float16")
    pairs = tuple(_block(f"blocks[{i}]", x) for i, x in enumerate(instance("blocks", blocks, list, tuple)))
    kept = None if density is None else float(density)
    return Question(sizes[0], sizes[1], sizes[2], names[dtype], kept, pairs)


def _block(name: str, block: Sequence[int]) -> Block:
    instance(name, block, list, tuple)
    if len(block) != 2 or not all(
        type(x) is int and 0 < x <= MAX_BLOCK and x % BLOCK_STEP == 0 for x in block
    ):
        raise ValueError(f"{name} is {block}, must be two multiples of {BLOCK_STEP} up to {MAX_BLOCK}")
    return block[0], block[1]


def in_turns(timed: Mapping[str, Call]) -> dict[str, float]:
    """Milliseconds of each call on the current GPU."""
    return {name: timing.ms for name, timing in interleaved(timed, rounds=ROUNDS, warmups=WARMUPS).items()}


def _driver() -> str:
    """The driver's version; of CUDA where only that is known."""
    from lowering import arch

    try:
        found = re.search(r"\b(\d+\.\d+[\d.]*)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    if found is not None:
        return found[1]
    return "CUDA " + ".".join(map(str, arch.driver_version() or ("unknown",)))


def _place() -> str:
    """This GPU, driver and the versions that figures depend on."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    dsl = metadata.version("nvidia-cutlass-dsl")
    return (
        f"{gpu.name}, {gpu.multi_processor_count} SMs, driver {_driver()}, torch {torch.__version__}, "
        f"nvidia-cutlass-dsl {dsl}, kernels-dsl {__version__}"
    )


def _on_gpu(question: Question, again: bool) -> Advice:
    """The kept answer where there is one, else a measured one, which is kept."""
    record, place = RecordFile(cache.dir() / "advice.json"), _place()
    key = f"{place}/{question.key}"
    kept = None if again else record.get(key)
    if kept is not None:
        try:
            return answer(question, f"{place}: kept in {record.path}", kept)
        except (KeyError, TypeError, ValueError) as error:
            log.warning("an entry of %s is measured again: %s", record.path, error)
    found = measured(question, f"{place}: measured now", in_turns)
    try:
        record.put(key, found.to_json())
    except OSError as error:
        log.warning("the advice is not kept: %s", error)
    return found


def measured(question: Question, source: str, timer: Timer, device: str = "cuda") -> Advice:
    """The answer by `timer`, which gets one group of calls at a time."""
    with torch.no_grad():
        dense = calls.dense_group(question, device)
        choices, refused = _choices(dense, timer(dense.calls()), question.density), list(dense.refused)
        crossovers: list[Crossover] = []
        del dense  # its memory
        for block in question.blocks:
            group = calls.sparse_group(question, block, device)
            refused += group.refused
            if not group.ways:
                continue
            ms = timer(group.calls())
            sparse = {way.density: ms[name] for name, way in group.ways.items() if way.kind == "sparse"}
            densities = sorted(sparse)
            whole = [min(ms[calls.OURS], ms[calls.TORCH])] * len(densities)
            crossovers.append(crossing(block, densities, [sparse[x] for x in densities], whole))
            found = _choices(group, ms, question.density)
            choices += [choice for choice in found if choice.kind != "dense"]
    choices.sort(key=lambda choice: -choice.speedup)
    return Advice(question, source, True, tuple(choices), tuple(crossovers), tuple(refused))


def _choices(group: calls.Group, ms: Mapping[str, float], density: float | None) -> list[Choice]:
    """The timed calls of a group; of the sparse ones, those of the density that is asked for."""
    return [
        Choice(name, way.kind, ms[name], ms[calls.OURS], ms[way.before] if way.before else 0.0)
        for name, way in group.ways.items()
        if way.kind != "sparse" or way.density == density
    ]
