"""The core calls: some of the common ones, of each operation that most programs begin with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels_dsl.aot import common
from kernels_dsl.aot.calls.core import USUAL, is_core
from kernels_dsl.cli import kernels

ROOT = Path(__file__).parents[2]
ARCHES = ["sm_80", "sm_86", "sm_89", "sm_90a"]


def test_each_entry_and_each_of_its_words_chooses_calls():
    labels = [call.label.split() for call in common.common_calls("sm_90a")]
    for operation, taken in USUAL:
        chosen = [words for name, *words in labels if name == operation and taken.issuperset(words)]
        assert chosen, operation
        unused = taken.difference(*chosen)
        assert not unused, (operation, unused)


@pytest.mark.parametrize("arch", ARCHES)
def test_core_kernels_are_common_ones_and_as_many_as_is_documented(arch):
    core = {kernel.key(arch) for kernel in kernels.shipped(arch, listing="core")}
    assert core < {kernel.key(arch) for kernel in kernels.shipped(arch, listing="common")}
    page = (ROOT / "docs/reference/command_line.md").read_text()
    (documented,) = re.findall(rf"^\| {arch} .*\| (\d+) \| [\d.]+ \|$", page, re.M)
    assert len(core) == int(documented)


def test_a_rarer_word_takes_a_call_out():
    labels = {call.label for call in filter(is_core, common.common_calls("sm_90a"))}
    assert "attention bf16 d128 causal 1x4096" in labels
    assert not any("sinks" in label or "d256" in label for label in labels)
