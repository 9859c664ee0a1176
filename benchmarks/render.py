"""Writes tables and plots from the JSON files of benchmarks/results.

    python -m benchmarks.render [--results benchmarks/results] [--docs docs]

Complete tables go to a page a family beside the results, such as benchmarks/results/h200/attention.md, short
ones (`short_tables`) to docs/, the plots to docs/plots, the overview to the README. Each table goes between
`<!-- table NAME -->` and `<!-- end NAME -->`, so that the text around it stays.
The plot needs matplotlib (the extra `bench`); without it the tables are still written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, machine, overview, overview_plot, short_tables
from benchmarks.harness import OURS, Row
from benchmarks.short_tables import cell

_ROOT = Path(__file__).resolve().parents[1]

NOT_TIMED = ("emulator_vs_gpu", "instructions", "fuzz")
"""Results of comparisons, which docs/how_the_emulator_works.md and docs/reliability.md describe."""


def rate_table(facts: dict[str, Any], rows: list[Row], case: str = "M×N×K") -> str:
    """Markdown: a row a case, with milliseconds, TFLOPS and the ratio to each peer; `case` heads it."""
    peers = sorted({peer for row in rows for peer in row.peers})
    heads = [case, "ms", "TFLOPS"] + [f"{peer} TFLOPS | × {peer}" for peer in peers] + ["timed by"]
    text = ["| " + " | ".join(heads) + " |", "|" + "---|" * (len(heads) + len(peers))]
    for row in rows:
        cells = [row.title, f"{row.ms[OURS]:.4f}", f"{row.tflops(OURS):.0f}"]
        for peer in peers:
            if peer in row.ms:
                chosen = f" ({row.chosen[peer]})" if peer in row.chosen else ""
                cells += [f"{row.tflops(peer):.0f}{chosen}", f"{row.ratio(peer):.3f}"]
            else:
                cells += ["–", "–"]
        text.append("| " + " | ".join([*cells, row.method]) + " |")
    text.append("")
    text += [f"- {sentence}" for sentence in harness.summary(rows)]
    return "\n".join([*_machine(facts, rows), "", *text])


def _machine(facts: dict[str, Any], rows: list[Row]) -> list[str]:
    states = sorted({row.l2 for row in rows})
    return [f"{'; '.join(machine.header_lines(facts))}. L2: {', '.join(states)}."]


def plain_table(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Markdown of rows with a name and numbers: host time, first call."""
    columns = [key for key in rows[0] if key != "name"]
    text = ["; ".join(machine.header_lines(facts)) + ".", ""]
    text += ["| | " + " | ".join(column.replace("_", " ") for column in columns) + " |"]
    text += ["|" + "---|" * (len(columns) + 1)]
    for row in rows:
        cells = [cell(row[column]) for column in columns]
        text.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def insert(document: str, name: str, table: str) -> str:
    """`document` with `table` between its markers; appended with markers where there are none."""
    begin, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{table}\n{end}"
    pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    if pattern.search(document):
        return pattern.sub(lambda _match: block, document)
    return document.rstrip() + f"\n\n## {name}\n\n{block}\n"


