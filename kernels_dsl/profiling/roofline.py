"""The roofline of a call: the use of each part of the GPU, its limit, and the part that bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernels_dsl.profiling import ncu
from kernels_dsl.profiling.ncu import CountedKernel
from lowering.records import frozen

PER_CLOCK = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90a": 4096}
"""Operations of an SM's tensor cores in a clock cycle, in bf16 and fp16: the data sheets' rates divided by
their clocks. fp8 has twice as many. GeForce cards of sm_86 and sm_89 add to float32 at half of it."""
BUSY = 60.0
"""Per cent of its peak from which on a part counts as what bounds a kernel; below, latency does."""
_COUNTERS = {
    "tensor cores": ncu.TENSOR,
    "DRAM": ncu.DRAM,
    "L2": ncu.L2,
    "L1 and shared memory": ncu.L1,
    "special functions": ncu.SPECIAL,
    "instruction issue": ncu.ISSUE,
}


@frozen
class Gpu:
    """Facts of a GPU that limits are computed from."""

    name: str
    arch: str
    sms: int


@frozen
class Work:
    """A call that was profiled. flops: operations of its products, without what a mask leaves out. rate: how
    many times the rate of bf16 the tensor cores have in its dtype."""

    text: str
    flops: float
    rate: int = 1


@frozen
class Use:
    """A part of the GPU. used: per cent of its peak over the kernel's time. achieved, limit: per second, in
    `unit`; None where they are not known."""

    part: str
    used: float
    achieved: float | None = None
    limit: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        text = f"{self.part:21s}{self.used:6.1f} %"
        if self.achieved is None or self.limit is None:
            return text
        return f"{text}  {_quantity(self.achieved, self.unit):>14s}  {_quantity(self.limit, self.unit):>14s}"


@frozen
class KernelRoofline:
    """One kernel: its time, what it used, and its traffic to memory in bytes."""

    name: str
    ms: float
    uses: tuple[Use, ...]
    read: float | None
    written: float | None

    @property
    def bound(self) -> Use | None:
        """The part that is used most; None where nothing is used for `BUSY` per cent."""
        most = max(self.uses, key=lambda use: use.used, default=None)
        return most if most is not None and most.used >= BUSY else None

    def __str__(self) -> str:
        bound = self.bound
        lines = [
            f"{self.name}: {self.ms:.4g} ms",
            f"  {'':21s}{'used':>8s}  {'achieved':>14s}  {'limit':>14s}",
        ]
        for use in self.uses:
            lines.append(f"  {use}{'  <- bound' * (use is bound)}")
        if bound is None:
            lines.append(f"  bound by latency: no part is used for {BUSY:.0f} % of the time")
        if self.read is not None and self.written is not None:
            lines.append(
                f"  memory: {_quantity(self.read, 'B')} read, {_quantity(self.written, 'B')} written"
            )
        return "\n".join(lines)


@frozen
class Report:
    """A call's roofline. limit: operations a second that its tensor cores have at the clock of that time."""

    work: Work
    gpu: Gpu
    kernels: tuple[KernelRoofline, ...]
    limit: float | None

    @property
    def ms(self) -> float:
        """The kernels' time together, without gaps between them."""
        return sum(kernel.ms for kernel in self.kernels)

    @property
    def achieved(self) -> float:
        """Operations a second."""
        return self.work.flops / (self.ms / 1e3)

    def __str__(self) -> str:
        count = len(self.kernels)
        rate = _quantity(self.achieved, "FLOPS")
        if self.limit is not None:
            rate += f", {self.achieved / self.limit:.0%} of {_quantity(self.limit, 'FLOPS')}"
        head = f"{self.work.text} on {self.gpu.name} ({self.gpu.arch}, {self.gpu.sms} SMs)"
        total = f"{count} kernel{'s' * (count != 1)}, {self.ms:.4g} ms, {rate}"
        return "\n\n".join([f"{head}\n{total}", *map(str, self.kernels)])

    def to_json(self) -> dict[str, Any]:
        """Plain data, with `bound` of each kernel; seconds and bytes in base units."""
        kernels = [
            {
                "name": kernel.name,
                "ms": kernel.ms,
                "bound": kernel.bound.part if kernel.bound else "latency",
                "read_bytes": kernel.read,
                "written_bytes": kernel.written,
                "uses": {
                    use.part: {"percent": use.used, "achieved": use.achieved, "limit": use.limit}
                    for use in kernel.uses
                },
            }
            for kernel in self.kernels
        ]
        return {
            "call": self.work.text, "gpu": self.gpu.name, "arch": self.gpu.arch, "ms": self.ms,
            "flops": self.achieved, "flops_limit": self.limit, "kernels": kernels,
        }  # fmt: skip


def report(work: Work, gpu: Gpu, kernels: Sequence[CountedKernel]) -> Report:
    """The roofline of the kernels of one call. ValueError where a kernel has no duration."""
    for kernel in kernels:
        if not kernel.values.get(ncu.DURATION):
            raise ValueError(f"ncu gave no {ncu.DURATION} for {kernel.name}")
    clocks = [kernel.values[ncu.CLOCK] for kernel in kernels if ncu.CLOCK in kernel.values]
    limit = None
    if clocks and gpu.arch in PER_CLOCK:
        limit = gpu.sms * PER_CLOCK[gpu.arch] * work.rate * sum(clocks) / len(clocks)
    alone = work.flops if len(kernels) == 1 else None
    return Report(work, gpu, tuple(_of_kernel(kernel, alone, limit) for kernel in kernels), limit)


def _of_kernel(kernel: CountedKernel, flops: float | None, limit: float | None) -> KernelRoofline:
    """flops: the operations of the whole call, where this kernel does them all."""
    values, seconds = kernel.values, kernel.values[ncu.DURATION] / 1e9
    read, written = values.get(ncu.READ), values.get(ncu.WRITTEN)
    moved = {"L2": values.get(ncu.L2_BYTES)}
    if read is not None and written is not None:
        moved["DRAM"] = read + written
    uses = []
    for part, metric in _COUNTERS.items():
        used = values.get(metric)
        if used is None:
            continue
        if part == "tensor cores" and flops is not None and limit is not None:
            uses.append(Use(part, used, flops / seconds, limit, "FLOPS"))
        elif (count := moved.get(part)) and used:
            rate = count / seconds
            uses.append(Use(part, used, rate, rate / (used / 100), "B/s"))
        else:
            uses.append(Use(part, used))
    return KernelRoofline(kernel.name, seconds * 1e3, tuple(uses), read, written)


def _quantity(value: float, unit: str) -> str:
    """A number in thousands, millions, …: 7.234e14 FLOPS -> "723 TFLOPS"."""
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.4g} T{unit}"
