"""Writes the measured tables into tutorials/README.md, from the files in tutorials/results.

python tutorials/make_table.py             # from what is there
python tutorials/make_table.py FOLDER      # of a new run, which is taken over first

`measure_all.py` writes them for all steps, or for some: then the others' stay.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import common
import traffic

README = Path(__file__).resolve().parent / "README.md"
RESULTS = README.parent / "results" / "h200"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
LADDER = {
    "01": "layouts, who holds what, predicates, compiling at the first call",
    "02": "TMA descriptor, mbarrier: one thread moves a tile",
    "03": "a ring of stages, full and empty barriers, phases",
    "04": "producer and consumer warps, arrive counts, setmaxnreg",
    "05": "WGMMA: swizzle, descriptors, fence – commit – wait, accumulators",
    "06": "K loop, grid, edges: a whole GEMM",
    "07": "3 + 4 + 5 together: the ring feeds two consumer warpgroups",
    "08": "tile scheduler, rasterisation, clusters with multicast",
    "09": "TMA store, ping-pong, a function fused into the epilogue",
    "10": "attention: online softmax between two WGMMAs, P in registers",
    "11": "visit only the needed key blocks: causal, window, packed, lists",
    "12": "block-sparse GEMM: an index-driven producer, sorted rows",
    "a1": "the GEMM without Hopper: cp.async, ldmatrix, mma.sync",
}
DENSE = "cuBLAS, dense"  # the baseline of step 12's tables
SHOWN = {"12": "8192³, 32 of 64 blocks kept"}  # titles for the overview; of other steps the first table
NO_LIBRARY = ("cp.async", "separate kernels")


def overview(folder: Path) -> list[str]:
    """The ladder: what a step adds, and its best row beside an earlier step's and a library's."""
    head = "| step | what it adds | measured | | × earlier step | × library |"
    lines = ["", head, "|---|---|---|--:|--:|--:|"]
    for path in sorted(folder.glob("*.json")):
        tables = json.loads(path.read_text())["tables"]
        title = SHOWN.get(path.stem, tables[0]["title"])
        table = common.Table(**next(stored for stored in tables if stored["title"] == title))
        label = f"A{path.stem[1:]}" if path.stem.startswith("a") else f"step {int(path.stem)}"
        own = [name for name in table.microseconds if re.match(rf"{label}\b", name)]
        earlier = [name for name in table.microseconds if name.startswith("step") and name not in own]
        library = [name for name in table.microseconds if name not in (*own, *earlier, *NO_LIBRARY)]
        if not own:  # step 5 is compared with itself
            own, library = library, []
        best = max(own, key=table.rate)
        gain, ratio = (_against(table, best, names) for names in (earlier, library))
        rate = f"{table.rate(best):.0f} {table.unit}"
        where = next(common.FOLDER.glob(f"{path.stem}_*.py")).name
        adds = LADDER[path.stem]
        lines.append(f"| [{label}]({where}) | {adds} | {table.title} | {rate} | {gain} | {ratio} |")
    return lines


def _against(table: common.Table, name: str, others: list[str]) -> str:
    """The rate in relation to the best of `others`, and which that is."""
    if not others:
        return ""
    best = max(others, key=table.rate)
    return f"{table.rate(name) / table.rate(best):.2f}, {best}"


def attention_summary(folder: Path) -> list[str]:
    """Step 10's best row of each of its tables, next to the best peer in the same table."""
    path = folder / "10.json"
    if not path.exists():
        return []
    lines = ["", "| step 10 | TFLOPS | best peer beside it | × best peer |", "|---|--:|--:|--:|"]
    for stored in json.loads(path.read_text())["tables"]:
        table = common.Table(**stored)
        own = max(table.rate(name) for name in table.microseconds if name.startswith("step 10"))
        others = [name for name in table.microseconds if not name.startswith("step 10")]
        best = max(others, key=table.rate)
        ratio = own / table.rate(best)
        lines.append(f"| {table.title} | {own:.0f} | {table.rate(best):.0f}, {best} | {ratio:.2f} |")
    return lines


def against_dense(tables: list[dict]) -> list[str]:
    """Step 12's tables of two rows, of a share of blocks kept each, as one."""
    lines = []
    for table in (common.Table(**stored) for stored in tables if stored["baseline"] == DENSE):
        if not lines:
            lines = ["", f"| | µs | TFLOPS of kept blocks | {DENSE}, µs | × dense |", "|---|--:|--:|--:|--:|"]
        (own,) = (name for name in table.microseconds if name != DENSE)
        sparse, dense = table.microseconds[own], table.microseconds[DENSE]
        lines.append(
            f"| {table.title} | {sparse:.0f} | {table.rate(own):.0f} | {dense:.0f} | {dense / sparse:.2f} |"
        )
    return lines


def render(folder: Path) -> dict[str, list[str]]:
    """Markdown lines by their place in the README: the ladder, and each step's tables and remarks."""
    made: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        if not made:
            made["ladder"] = machine(run["machine"]) + overview(folder)
        lines = attention_summary(folder) if path.stem == "10" else []
        lines += against_dense(run["tables"])
        for stored in run["tables"]:
            if stored["baseline"] != DENSE:
                lines += common.Table(**stored).lines()
        for table in run.get("counters", []):
            lines += traffic.lines(table)
        for remark in run["remarks"]:
            lines += ["", remark]
        made[path.stem] = [*lines, ""]
    return made


def machine(facts: dict) -> list[str]:
    """The machine of the run."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    known = [f"{facts['gpu']} ({facts['sms']} SMs)"]
    for key, words in (("power_cap_w", "power cap {} W"), ("driver", "driver {}"), ("cuda", "CUDA {}")):
        if key in facts:
            known.append(words.format(facts[key]))
    return [", ".join([*known, versions]) + f"; commit {facts['commit']}."]


def with_tables(text: str, made: dict[str, list[str]]) -> str:
    """The README with the lines of each place between its marks."""
    for name, lines in made.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}" + rest.split(end)[1]
    return text


def main(folder: Path | None) -> None:
    """Take the files of a new run over, where there is one, and write the README."""
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        shutil.copyfile(path, RESULTS / path.name)
    README.write_text(with_tables(README.read_text(), render(RESULTS)))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]) if len(sys.argv) == 2 else None)