def _pyplot() -> Any:
    """matplotlib.pyplot set up for SVG files; None where it is missing."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    # Text stays text and ids stay the same, so that the file is small and changes only with the data.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kernels-dsl"})
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, axes: Any, title: str, path: Path) -> None:
    """Title and legend, and the file."""
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot(rows: list[Row], title: str, path: Path) -> bool:
    """Grouped bars of TFLOPS by case into an SVG; False where matplotlib is missing."""
    plt = _pyplot()
    if plt is None:
        return False
    names = [OURS, *sorted({peer for row in rows for peer in row.peers})]
    width = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(max(6.0, 0.9 * len(rows)), 3.6))
    for position, name in enumerate(names):
        shift = (position - (len(names) - 1) / 2) * width
        places = [i + shift for i, row in enumerate(rows) if name in row.ms]
        axes.bar(places, [row.tflops(name) for row in rows if name in row.ms], width, label=name)
    axes.set_xticks(range(len(rows)), [row.name for row in rows], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("TFLOPS")
    _save(plt, figure, axes, title, path)
    return True


def lines_plot(rows: list[dict[str, Any]], title: str, path: Path) -> bool:
    """Milliseconds against density, a line a column that ends in "_ms"; False where matplotlib is missing.

    Rows whose name is no percentage are left out.
    """
    plt = _pyplot()
    if plt is None:
        return False
    points = [row for row in rows if row["name"].endswith("%")]
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for column in [key for key in rows[0] if key.endswith("_ms")]:
        label = column.removesuffix("_ms")
        style = "--" if label == "dense" else "-"
        axes.plot(
            [float(row["name"].rstrip("%")) for row in points], [row[column] for row in points], style,
            marker=".", label=label if label == "dense" else f"{label}×{label}",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="density, %", ylabel="ms")
    _save(plt, figure, axes, title, path)
    return True


def render(results: Path, docs: Path) -> list[str]:
    """Put every suite under `results` into the pages beside it and those of `docs`; says what it did."""
    texts: dict[Path, str] = {}
    done = []
    for path in sorted(results.glob("*/*.json")):
        if path.stem in NOT_TIMED:
            continue
        name = f"{path.parent.name} {path.stem}"
        picture = docs / "plots" / f"{path.parent.name}_{path.stem}.svg"
        page = complete_page(path)
        table, what = _rendered(path, picture, os.path.relpath(picture, page.parent))
        texts[page] = insert(texts.get(page) or _text_of(page), name, table)
        done.append(f"{name}: {what}")
    texts |= _short(results, docs)
    readme = docs.parent / "README.md"
    for folder in sorted({path.parent for path in results.glob("*/*.json")}):
        name = f"{folder.name} overview"
        if readme.exists() and f"<!-- table {name} -->" in readme.read_text():
            texts[readme] = insert(texts.get(readme) or readme.read_text(), name, overview.table(folder))
            lines, headers = overview.summaries(folder)
            gpu = headers[0]["gpu"]
            title = f"Speed beside the peers', {gpu}; a dot a case, full ones their geometric means"
            picture = docs / "plots" / f"{folder.name}_overview.svg"
            picture.write_text(overview_plot.draw(title, lines))
            done.append(f"{name}: table and plot of the README")
    for page, text in texts.items():
        page.write_text(text)
    return done


def complete_page(path: Path) -> Path:
    """The page beside a file of results that has its complete table: a page a family."""
    return path.parent / f"{path.stem.split('_')[0]}.md"


def _text_of(page: Path) -> str:
    return page.read_text() if page.exists() else f"# Results: {page.stem}, {page.parent.name}\n"


def _short(results: Path, docs: Path) -> dict[Path, str]:
    """Text of every page of `docs` that asks for short tables, by page."""
    texts: dict[Path, str] = {}
    for page in sorted(docs.glob("*.md")):
        text = page.read_text()
        for found in short_tables.MARKER.finditer(text):
            path = results / found["name"].replace(" ", "/")
            path = path.with_name(f"{path.name}.json")
            link = os.path.relpath(complete_page(path), docs) + f"#{found['name'].replace(' ', '-')}"
            picture = f"plots/{path.parent.name}_{path.stem}.svg"
            drawn = picture if (docs / picture).exists() else ""
            choice = short_tables.Choice.read(found["options"])
            table = short_tables.short_table(path, choice, link, drawn)
            texts[page] = short_tables.fill(texts.get(page, text), found["name"], table, found["options"])
    return texts


def _rendered(path: Path, picture: Path, link: str) -> tuple[str, str]:
    """The table of one file of results, its plot drawn to `picture`; and a word on both."""
    stored = json.loads(path.read_text())
    picture.parent.mkdir(parents=True, exist_ok=True)
    if "ms" not in stored["rows"][0]:
        table = plain_table(stored["header"], stored["rows"])
        if path.stem.endswith("_density"):
            if lines_plot(stored["rows"], f"{stored['header']['gpu']}, {path.stem}", picture):
                return f"{table}\n\n![time by density]({link})", "table and plot"
        return table, "table"
    facts, rows = harness.read(path)
    drawn = plot(rows, f"{facts['gpu']}, {path.stem}", picture)
    table = rate_table(facts, rows, "M×N×K" if path.stem.startswith("gemm") else "case")
    if not drawn:
        return table, "table (no plot: matplotlib is missing)"
    return f"{table}\n\n![TFLOPS by shape]({link})", "table and plot"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `python -m benchmarks.render`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.render", description="Tables and plots from results."
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    parser.add_argument("--docs", type=Path, default=_ROOT / "docs")
    args = parser.parse_args(argv)
    for text in render(args.results, args.docs):
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
