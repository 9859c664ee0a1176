"""Notebooks of the steps: nothing of a step is lost, pictures are in place, and the cells run on a CPU."""

from __future__ import annotations

import ast
import base64
import re
import sys
import time
from collections import Counter

import pytest
import step_cells

STEPS = step_cells.steps()
of_each_step = pytest.mark.parametrize("number", STEPS)


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def _code_and_prose(number: str) -> tuple[str, str]:
    """All cells of a step together, but for those of code that are not the step's own."""
    cells = step_cells.cells(STEPS[number])
    code = "\n\n".join(cell.text for cell in cells if cell.is_code and cell.what != "run")
    return code, "\n\n".join(cell.text for cell in cells if not cell.is_code)


class _WithoutDocstrings(ast.NodeTransformer):
    """Removes what the notebooks show as prose."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            has = ast.get_docstring(node) is not None
            node.body = node.body[1:] if has and len(node.body) > 1 else node.body
        return node


def _program(text: str) -> list[str]:
    tree = _WithoutDocstrings().visit(ast.parse(text))
    return [ast.dump(node) for node in tree.body]


@of_each_step
def test_the_code_is_the_steps(number):
    """All statements in their order, but for docstrings and the call of `common.main`."""
    code, _ = _code_and_prose(number)
    *expected, _main = _program(STEPS[number].read_text())
    assert _program(code) == expected


@of_each_step
def test_no_word_is_lost(number):
    """Comments and docstrings are in some cell, but for the command of the script."""
    step = STEPS[number]
    left_out = rf"^    python tutorials/{step.name}.*?\n|^WHY$|^if __name__.*\Z"
    expected = re.sub(left_out, "", step.read_text(), flags=re.MULTILINE | re.DOTALL)
    lost = _words(expected) - _words("\n".join(_code_and_prose(number)))
    assert not lost


def _page_sections() -> dict[str, str]:
    """Number of a step -> what the page says below the line that names its source."""
    _, *parts = re.split(r"^Source: \[(\w+)\.py\].*", step_cells.PAGE.read_text(), flags=re.MULTILINE)
    texts = (re.split(r"^#+ ", part, flags=re.MULTILINE)[0] for part in parts[1::2])
    return {name.partition("_")[0]: text for name, text in zip(parts[::2], texts)}


@of_each_step
def test_what_was_measured_is_told(number):
    """The page's words and tables on the step, and on which machine."""
    _, prose = _code_and_prose(number)
    told = re.sub(r"<!--.*?-->|\(pictures/\w+\.svg\)", "", _page_sections()[number])
    lost = _words(told) - _words(prose)
    assert not lost
    assert "not in this notebook but on an NVIDIA H200" in prose


@of_each_step
def test_cells_are_short(number):
    """One function or class a cell at most; what runs them comes by itself."""
    for cell in step_cells.cells(STEPS[number]):
        if cell.is_code:
            nodes = ast.parse(cell.text).body
            defined = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
            assert len(defined) == (cell.what == "definition")


def test_each_picture_is_in_its_step():
    """Each that the page shows of a step, once, as the file is; layouts before the code that they explain."""
    shown = 0
    for number, section in _page_sections().items():
        files = re.findall(r"\]\(pictures/(\w+\.svg)\)", section)
        _, prose = _code_and_prose(number)
        embedded = re.findall(r"\(data:image/svg\+xml;base64,([^)]*)\)", prose)
        pictures = [(step_cells.FOLDER / "pictures" / file).read_bytes() for file in files]
        assert sorted(map(base64.b64decode, embedded)) == sorted(pictures), number
        shown += len(files)
    assert shown >= 12
    cells = [cell.text for cell in step_cells.cells(STEPS["01"])]
    picture = next(index for index, text in enumerate(cells) if "![blocked layout]" in text)
    (definition,) = (index for index, text in enumerate(cells) if "def tv_layout" in text)
    assert definition - 2 <= picture < definition


def test_a_function_is_called_when_all_it_uses_is_there(tmp_path, monkeypatch):
    """`check` below `helper`, which it uses through `between`; the outputs stand right below the code."""
    step = tmp_path / "20_late.py"
    step.write_text(
        '"""Step 20: late.\n\nAdds:      x.\n\nWHY\nBecause.\n"""\n\nimport common\n\n\n'
        "def check(lab):\n    return between()\n\n\ndef between():\n    return helper(LIMIT)\n\n\n"
        "def helper(value):\n    return value\n\n\nLIMIT = 3\n\n\ndef measure(bench):\n    return None\n\n\n"
        'if __name__ == "__main__":\n    common.main(check, measure)\n'
    )
    page = tmp_path / "README.md"
    ladder = "<!-- ladder: begin -->\nA machine.\n"
    page.write_text(f"{ladder}\n### Step 20\n\nSource: [20_late.py](20_late.py).\n\nOne row.\n")
    monkeypatch.setattr(step_cells, "PAGE", page)
    kinds = [(cell.what, cell.text) for cell in step_cells.cells(step)]
    limit = kinds.index(("plain", "LIMIT = 3"))
    assert kinds[limit + 1] == ("run", step_cells.RUNS["check"])
    assert kinds[-2:] == [
        ("run", step_cells.RUNS["measure"]),
        ("prose", "**Measured**, not in this notebook but on an A machine:\n\nOne row."),
    ]
    page.write_text(ladder)
    with pytest.raises(ValueError, match=r"README.md has 0 sections with 'Source: \[20_late.py\]"):
        step_cells.cells(step)
    step.write_text('"""Step 20"""\nx = 1\n')
    page.write_text(f"{ladder}\n### Step 20\n\nSource: [20_late.py](20_late.py).\n")
    with pytest.raises(ValueError, match=r"20_late.py must end in a call of common.main"):
        step_cells.cells(step)


