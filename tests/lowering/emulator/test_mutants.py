"""A sample of `mutants.py`, which runs in whole by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")


def test_a_sample_of_mutants_is_found() -> None:
    """The first four kinds of fault of the Ampere GEMM."""
    from tests.lowering.emulator import mutants

    def sample(bench: mutants.Bench) -> None:
        drawn = mutants.draw(bench, seed=1)[:4]
        assert len({mutant.fault for mutant in drawn}) == 4
        missed = [verdict for mutant in drawn if (verdict := bench.judge(mutant)).outcome != "found"]
        assert not missed

    mutants.visit("gemm_sm80", sample)
