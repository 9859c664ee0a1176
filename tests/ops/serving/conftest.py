"""Fixtures of the tests of serving."""

from __future__ import annotations

import pytest

from kernels_dsl.ops.serving import paged_attention as choice


@pytest.fixture
def kernels(monkeypatch) -> list[str]:
    """The names of the operations that `paged_attention` called."""
    called: list[str] = []
    for name in ("attention_decode", "attention_varlen"):
        inner = getattr(choice, name)
        monkeypatch.setattr(choice, name, lambda *a, _n=name, _f=inner, **o: called.append(_n) or _f(*a, **o))
    return called
