"""One synchronisation taken out of a real kernel's PTX: the emulator must notice each."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import kernels_dsl  # noqa: E402
from kernels_dsl.config.gemm import Sm80GemmConfig, Sm90GemmConfig  # noqa: E402
from lowering import emulator  # noqa: E402
from lowering.emulator import Kind, Report, fast, ptx, session  # noqa: E402

SM90 = Sm90GemmConfig(128, 64, stages=2)
SM80 = Sm80GemmConfig(64, 64, 32, 3, 2, 2)
STREAM_K = Sm90GemmConfig(64, 16, stream_k=True)
BARRIER = r"\n\s*bar\.sync[^;]*;"


def _without(pattern: str, count: int = 0) -> Callable[[str], str]:
    def mutate(text: str) -> str:
        changed, n = re.subn(pattern, "", text, count=count)
        assert n, f"the kernel has no {pattern}"
        return changed

    return mutate


def _without_last(pattern: str) -> Callable[[str], str]:
    def mutate(text: str) -> str:
        last = list(re.finditer(pattern, text))[-1]
        return text[: last.start()] + text[last.end() :]

    return mutate


def _unconditional_waits(text: str) -> str:
    return text.replace("@P1 bra.uni DONE;", "bra.uni DONE;")


def _changed(pattern: str, by: str) -> Callable[[str], str]:
    def mutate(text: str) -> str:
        changed, n = re.subn(pattern, by, text)
        assert n, f"the kernel has no {pattern}"
        return changed

    return mutate


MUTATIONS = {
    "proxy fences": (SM90, _without(r"fence\.proxy\.async[^;]*;"), {Kind.MISSING_PROXY_FENCE}),
    "wgmma.fence": (SM90, _without(r"wgmma\.fence[^;]*;"), {Kind.MISSING_WGMMA_FENCE}),
    "wgmma.wait_group": (
        SM90,
        _without(r"wgmma\.wait_group[^;]*;"),
        {Kind.PENDING_REGISTER, Kind.OVERWRITE_IN_USE},
    ),
    "waits on mbarriers": (SM90, _unconditional_waits, {Kind.READ_BEFORE_ARRIVAL, Kind.OVERWRITE_IN_USE}),
    "bulk store drain": (SM90, _without(r"cp\.async\.bulk\.wait_group\.read[^;]*;"), {Kind.OVERWRITE_IN_USE}),
    "barriers of the epilogue": (SM90, _without_last(BARRIER), {Kind.RACE, Kind.OVERWRITE_IN_USE}),
    "arrivals of consumers": (SM90, _without(r"(@\S+ )?mbarrier\.arrive\.shared[^;]*;"), {Kind.DEADLOCK}),
    "expected bytes": (
        SM90,
        lambda t: re.sub(r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>16;", t),
        {Kind.DEADLOCK},
    ),
    "cp.async waits": (SM80, _without(r"cp\.async\.wait_\w+[^;]*;"), {Kind.READ_BEFORE_ARRIVAL}),
    "the release of stream-K": (STREAM_K, _changed(r"atom\.global\.release", "atom.global"), {Kind.RACE}),
    "the acquire of stream-K": (STREAM_K, _changed(r"ld\.acquire", "ld.relaxed"), {Kind.RACE}),
    "the flag of stream-K": (
        STREAM_K,
        _changed(r"ld\.acquire\.gpu\.global\.b32\s+(%r\d+), [^;]*;", r"mov.b32 \1, 1000;"),
        {Kind.RACE},
    ),
    "CTA barriers": (SM80, _without(BARRIER), {Kind.RACE, Kind.READ_BEFORE_ARRIVAL}),
}


def _run(
    config: object,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[str], str],
    shape: tuple = (264, 264, 264),
) -> list[Report]:
    parse = ptx.parse
    monkeypatch.setattr(session, "_loaded", {})
    monkeypatch.setattr(ptx, "parse", lambda text: parse(mutate(text)))
    shape, sms = ((200, 32, 640), 3) if config is STREAM_K else (shape, None)
    a, b = (torch.randint(-2, 3, (rows, shape[2])).to(torch.bfloat16) for rows in shape[:2])
    with emulator.run(arch="sm_90a", sms=sms, raise_on_report=False, max_steps=400_000) as active:
        try:
            kernels_dsl.gemm(a, b.mT, config=config)  # type: ignore[arg-type]
        except emulator.EmulatorError:
            pass
    return active.reports


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_missing_synchronisation_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, mutate, expected = MUTATIONS[name]
    found = {report.kind for report in _run(config, monkeypatch, mutate)}
    assert found & expected, f"found {found}"


@pytest.mark.skipif(fast.kernels() is None, reason="needs numba (the extra emulator-fast)")
@pytest.mark.parametrize(
    "name", ["wgmma.wait_group", "waits on mbarriers", "expected bytes", "barriers of the epilogue"]
)
def test_compiled_code_reports_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of all findings, with the lines to look at."""
    config, mutate, _ = MUTATIONS[name]
    with monkeypatch.context() as patch:
        quick = [str(report) for report in _run(config, patch, mutate, (136, 72, 200))]
    with fast.reference(), monkeypatch.context() as patch:
        reference = [str(report) for report in _run(config, patch, mutate, (136, 72, 200))]
    assert quick == reference
    assert quick


@pytest.mark.parametrize("config", [SM90, SM80, STREAM_K], ids=["sm90", "sm80", "stream-K"])
def test_the_kernels_as_they_are_have_no_finding(config: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(config, monkeypatch, lambda text: text) == []
