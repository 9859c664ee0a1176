"""Short tables of docs/: chosen rows and columns of a suite, and a link to its complete table.

A page asks for one by a marker, which `python -m benchmarks.render` fills:

    <!-- short h200 fp8_gemm columns=cublas rows=8192×8192 -->
    <!-- end h200 fp8_gemm -->

columns: peers of a suite of rates, fields of any other, divided by commas. rows: a regular expression that is
searched in a row's name. Both may be left out. The geometric mean and the worst row are those of all rows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness, machine
from benchmarks.harness import OURS, Row

MARKER = re.compile(
    r"<!-- short (?P<name>\S+ \S+)(?P<options>[^>]*) -->\n.*?<!-- end (?P=name) -->", re.DOTALL
)


class Choice(NamedTuple):
    """Columns and rows that a marker asks for; no columns are all of them."""

    columns: tuple[str, ...] = ()
    rows: str = ""

    @classmethod
    def read(cls, options: str) -> Choice:
        """Choice of a marker's text `options`."""
        found = dict(option.split("=", 1) for option in options.split())
        return cls(tuple(filter(None, found.get("columns", "").split(","))), found.get("rows", ""))

    def takes(self, name: str) -> bool:
        return re.search(self.rows, name) is not None


def fill(text: str, name: str, content: str, choice: str) -> str:
    """`text` with `content` between the markers of `name` that ask for `choice`."""
    begin = f"<!-- short {name}{choice} -->"
    pattern = re.compile(re.escape(begin) + r"\n.*?" + re.escape(f"<!-- end {name} -->"), re.DOTALL)
    return pattern.sub(lambda _match: f"{begin}\n{content}\n<!-- end {name} -->", text)


def short_table(path: Path, choice: Choice, link: str, picture: str) -> str:
    """Markdown: header, table and plot of the suite at `path`.

    link: where its complete table is. picture: its plot, "" for none.
    """
    stored = json.loads(path.read_text())
    if "ms" in stored["rows"][0]:
        facts, rows = harness.read(path)
        lines, many = _rates(rows, choice), len(rows)
    else:
        facts, rows = stored["header"], stored["rows"]
        lines, many = _numbers(rows, choice), len(rows)
    text = [
        f"{machine.short_header(facts)}, commit {facts['commit']}. [All {many} rows]({link}).",
        "",
        *lines,
    ]
    return "\n".join(text + (["", f"![{path.stem} on {facts['gpu']}]({picture})"] if picture else []))


def _rates(rows: list[Row], choice: Choice) -> list[str]:
    """Rate of the chosen rows and the ratio to each chosen peer; mean and worst of all rows."""
    foreign = {peer for row in rows for peer in row.peers if not peer.startswith(f"{OURS}_")}
    peers = choice.columns or tuple(sorted(foreign))
    text = [
        "| case | TFLOPS | " + " | ".join(f"× {peer}" for peer in peers) + " |",
        "|---" * (len(peers) + 2) + "|",
    ]
    for row in filter(lambda row: choice.takes(row.title), rows):
        ratios = (f"{row.ratio(peer):.3f}" if peer in row.ms else "–" for peer in peers)
        text.append(f"| {row.title} | {row.tflops(OURS):.0f} | " + " | ".join(ratios) + " |")
    wanted = tuple(f"against {peer}:" for peer in peers)
    said = [line for line in harness.summary(rows) if line.startswith(wanted)]
    return [*text, "", *(f"- {line}" for line in said)]


def _numbers(rows: list[dict[str, Any]], choice: Choice) -> list[str]:
    """Chosen columns of the chosen rows of a suite that has a name and numbers in each."""
    columns = choice.columns or tuple(key for key in rows[0] if key != "name")
    text = ["| | " + " | ".join(column.replace("_", " ") for column in columns) + " |"]
    text.append("|---" * (len(columns) + 1) + "|")
    for row in filter(lambda row: choice.takes(row["name"]), rows):
        text.append(f"| {row['name']} | " + " | ".join(cell(row[column]) for column in columns) + " |")
    return text


def cell(value: Any) -> str:
    """Three digits of a small number, two after the point of a large one, a dash for none."""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"
    return "–" if value is None else str(value)
