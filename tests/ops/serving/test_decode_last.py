"""The last split of a tile to be there merges them all: the bits of the kernel that merges, in any order of
arrival, and counters that are 0 again, that of the items too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lowering
from kernels_dsl.config.decode import decode_config
from kernels_dsl.config.problem import H200
from kernels_dsl.ops.serving import decode_operation
from kernels_dsl.ops.serving.decode_operation import DecodeArguments, describe
from lowering import emulator
from reference.attention import Masking
from tests.ops.serving.decode_cases import Paged, check, fp8_case, paged

CAUSAL = Masking(right=0)


@pytest.fixture
def with_fields(monkeypatch) -> Any:
    """`run(call, **fields)`: a call with such fields of its configuration."""
    launching = decode_operation._launching

    def run(call: Any, **fields: Any) -> Any:
        def changed(decoded: Any, config: Any, *others: Any) -> Any:
            return launching(decoded, replace(config, **fields), *others)

        monkeypatch.setattr(decode_operation, "_launching", changed)
        monkeypatch.setattr(decode_operation.ATTENTION_DECODE, "calls", {})
        monkeypatch.setattr(decode_operation.ATTENTION_DECODE, "plans", {})
        return call()

    return run


@pytest.fixture
def memory(monkeypatch) -> torch.Tensor:
    """Workspace and counters that stay from call to call, as on a GPU."""
    counters, workspace = torch.zeros(64, dtype=torch.int32), torch.full((1 << 20,), float("nan"))

    def addresses(index: int, elements: int, words: int) -> tuple[Any, Any]:
        assert elements <= workspace.numel() and words <= counters.numel()
        return lowering.Address(workspace), lowering.Address(counters)

    monkeypatch.setattr(decode_operation, "addresses", addresses)
    return counters


def same(case: Paged, run: Any, memory: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, the same by one launch and by two, of which the second has three forms."""
    forms: tuple[dict[str, Any], ...] = ({"whole_rows": True}, {"at_once": 4}, {"at_once": 16})
    one = run(lambda: case.decode(**options), merges=True)
    others = [run(lambda: case.decode(**options), merges=False, **form) for form in forms]
    assert not memory.any()
    assert all(torch.equal(x, y) for other in others for x, y in zip(one, other))
    return one


@pytest.mark.parametrize(("arch", "dim"), [("sm_90a", 128), ("sm_80", 64), ("sm_90a", 96)])
def test_lengths(arch, dim, seed, with_fields, memory):
    """None, one key, one split and many; with fewer CTAs than items and with more."""
    case = paged((700, 0, 1, 64, 130), 16, seed, heads=(8, 2), dim=dim)
    for sms, seeds in ((1, 2), (4, 1)):
        with emulator.run(arch=arch, sms=sms, seeds=seeds):
            check(case, same(case, with_fields, memory), CAUSAL)


def test_tiles_and_masks(seed, with_fields, memory):
    """Rows of several tiles, each of which has splits that it does not see; a window, softcap, sinks."""
    sinks = torch.randn(32, generator=torch.Generator().manual_seed(seed))
    case = paged((600, 0, 70), 16, seed, queries=3, heads=(32, 1), dim=64)
    with emulator.run(arch="sm_90a", sms=1):
        same(case, with_fields, memory, window=(250, 0), softcap=3.0, sinks=sinks)
    with emulator.run(arch="sm_86", sms=1):
        same(case, with_fields, memory)


def test_more_splits_than_a_thread_loads_at_once(seed, with_fields, memory):
    """40 of a sequence with one row: 16 at a time, and the last 8."""
    case, scales = fp8_case((70, 40 * 1024), 1024, seed, heads=(1, 1), dim=64)
    with emulator.run(arch="sm_90a", sms=8):
        found = same(case, with_fields, memory, **scales._asdict())
    check(case, found, CAUSAL)


def test_what_merges():
    """Few rows of partial results, and an item a CTA."""
    for batch, length, queries, heads, wanted in (
        (1, 1024, 1, 32, True), (4, 1024, 1, 32, True), (5, 1024, 1, 32, False), (1, 1024, 3, 32, False),
        (1, 32768, 1, 32, False),
    ):  # fmt: skip
        pages = length // 16
        cache = torch.empty(1, 16, 8, 128, dtype=torch.bfloat16)
        call = DecodeArguments(
            torch.empty(batch, queries, heads, 128, dtype=torch.bfloat16), cache, cache,
            torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, pages, dtype=torch.int32),
        )  # fmt: skip
        decoded = describe(call)
        config = decode_config(128, decoded.together, decoded.pack, H200)
        assert decoded.merges(config, 132 * config.ctas_per_sm) == wanted
        assert not replace(decoded, fixed=True).merges(config, 1 << 20)
        assert decoded.merged_by(config) == replace(config, at_once=16 if length == 32768 else 4)
        more = replace(decoded, batch=256 // (queries * heads) + 1)
        assert more.merged_by(config) == replace(more, packed=True).merged_by(config) == config
        many = replace(decoded, batch=2047 // (queries * heads) + 1)
        assert many.merged_by(config) == replace(config, whole_rows=True)
