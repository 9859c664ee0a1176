"""Traffic of step 8's orders of tiles to L2 and to memory, counted by Nsight Compute.

python tutorials/traffic.py                  # prints a table for each of step 8's shapes
python tutorials/traffic.py --json 08.json   # and adds them to what step 8 wrote, for make_table.py

Needs a Hopper GPU, `ncu` (on the path, or in a CUDA toolkit below /usr/local or /opt) and the right to read
the GPU's counters. Step 8's calls run once each in a process of their own under `ncu`, which repeats a kernel
until it has all counters, from an empty L2 every time; clocks are left alone, since only events are counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import common

from kernels_dsl.profiling import ncu

HITS, ASKED = "lts__t_sector_hit_rate.pct", "lts__t_sectors_op_read.sum"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
SECTOR = 32  # bytes
COLUMNS = ("L2 hits", "read from L2, GB", "read from memory, GB", "× A and B", "written, GB")


def main(json_path: Path | None) -> None:
    """Count, print, and keep."""
    names = expected()
    counts = parse(profiled(), len(names))
    tables: dict[str, dict] = {}
    for (shape, name), values in zip(names, counts):
        m, n, k = shape
        title = f"{m}×{n}×{k}, what L2 and memory deliver"
        tables.setdefault(title, {})[name] = row(values, (m + n) * k * 2)
    counters = [{"title": title, "rows": rows} for title, rows in tables.items()]
    print("\n".join(line for table in counters for line in lines(table)))
    if json_path is not None:
        facts = json.loads(json_path.read_text())
        json_path.write_text(json.dumps({**facts, "counters": counters}, indent=1) + "\n")


def expected() -> list[tuple]:
    """(shape, name) of the calls in the order in which they run."""
    step8 = common.load("08_gemm_persistent")
    return [(shape, name) for shape in step8.SHAPES for name in (*step8.PLANS, "cuBLAS")]


def run() -> None:
    """Each of step 8's calls, warm; only the last one of each is profiled."""
    import torch

    step8 = common.load("08_gemm_persistent")
    for shape in step8.SHAPES:
        for call in step8.variants(*shape).values():
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def profiled() -> str:
    """`run` under ncu; the CSV that it writes."""
    found = ncu.find_ncu()
    if found is None:
        sys.exit(f"traffic.py: no ncu (Nsight Compute) on the path or in {' or '.join(ncu.PLACES)}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        program = [sys.executable, __file__, "--run"]
        command = ncu.command(found, str(log), program, (HITS, ASKED, READ, WRITTEN))
        done = subprocess.run(command, check=False)
        text = log.read_text() if log.exists() else ""
    if done.returncode or not text:
        sys.exit(f"traffic.py: ncu ended with {done.returncode}:\n{text}")
    return text


def parse(text: str, kernels: int) -> list[dict[str, float]]:
    """The counters of each kernel, in the order in which they ran. ValueError: not `kernels` of them."""
    found = ncu.counted(text)
    if len(found) != kernels:
        seen = [kernel.name for kernel in found]
        raise ValueError(f"{kernels} kernels were to be counted, ncu saw {len(found)}: {seen}")
    return [kernel.values for kernel in found]


def row(values: dict[str, float], least: int) -> list[str]:
    """A kernel's counters as the table shows them; `least` bytes have to be read once at any rate."""
    return [
        f"{values[HITS]:.0f} %",
        f"{values[ASKED] * SECTOR / 1e9:.2f}",
        f"{values[READ] / 1e9:.2f}",
        f"{values[READ] / least:.1f}",
        f"{values[WRITTEN] / 1e9:.2f}",
    ]


def lines(table: dict) -> list[str]:
    """Markdown."""
    rule = "|---" + "|--:" * len(COLUMNS) + "|"
    head = ["", f"**{table['title']}**", "", f"| | {' | '.join(COLUMNS)} |", rule]
    return head + [f"| {name} | {' | '.join(cells)} |" for name, cells in table["rows"].items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE", help="what step 8 wrote: the tables are added")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)  # under ncu
    given = parser.parse_args()
    if given.run:
        run()
    elif common.place() != common.GPU:
        sys.exit("traffic.py: counters need a Hopper GPU")
    else:
        main(given.json)
