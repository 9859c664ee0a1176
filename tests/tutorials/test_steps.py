"""Each step of the tutorials: right where it can run, compiled without spills, of the common form."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "tutorials"
STEPS = sorted(path.stem for path in FOLDER.glob("[0-9a]*_*.py"))
MAX_LINES = 260


def _load(name: str):
    import common

    return common.load(name)


@pytest.mark.parametrize("name", STEPS)
def test_check(name):
    """In the emulator, also where there is a GPU: the test below takes that."""
    import common

    _load(name).check(common.Lab(common.EMULATOR))


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("name", STEPS)
def test_check_on_the_gpu(name):
    import common

    _load(name).check(common.Lab(common.GPU))


@pytest.mark.parametrize(
    ("name", "host", "replacement"),
    [
        ("01_vector_add", "vector_add", lambda a, b, c: c.copy_(a)),
        ("02_tma_copy", "tma_copy", lambda x, y: y[:-1].copy_(x[:-1])),
        ("03_pipeline", "fold", lambda x, y: y.copy_(x.view(x.shape[0], -1, 64)[:, 1:].sum(1))),
        ("06_gemm_simple", "gemm", lambda a, b, d: d.copy_(a[:, 1:] @ b[:, 1:].T)),
        ("07_gemm_warp_specialized", "gemm", lambda a, b, d: d.copy_((a @ b.T).roll(64, 0))),
        ("12_bsr_gemm", "bsr_gemm", lambda values, b, d, *_, **__: d.copy_(d.nan_to_num(0.0))),
        ("10_flash_attention", "attention", lambda q, k, v, o, *_, **__: o.copy_(v[:1].expand_as(o))),
    ],
)
def test_check_notices(name, host, replacement, monkeypatch):
    """A wrong kernel does not pass for a right one."""
    import common

    from reference.tolerance import ToleranceError

    step = _load(name)
    monkeypatch.setattr(step, host, replacement)
    lab = common.Lab(common.EMULATOR)
    monkeypatch.setattr(lab, "launch", lambda function, *args, **constants: function(*args))
    with pytest.raises(ToleranceError):
        step.check(lab)


def _measured_kernels():
    """(step, tile or None, cluster, epilogue, SASS that must be there) of the GEMMs that README measures."""
    wgmma = ("HGMMA", "UTMALDG")
    yield "06_gemm_simple", None, 1, None, wgmma
    for tile in ((128, 256, 64, 4), (128, 128, 64, 4), (256, 128, 64, 4), (128, 192, 64, 4)):
        yield "07_gemm_warp_specialized", tile, 1, None, wgmma
    for cluster in (1, 2):
        yield "08_gemm_persistent", (128, 256, 64, 4), cluster, None, wgmma
    for tile in ((128, 192, 64, 5), (128, 128, 64, 6)):
        for epilogue in ("identity", "bias_gelu"):
            yield "09_gemm_epilogue", tile, 2, epilogue, (*wgmma, "UTMASTG", "STSM")
    yield "a1_gemm_sm89", None, 1, None, ("HMMA", "LDGSTS", "LDSM")


@pytest.mark.parametrize(("name", "tile", "cluster", "epilogue", "instructions"), list(_measured_kernels()))
def test_measured_gemms_do_not_spill(name, tile, cluster, epilogue, instructions):
    import torch

    step = _load(name)
    matrix, bias = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"), None
    if epilogue == "bias_gelu":
        bias = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    args, constants = [matrix] * 3, {}
    if tile is not None:
        constants["tile"] = _load("07_gemm_warp_specialized").Tile(*tile)
    if name.startswith("a1"):
        constants["tile"] = step.Tile()
    if name[:2] in ("08", "09"):
        constants = {"plan": _load("08_gemm_persistent").Plan(constants["tile"], cluster)}
        args = [*args, 132] if name.startswith("08") else [*args, bias, 132]
    if epilogue is not None:
        constants["epilogue"] = getattr(step, epilogue)
    for arch in ("sm_89", "sm_90a") if name.startswith("a1") else ("sm_90a",):
        (used,) = step.gemm.compile(*args, arch=arch, **constants).resources()
        assert (used.stack_bytes, used.spill_loads, used.spill_stores) == (0, 0, 0)
        assert all(used.count(instruction) for instruction in instructions), used.instructions


def test_measured_block_sparse_gemm_does_not_spill():
    import torch

    step = _load("12_bsr_gemm")
    values, b = (torch.empty(8192, k, dtype=torch.bfloat16, device="meta") for k in (step.BLOCK, 8192))
    lists = tuple(torch.empty(n, dtype=torch.int32, device="meta") for n in (64, 65, 64))
    (used,) = step.bsr_gemm.compile(values, b, b, lists, arch="sm_90a", tile=step.Tile()).resources()
    assert (used.stack_bytes, used.spill_loads, used.spill_stores) == (0, 0, 0)
    assert used.count("HGMMA") and used.count("UTMALDG")


@pytest.mark.parametrize(
    ("visit", "dim"),
    [
        ("EVERYTHING", 64),
        ("CAUSAL", 64),
        *((visit, 128) for visit in ("EVERYTHING", "SLIDING", "PACKED", "LISTS", "slow")),
    ],
)
def test_measured_attention_does_not_spill(visit, dim):
    import torch

    step10, step11, shared = (
        _load(name) for name in ("10_flash_attention", "11_attention_blocks", "shared_attention")
    )
    x = torch.empty(16, 4096, dim, dtype=torch.bfloat16, device="meta").permute(1, 2, 0)
    counts, blocks, starts = (
        torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((16, 32), (16, 32, 8), (4096,))
    )
    extra = {"SLIDING": (2048,), "PACKED": (starts,), "LISTS": (counts, blocks)}.get(visit)
    chosen = step11.everything_masked(step11.causal_span) if visit == "slow" else None
    if chosen is None:
        chosen = getattr(shared if visit == "EVERYTHING" else step11, visit)
    tile = step10.Tile(d=dim, m=192 if (visit, dim) == ("EVERYTHING", 64) else 128)
    compiled = step10.attention.compile(*[x] * 4, 1.0, extra, arch="sm_90a", tile=tile, visit=chosen)
    (used,) = compiled.resources()
    assert (used.stack_bytes, used.spill_loads, used.spill_stores) == (0, 0, 0)
    assert used.count("HGMMA") and used.count("UTMALDG")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("03_pipeline", {"tma load", "wait"}),
        ("04_warp_roles", {"tma load", "wait"}),
        ("07_gemm_warp_specialized", {"tma load", "wait", "wgmma"}),
        ("09_gemm_epilogue", {"tma load", "wait", "wgmma", "tma store"}),
    ],
)
def test_timeline(name, kinds, capsys):
    """The drawings that the step promises where there is no GPU."""
    import common

    lab = common.Lab(common.EMULATOR)
    _load(name).show(lab)
    common.draw_timeline(lab, None)
    assert kinds <= {event.kind for event in lab.timeline.events}
    assert " TMA " in capsys.readouterr().out


def test_blocked_layout_takes_wide_loads():
    """The statements of step 1 about its two layouts."""
    import torch

    step = _load("01_vector_add")
    vector = torch.empty(4096, device="meta")
    wide, narrow = (
        step.vector_add.compile(vector, vector, vector, arch="sm_90a", interleaved=flag).resources()[0]
        for flag in (False, True)
    )
    assert wide.count("LDG.E.128") == 2
    assert narrow.count("LDG.E.128") == 0


@pytest.mark.parametrize("name", STEPS)
def test_form(name):
    """The order why, kernel, host, check, measure, takeaways, exercise; the header; the length."""
    text = (FOLDER / f"{name}.py").read_text()
    header = ast.get_docstring(ast.parse(text)) or ""
    for word in ("Adds:", "Reuses:", "Measures:", "WHY", f"python tutorials/{name}.py"):
        assert word in header, f"{name}: the header lacks {word!r}"
    marks = [
        '"""',
        "# ---- kernel",
        "# ---- host",
        "# ---- check",
        "def check(",
        "def measure(",
        "# ---- takeaways",
        "# * exercise",
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    number = name.split("_")[0]
    assert f"python tutorials/exercises/{number}.py" in text
    assert len(text.splitlines()) <= MAX_LINES


def test_readme_names_every_step():
    text = (FOLDER / "README.md").read_text()
    assert [name for name in STEPS if f"{name}.py" not in text] == []
    for linked in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in linked:
            assert (FOLDER / linked).exists(), f"README links to {linked}, which is not there"
