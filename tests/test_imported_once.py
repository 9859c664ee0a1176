"""The guard in `conftest.py` against tests that drop modules of torch."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.imported_once import dropped_modules


def test_a_dropped_module_of_torch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dropped_modules() == set()
    monkeypatch.delitem(sys.modules, torch.nn.__name__)
    found = dropped_modules()
    monkeypatch.undo()
    assert found == {"torch.nn"}
