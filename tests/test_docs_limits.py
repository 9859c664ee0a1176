"""Pages stay short enough to be read: words, paragraphs and cells of tables have limits.

The journal of experiments and the complete tables of results are records, not documentation, and are free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORDS_IN_ALL, WORDS_OF_A_PAGE, WORDS_OF_A_PARAGRAPH, CHARACTERS_OF_A_CELL = 26_400, 2_500, 120, 200
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def words(text: str) -> int:
    """Number of words, code and tables included; a table's rules are none."""
    return sum(any(map(str.isalnum, token)) for token in text.split())


def _prose(text: str) -> str:
    """`text` without code, comments and targets of links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a page, each item of a list by itself; no tables, no headings."""
    for block in re.split(r"\n\s*\n", _prose(text)):
        lines = "\n".join(line for line in block.splitlines() if not re.match(r"\s*[|#]", line))
        yield from re.split(r"^\s*(?:[-*]|\d+\.) ", lines, flags=re.MULTILINE)


def cells(text: str) -> Iterator[str]:
    """Cells of the tables of a page."""
    for line in _prose(text).splitlines():
        if line.startswith("|"):
            yield from (cell.strip() for cell in line.strip("|").split("|"))


LATER = {
    "decoding.md", "serving.md", "distributed.md", "gemm_reduce.md", "bring_your_own_kernel.md",
    "install.md", "quick_start.md", "tuning.md", "profiling.md",
}  # fmt: skip
"""Pages of capabilities and of tasks that came after the pages were written anew."""


def test_pages_of_the_first_capabilities():
    counts = {page.name: words(page.read_text()) for page in PAGES[1:] if page.name not in LATER}
    assert sum(counts.values()) <= 20_000, counts


def test_all_pages_together():
    counts = {page.name: words(page.read_text()) for page in PAGES}
    assert sum(counts.values()) <= WORDS_IN_ALL, counts


@of_each_page
def test_words_of_a_page(page):
    assert words(page.read_text()) <= WORDS_OF_A_PAGE


@of_each_page
def test_paragraphs(page):
    long = {p[:60]: words(p) for p in paragraphs(page.read_text()) if words(p) > WORDS_OF_A_PARAGRAPH}
    assert not long


@of_each_page
def test_cells_of_tables(page):
    long = {cell[:60]: len(cell) for cell in cells(page.read_text()) if len(cell) > CHARACTERS_OF_A_CELL}
    assert not long


def test_the_limits_are_measured_as_they_read():
    page = "# T\n\none two\nthree\n\n- four\n  five\n- six\n\n| a | bb [c](long) |\n|---|---|\n"
    page += "\n```\nseven eight\n```\n"
    found = [paragraph.split() for paragraph in paragraphs(page) if paragraph.split()]
    assert found == [["one", "two", "three"], ["four", "five"], ["six"]]
    assert max(map(len, cells(page))) == len("bb [c]")
    assert words("| a | b-c |\n|---|---|") == 2
