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
    assert line == "| step 7 | T | 2000 TFLOPS | 2.00, step 6 | 1.25, mine |  |"


def test_sections_of_a_partial_run_replace_theirs_alone():
    import make_table

    old = "machine\n\n### [01_a.py](01_a.py)\n\none\n\n### [12_b.py](12_b.py)\n\ntwelve\n"
    new = ["machine", "", "### [08_c.py](08_c.py)", "", "eight", "", "### [12_b.py](12_b.py)", "", "newer"]
    text = make_table.merged(old, new)
    assert text.split() == "machine ### [01_a.py](01_a.py) one ### [08_c.py](08_c.py) eight".split() + [
        "###",
        "[12_b.py](12_b.py)",
        "newer",
    ]
