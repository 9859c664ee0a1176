"""Nsight Compute: where it is, the command that counts, and the CSV that it writes."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
DURATION = "gpu__time_duration.sum"
CLOCK = "sm__cycles_elapsed.avg.per_second"
TENSOR = "sm__pipe_tensor_cycles_active" + _ELAPSED
DRAM = "dram__throughput" + _ELAPSED
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2, L2_BYTES = "lts__throughput" + _ELAPSED, "lts__t_bytes.sum"
L1 = "l1tex__throughput" + _ELAPSED
SPECIAL = "sm__inst_executed_pipe_xu" + _ELAPSED
ISSUE = "smsp__issue_active" + _ELAPSED
METRICS = (DURATION, CLOCK, TENSOR, DRAM, READ, WRITTEN, L2, L2_BYTES, L1, SPECIAL, ISSUE)

PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
NO_RIGHT = "ERR_NVGPUCTRPERM"
"""Part of ncu's message where the driver keeps the counters from this user."""


class CountedKernel(NamedTuple):
    """A kernel that ran under ncu, and its counters by metric, in base units: bytes, ns, Hz, per cent."""

    name: str
    values: dict[str, float]


def find_ncu(root: Path = Path("/")) -> str | None:
    """The path of `ncu`: that of the search path, else of the newest installation below `root`."""
    found = shutil.which("ncu")
    if found is None:
        installed = (path for place in PLACES for path in sorted(root.glob(place[1:]), reverse=True))
        found = next(map(str, installed), None)
    return found


def command(ncu: str, log: str, program: Sequence[str], metrics: Sequence[str] = METRICS) -> list[str]:
    """The command line that counts `metrics` of the kernels between the program's profiler start and stop.

    Clocks are left alone, so that durations are those of a run; caches are empty before each kernel.
    """
    return [
        ncu, "--csv", "--log-file", log, "--print-units", "base", "--clock-control", "none",
        "--profile-from-start", "off", "--metrics", ",".join(metrics), *program,
    ]  # fmt: skip


def counted(text: str) -> list[CountedKernel]:
    """The kernels of ncu's CSV in the order in which they ran; none where it has no table.

    ncu's own remarks come before the table. A counter that the GPU lacks ("n/a") is left out.
    """
    table = text[text.find('"ID"') :].splitlines() if '"ID"' in text else []
    found: dict[int, CountedKernel] = {}
    for line in csv.DictReader(row for row in table if row.startswith('"')):
        kernel = found.setdefault(int(line["ID"]), CountedKernel(line["Kernel Name"], {}))
        try:
            kernel.values[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
        except ValueError:
            continue
    return [found[number] for number in sorted(found)]
