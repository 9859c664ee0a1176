"""The cells of a notebook from a step: prose from docstrings, comments and the page, and short code between.

Nothing is written twice: a step stays one file, from which `notebooks.py` makes the notebook.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "README.md"
RUNS = {
    "check": "lab = common.Lab()\ncheck(lab)",
    "measure": (
        "if lab.where == common.GPU:\n    measure(common.Bench())\n"
        'else:\n    print("measure: left out, it needs a Hopper GPU")'
    ),
    "show": "show(lab)\ncommon.draw_timeline(lab, None)",
}
"""Code that runs a function which a step hands to `common.main`."""
PICTURED = {
    "blocked": "tv_layout",
    "swizzle": "tile_kernel",
    "raster_rows": "tile_at",
    "visit_causal": "ranges",
}
"""The first picture of a row -> the definition that the row stands before. Timelines follow `show`."""
PLACE = """\
`common` runs kernels on a Hopper GPU where there is one, and in the emulator elsewhere. A host function keeps
what it has compiled: after a change of a kernel, run the cell of its host function (`@jit`) again too."""
SETUP = """\
import sys
from pathlib import Path

tutorials = Path({folder}).resolve()  # of a checkout of kernels-dsl
if not (tutorials / "common.py").exists():
    raise FileNotFoundError(f"{{tutorials}} is not the folder `tutorials` of kernels-dsl: put its path here")
sys.path.insert(0, str(tutorials))"""
_PICTURE = re.compile(r"!\[([^]]*)\]\(pictures/(\w+)\.svg\)")
_RULE = re.compile(r"# -{4} (.+?) -+\n?")


class Cell(NamedTuple):
    """`text` of Markdown, which is prose, or of code: plain statements, a definition, or what runs them."""

    what: str
    text: str

    @property
    def is_code(self) -> bool:
        return self.what != "prose"


class Section(NamedTuple):
    """The page on a step: rows of pictures by the name of the first, and what was measured."""

    pictures: dict[str, str]
    measured: str


def steps() -> dict[str, Path]:
    """The files of the steps by number, in their order: "01", ..., "a1"."""
    return {path.stem.partition("_")[0]: path for path in sorted(FOLDER.glob("[0-9a]*_*.py"))}


def cells(path: Path, folder: str = str(FOLDER)) -> list[Cell]:
    """Cells of the step at `path`, in reading order. `folder`: where the notebook looks for the tutorials.

    A function that the step hands to `common.main` is called as soon as all that it uses is defined.
    ValueError where the step or its section of the page has another form than the others'.
    """
    source = path.read_text()
    tree = ast.parse(source)
    section = page_section(path)
    found = [
        *header(ast.get_docstring(tree) or ""),
        Cell("prose", PLACE),
        Cell("run", SETUP.format(folder=json.dumps(folder))),
    ]
    *body, last = tree.body[1:]
    due = _due(body, _handed_to_main(last, path))
    lines = source.splitlines()
    for index, (node, between) in enumerate(_with_comments(lines, [*body, last])):
        apart, above = _comments(between)
        found += [Cell("prose", _prose(block)) for block in apart]
        if node is last:
            break
        name = getattr(node, "name", "")
        found += [
            Cell("prose", row) for first, row in section.pictures.items() if PICTURED.get(first) == name
        ]
        found += _statement(lines, node, above)
        for function in due.get(index, ()):
            found.append(Cell("run", RUNS[function]))
            if function == "show":
                rows = (row for first, row in section.pictures.items() if first not in PICTURED)
                found += [Cell("prose", row) for row in rows]
            if function == "measure":
                found.append(Cell("prose", section.measured))
    return _joined(found)


def header(docstring: str) -> Iterator[Cell]:
    """The docstring of a step without the command that runs it: title and facts, then why, an idea a cell."""
    title, _, rest = docstring.partition("\n")
    facts, _, why = rest.partition("\nWHY\n")
    facts = re.sub(r"^    python tutorials/.*\n", "", facts, flags=re.MULTILINE)
    facts = re.sub(r"\n {4,}", " ", facts)
    facts = re.sub(r"^(Adds|Reuses|Measures): +", r"- **\1**: ", facts, flags=re.MULTILINE)
    yield Cell("prose", f"# {title}\n\n{facts.strip()}")
    ideas: list[str] = []
    for block in blocks(why):
        if (
            ideas
            and not re.match(r"\*|\d+\. ", block)
            and (block.startswith("```") or not ideas[-1].endswith("```"))
        ):
            ideas[-1] += f"\n\n{block}"
        else:
            ideas.append(block)
    for number, idea in enumerate(ideas):
        yield Cell("prose", idea if number else f"## Why\n\n{idea}")


def blocks(text: str) -> list[str]:
    """Paragraphs of a docstring as Markdown: those that are indented by four or more become fenced blocks."""
    done: list[str] = []
    for paragraph in re.split(r"\n(?:[ ]*\n)+", text.strip("\n")):
        indented = all(line.startswith("    ") for line in paragraph.split("\n"))
        if not indented:
            # Products such as i*p are no emphasis.
            done.append(re.sub(r"(?<=\w)\*(?=\w)", r"\\*", textwrap.dedent(paragraph)))
        elif done and done[-1].startswith("```"):  # an empty line inside of a drawing
            done[-1] = f"{done[-1].removesuffix('```')}\n{paragraph}\n```"
        else:
            done.append(f"```text\n{paragraph}\n```")
    return [_dedented(block) for block in done]


def _dedented(block: str) -> str:
    if not block.startswith("```text\n"):
        return block
    inside = block.removeprefix("```text\n").removesuffix("\n```")
    return f"```text\n{textwrap.dedent(inside)}\n```"


def page_section(path: Path, page: str | None = None) -> Section:
    """The section of the page (`page`, its text) whose source is `path`; ValueError without one."""
    page = PAGE.read_text() if page is None else page
    source = f"Source: [{path.name}]({path.name})."
    sections = [part for part in re.split(r"^##+ ", page, flags=re.MULTILINE) if source in part]
    if len(sections) != 1:
        raise ValueError(f"{PAGE.name} has {len(sections)} sections with {source!r}, must have one")
    text = re.sub(r"<!--.*?-->", "", sections[0].partition(source)[2])
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    rows, measured, caption = {}, [_machine(page)], ""
    for part, following in zip(parts, [*parts[1:], ""]):
        if names := [picture[2] for picture in _PICTURE.finditer(part)]:
            rows[names[0]] = f"{caption}{_PICTURE.sub(_embedded, part)}"
        elif not _PICTURE.search(following):
            measured.append(part)
        caption = f"{part}\n\n"
    return Section(rows, "\n\n".join(measured))


def _machine(page: str) -> str:
    """A sentence on the machine of the run, whose facts are the first line of the page's ladder."""
    facts = re.search(r"<!-- ladder: begin -->\n(.+?)\.?\n", page)
    if facts is None:
        raise ValueError(f"{PAGE.name} has no ladder that begins with the machine of the run")
    return f"**Measured**, not in this notebook but on an {facts[1]}:"


