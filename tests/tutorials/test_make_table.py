"""The README's tables from what the steps wrote."""

from __future__ import annotations


def _table(title: str, baseline: str, **microseconds: float) -> dict:
    names = {name.replace("_", " "): us for name, us in microseconds.items()}
    return {
        "title": title,
        "unit": "TFLOPS",
        "baseline": baseline,
        "work": dict.fromkeys(names, 4e9),
        "microseconds": names,
        "notes": {},
    }


def test_shares_of_blocks_become_one_table(monkeypatch):
    import make_table

    monkeypatch.setattr(make_table, "DENSE", "dense")
    shares = [
        _table(title, "dense", step_12=us, dense=200.0) for title, us in (("few", 20.0), ("all", 250.0))
    ]
    *_, few, every = make_table.against_dense([*shares, _table("order", "plain", sorted=1.0, plain=1.0)])
    assert few == "| few | 20 | 200 | 200 | 10.00 |"
    assert every == "| all | 250 | 16 | 200 | 0.80 |"


def test_overview_names_what_a_step_is_compared_with(tmp_path):
    import json

    import make_table

    rows = {"step_7": 2.0, "step_1": 9.0, "step_6": 4.0, "step_7,_slow": 3.0, "cp.async": 0.5, "mine": 2.5}
    (tmp_path / "07.json").write_text(json.dumps({"tables": [_table("T", "mine", **rows)]}))
    line = make_table.overview(tmp_path)[-1]
    link = "[step 7](07_gemm_warp_specialized.py)"
    assert line == f"| {link} | {make_table.LADDER['07']} | T | 2000 TFLOPS | 2.00, step 6 | 1.25, mine |"


def test_committed_tables_are_those_of_the_committed_files():
    import make_table

    text = make_table.README.read_text()
    assert make_table.with_tables(text, make_table.render(make_table.RESULTS)) == text


def test_a_step_without_a_peer_is_its_own_best_row(tmp_path):
    import json

    import make_table

    rows = {"narrow": 4.0, "wide": 2.0}
    (tmp_path / "05.json").write_text(json.dumps({"tables": [_table("T", "wide", **rows)]}))
    assert make_table.overview(tmp_path)[-1].endswith("| T | 2000 TFLOPS |  |  |")


def _contents(folder) -> dict[str, list[str]]:
    return {path.stem: [path.read_text()] for path in sorted(folder.iterdir())}


def test_files_of_a_partial_run_replace_theirs_alone(tmp_path, monkeypatch):
    import make_table

    results, run = tmp_path / "results", tmp_path / "run"
    for folder, names in ((results, ("01", "08")), (run, ("08",))):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.json").write_text(f"{folder.name} {name}")
    monkeypatch.setattr(make_table, "RESULTS", results)
    monkeypatch.setattr(make_table, "README", tmp_path / "README.md")
    monkeypatch.setattr(make_table, "render", _contents)

    def page(*texts: str) -> str:
        marked = "\nprose\n".join(
            f"{make_table.BEGIN.format(name)}\n{text}\n{make_table.END.format(name)}"
            for name, text in zip(("01", "08"), texts)
        )
        return f"head\n{marked}\ntail\n"

    make_table.README.write_text(page("old", "old"))
    make_table.main(run)
    assert make_table.README.read_text() == page("results 01", "run 08")
