"""The kernels that most programs need: those that common calls of each public operation launch, see `calls`.

The calls are recorded, as for the whole list, with the configurations that the tables choose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from kernels_dsl.aot.bsr import list_kernels, pair_kernels
from kernels_dsl.aot.calls import attention, bsr, fp8, gemm, serving
from kernels_dsl.aot.calls.call import Call, Source
from kernels_dsl.aot.calls.core import is_core
from kernels_dsl.aot.lists import iter_lists
from kernels_dsl.aot.recorded import Kernel, kernel_of, recorded
from kernels_dsl.config.family import FAMILIES
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from lowering import reach

_MAKERS: dict[str, Sequence[Callable[[], Iterator[Call]]]] = {
    "gemm": (gemm.products, gemm.fused_products, gemm.grouped_products),
    "attention": (
        attention.prompts, attention.training, attention.torchs, attention.packed_sequences, attention.sparse,
        serving.decodes, serving.appends, serving.merges,
    ),
    "fp8": (fp8.quantisations, fp8.products, fp8.attentions),
    "bsr": (bsr.products, bsr.layers),
}  # fmt: skip
OPS = tuple(_MAKERS)


def common_calls(arch: str, ops: Sequence[str] = OPS) -> Iterator[Call]:
    """The calls that GPUs of an architecture, a key of `DEVICES_BY_ARCH`, have kernels for."""
    device = DEVICES_BY_ARCH[arch]
    for op in ops:
        for maker in _MAKERS[op]:
            yield from (call for call in maker() if call.served(device))


def common_kernels(arch: str, ops: Sequence[str]) -> list[Kernel]:
    """Those kernels of `ops`, each once, named by its function and the first call that needs it."""
    return once(_kernels(arch, ops), arch)


def core_kernels(arch: str, ops: Sequence[str]) -> list[Kernel]:
    """Those of them that core calls launch, see `calls.core`, and those that make lists of blocks."""
    return once(_core_kernels(arch, ops), arch)


def _core_kernels(arch: str, ops: Sequence[str]) -> Iterator[Kernel]:
    yield from _kernels_of(filter(is_core, common_calls(arch, ops)), arch)
    if "bsr" in ops:
        yield from list_kernels(arch)


def _kernels_of(calls: Iterable[Call], arch: str) -> Iterator[Kernel]:
    source = Source()
    for call in calls:
        for made in recorded(arch, partial(call.run, source)):
            yield kernel_of(f"{made.function.name} {call.label}", made)


def _kernels(arch: str, ops: Sequence[str]) -> Iterator[Kernel]:
    yield from _kernels_of(common_calls(arch, ops), arch)
    if "attention" in ops:
        yield from iter_lists(arch)
    if "bsr" in ops:
        yield from list_kernels(arch)
        if FAMILIES[DEVICES_BY_ARCH[arch].families()[0]].uses_tma:
            yield from pair_kernels(arch)


def once(kernels: Iterable[Kernel], arch: str) -> list[Kernel]:
    """The first kernel of each key, under a name of its own."""
    found: dict[str, Kernel] = {}
    names: Counter[str] = Counter()
    with reach.one_look():
        for kernel in kernels:
            key = kernel.function.key(*kernel.args, arch=arch, **kernel.constants)
            if key not in found:
                names[kernel.name] += 1
                again = names[kernel.name]
                found[key] = kernel._replace(name=f"{kernel.name} #{again}") if again > 1 else kernel
    return list(found.values())