def _embedded(match: re.Match[str]) -> str:
    """The picture itself, so that a notebook can be moved. JupyterLab shows no SVG attached to a cell."""
    svg = base64.b64encode((FOLDER / "pictures" / f"{match[2]}.svg").read_bytes()).decode()
    return f"![{match[1]}](data:image/svg+xml;base64,{svg})"


def _handed_to_main(last: ast.stmt, path: Path) -> list[str]:
    """The functions of ``if __name__ == "__main__": common.main(check, measure)``, the end of a step."""
    match last:
        case ast.If(body=[ast.Expr(value=ast.Call(args=args))]):
            names = [ast.unparse(arg) for arg in args]
            if set(names) <= RUNS.keys():
                return names
    raise ValueError(f"{path.name} must end in a call of common.main with some of {', '.join(RUNS)}")


def _due(body: list[ast.stmt], functions: list[str]) -> dict[int, list[str]]:
    """Index of a statement -> functions that can be called after it, since all that they use is there."""
    place = {name: index for index, node in enumerate(body) for name in _bound(node)}
    due: dict[int, list[str]] = {}
    for function in functions:
        used, unseen = {place[function]}, [place[function]]
        while unseen:
            names = {node.id for node in ast.walk(body[unseen.pop()]) if isinstance(node, ast.Name)}
            new = {place[name] for name in names & place.keys()} - used
            used |= new
            unseen += new
        due.setdefault(max(used), []).append(function)
    return due


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines, but for imports."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        yield from (
            part.id
            for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        )


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _with_comments(lines: list[str], nodes: list[ast.stmt]) -> Iterator[tuple[ast.stmt, list[str]]]:
    """Each statement with the lines between it and the one before it."""
    last = _first_line(nodes[0]) - 1
    for node in nodes:
        yield node, lines[last : _first_line(node) - 1]
        last = node.end_lineno or node.lineno


def _comments(between: list[str]) -> tuple[list[str], list[str]]:
    """Blocks of comments that stand by themselves, and the lines right above the statement that follows."""
    *apart, above = re.split(r"\n(?:\n)+", "\n".join([*between, "<statement>"]).lstrip("\n"))
    lines = above.split("\n")[:-1]
    return apart, ([""] if between and not between[0] else []) + lines


def _prose(block: str) -> str:
    """A block of comments as Markdown: a rule becomes a heading, what follows it at once its text."""
    rule = _RULE.match(block)
    words = re.sub(r"^# ?", "", block[rule.end() :] if rule else block, flags=re.MULTILINE)
    words = re.sub(r"exercise: (python \S+)", r"**Exercise**: `\1`", words)
    return f"## {rule[1].capitalize()}\n\n{words}".strip() if rule else words


def _statement(lines: list[str], node: ast.stmt, above: list[str]) -> Iterator[Cell]:
    """A function or class after the words of its docstring; another statement as it is."""
    first, end = _first_line(node) - 1, node.end_lineno or node.lineno
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield Cell("plain", "\n".join([*above, *lines[first:end]]))
        return
    code, words = lines[first:end], ast.get_docstring(node)
    if words and len(node.body) > 1:
        begin, after = node.body[0].lineno - 1, node.body[0].end_lineno or node.body[0].lineno
        code = [*lines[first:begin], *lines[after + (not lines[after].strip()) : end]]
        yield Cell("prose", f"`{node.name}`: " + "\n\n".join(blocks(words)))
    yield Cell("definition", "\n".join([*(line for line in above if line), *code]))


def _joined(found: list[Cell]) -> list[Cell]:
    """Plain statements that follow each other become one cell, and so do a heading and the words after it."""
    done: list[Cell] = []
    for cell in found:
        heading = done and re.fullmatch(r"## [^\n]*", done[-1].text) and cell.what == "prose"
        if done and done[-1].what == cell.what == "plain":
            done[-1] = Cell("plain", f"{done[-1].text}\n{cell.text}")
        elif heading:
            done[-1] = Cell("prose", f"{done[-1].text}\n\n{cell.text}")
        else:
            done.append(Cell(cell.what, cell.text.strip("\n")))
    return done
