"""The programs of examples/ run, on the GPU or in the emulator, and check their own results."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "place"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs(name: str) -> None:
    importlib.import_module(f"examples.{name}").main()


def test_the_gallery_lists_each() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [name for name in EXAMPLES if f"({name}.py)" not in text] == []
