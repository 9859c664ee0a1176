"""Writes the measured tables of a run into tutorials/README.md.

python tutorials/make_table.py FOLDER      # of the JSON files that the steps write: 01.json, …, a1.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import common

README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def render(folder: Path) -> list[str]:
    """Markdown lines: the machine, then the tables and remarks of each step."""
    lines: list[str] = []
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        if not lines:
            lines += machine(run["machine"])
        step = next(common.FOLDER.glob(f"{path.stem}_*.py"))
        lines += ["", f"### [{step.name}]({step.name})"]
        for stored in run["tables"]:
            lines += common.Table(**stored).lines()
        for remark in run["remarks"]:
            lines += ["", remark]
    return lines


def machine(facts: dict) -> list[str]:
    """Where the run was."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    chip = f"{facts['gpu']} ({facts['sms']} SMs, L2 {facts['l2_mib']} MiB)"
    power, driver = facts.get("power_cap_w", "?"), facts.get("driver", "?")
    return [f"{chip}, power cap {power} W, driver {driver}, CUDA {facts['cuda']}, {versions}."]


def main(folder: Path) -> None:
    """Replace what is between the marks."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n" + "\n".join(render(folder)) + f"\n{END}{after}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