def test_a_step_that_is_not_there(capsys):
    import notebooks

    with pytest.raises(SystemExit) as stopped:
        notebooks.main(["01", "99"])
    assert stopped.value.code == 2
    assert "STEP is '99', must be one of 01, 02, " in capsys.readouterr().err


def test_without_the_extra(tmp_path, monkeypatch, capsys):
    import notebooks

    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert notebooks.main(["01", "--out", str(tmp_path / "made")]) == 2
    assert "pip install '.[notebooks]'" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def _jupyter():
    """The modules of the extra; a skip without them."""
    for name in ("ipykernel", "jupytext", "nbclient"):
        pytest.importorskip(name, reason="needs the extra `notebooks`")
    return pytest.importorskip("nbformat")


def test_all_notebooks_are_valid(tmp_path):
    """Each by the schema, with the cells as they are, the same when made again."""
    nbformat = _jupyter()
    import notebooks

    assert notebooks.main(["--no-run", "--out", str(tmp_path)]) == 0
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == [f"{path.stem}.ipynb" for path in STEPS.values()]
    texts = [path.read_bytes() for path in files]
    for path, step in zip(files, STEPS.values()):
        made = nbformat.read(path, as_version=4)
        nbformat.validate(made)
        kinds = {True: "code", False: "markdown"}
        cells = step_cells.cells(step)
        assert [(cell.cell_type, cell.source) for cell in made.cells] == [
            (kinds[cell.is_code], cell.text) for cell in cells
        ]
        assert not any(cell.get("outputs") for cell in made.cells)
    assert notebooks.main(["--no-run", "--out", str(tmp_path)]) == 0
    assert [path.read_bytes() for path in files] == texts


def test_the_cells_of_a_step_run(tmp_path, monkeypatch):
    """Step 3 in a kernel of Jupyter without a GPU, outside of the checkout: numbers right below the code."""
    nbformat = _jupyter()
    import notebooks

    monkeypatch.setenv("KERNELS_DSL_CACHE_DIR", str(tmp_path / "cache"))
    assert notebooks.main(["03", "--out", str(tmp_path)]) == 0
    made = nbformat.read(tmp_path / "03_pipeline.ipynb", as_version=4)
    nbformat.validate(made)
    printed = {cell.source: cell.outputs for cell in made.cells if cell.cell_type == "code" and cell.outputs}
    assert list(printed) == list(step_cells.RUNS.values())
    (checked,), (measured,), (timeline,) = printed.values()
    assert checked.text.count("correct   fold of ") == 3 and "(emulator)" in checked.text
    assert measured.text == "measure: left out, it needs a Hopper GPU\n"
    assert "Timeline of CTA (0, 0, 0)" in timeline.text and "LLL" in timeline.text


def test_progress_is_no_output(caplog):
    """Lines that a long compile logs are dropped, in the words that it really uses; other warnings stay."""
    nbformat = _jupyter()
    import notebooks

    from lowering import compile as compiling

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "ANNOUNCE_SECONDS", 0.05)
        with compiling._announced("gemm", "sm_90a", "this is done once"):
            time.sleep(0.3)
    (progress,) = (record.getMessage() for record in caplog.records)
    streams = [
        ("stderr", f"{progress}\n"),
        ("stdout", "  correct\n"),
        ("stderr", f"{progress}\nUserWarning: odd\n"),
    ]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in streams]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("check(lab)", outputs=outputs)])
    notebooks.drop_progress(made)
    assert [output.text for output in made.cells[0].outputs] == ["  correct\n", "UserWarning: odd\n"]


def test_a_cell_that_fails(tmp_path, monkeypatch, capsys):
    """No notebook with half of its outputs; the exit status says so."""
    nbformat = _jupyter()
    import notebooks

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    monkeypatch.setattr(notebooks, "notebook", lambda step, out: made)
    assert notebooks.main(["01", "--out", str(tmp_path)]) == 1
    assert "01_vector_add.ipynb is not written" in (error := capsys.readouterr().err)
    assert "ZeroDivisionError" in error
    assert not list(tmp_path.glob("*.ipynb"))
