"""Writes tables and plots from the JSON files of benchmarks/results.

    python -m benchmarks.render [--results benchmarks/results] [--docs docs]

Complete tables go to a page a family beside the results, such as benchmarks/results/h200/attention.md, short
ones (`short_tables`) to docs/, plots to docs/plots, the overview to docs/performance.md. Each goes between
`<!-- table NAME -->` and `<!-- end NAME -->`, so that the text around it stays. The
forecast for several GPUs, which starts from measured rates, is a page of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    density_plot,
    gemm_small_table,
    harness,
    machine,
    overview,
    overview_plot,
    parallel_forecast,
    ratio_plot,
    short_tables,
)
from benchmarks.harness import OURS, Row
from benchmarks.short_tables import cell

_ROOT = Path(__file__).resolve().parents[1]

NOT_TIMED = ("emulator_vs_gpu", "instructions", "fuzz", "llama_block")
"""Results of another form: docs/how_the_emulator_works.md, reliability.md and distributed.md have them."""


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
    page = docs / "performance.md"
    for folder in sorted({path.parent for path in results.glob("*/*.json")}):
        name = f"{folder.name} overview"
        if page.exists() and f"<!-- table {name} -->" in page.read_text():
            texts[page] = insert(texts.get(page) or page.read_text(), name, overview.table(folder))
            lines, headers = overview.summaries(folder)
            picture = docs / "plots" / f"{folder.name}_overview.svg"
            title = f"Speed compared with the fastest peer, one {headers[0]['gpu']}"
            picture.write_text(overview_plot.draw(title, lines))
            done.append(f"{name}: table of docs/performance.md, plot of the README")
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
    gpu = stored["header"]["gpu"]
    if path.stem == "gemm_small":
        return gemm_small_table.table(stored["header"], stored["rows"]), "table"
    if "ms" in stored["rows"][0]:
        facts, rows = harness.read(path)
        table = rate_table(facts, rows, "M×N×K" if path.stem.startswith("gemm") else "case")
        cases = ratio_plot.of_rates(rows)
    else:
        table = plain_table(stored["header"], stored["rows"])
        cases = ratio_plot.of_decoding(stored["rows"])
    if path.stem in ratio_plot.PLOTS:
        words = "speed beside the peers, by case"
        drawn = ratio_plot.draw(ratio_plot.PLOTS[path.stem], cases, gpu)
    elif path.stem == "bsr_density":
        words = "time by density"
        drawn = density_plot.draw(stored["rows"], "Block-sparse GEMM by density", gpu)
    else:
        return table, "table"
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(drawn)
    return f"{table}\n\n![{words}]({link})", "table and plot"


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
    if args.results == harness.RESULTS:
        print(parallel_forecast.write())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
