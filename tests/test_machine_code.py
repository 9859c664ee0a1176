"""`tools/machine_code.py`: what its digest covers, which kernels it pairs, and two trees of small kernels."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tools import machine_code
from tools.machine_code import Choice, compared, counterparts, digest, key_of, sampled

ROOT = Path(__file__).parents[1]


def elf(*sections: tuple[str, bytes]) -> bytes:
    """An ELF file of these sections, in their order."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in sections) + b".shstrtab\0"
    contents = [*sections, (".shstrtab", names)]
    body, headers, at = b"", bytes(64), 1
    for name, data in contents:
        headers += struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0)
        body, at = body + data, at + len(name) + 1
    start = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQ", 2, 190, 1, 0, 0, 64 + len(body))
    return start + struct.pack("<IHHHHHH", 0, 64, 0, 0, 64, len(contents) + 1, len(contents)) + body + headers


TEXT, CONSTANTS = (".text.first", b"instructions"), (".nv.constant0.first", b"parameters")


@pytest.mark.parametrize(
    ("sections", "same"),
    [
        ([(".text.renamed", TEXT[1]), (".nv.constant0.renamed", CONSTANTS[1])], True),
        ([CONSTANTS, TEXT], True),
        ([TEXT, CONSTANTS, (".symtab", b"names"), (".debug_line", b"lines"), (".nv.info", b"facts")], True),
        ([(".text.first", b"Instructions"), CONSTANTS], False),
        ([TEXT, (".nv.constant0.first", b"more parameters")], False),
        ([TEXT, (".nv.constant3.first", CONSTANTS[1])], False),
        ([TEXT, TEXT, CONSTANTS], False),
    ],
)
def test_the_digest_covers_code_and_constants_alone(sections, same):
    assert (digest(elf(*sections)) == digest(elf(TEXT, CONSTANTS))) == same


def test_what_has_no_code_is_refused():
    with pytest.raises(ValueError, match="not a cubin"):
        digest(b"PK" + bytes(100))
    with pytest.raises(ValueError, match="no machine code"):
        digest(elf(CONSTANTS))


def test_a_key_has_no_name_of_a_function():
    assert key_of("fp8 scaled_gemm row, gemm_sm90 64x32 #18") == "fp8 scaled_gemm row 64x32"
    assert key_of("fp8 quantize 128x128 both, quantize_tile #45") == "fp8 quantize 128x128 both"
    assert key_of("bsr sm90 64x64 dense @ bsr fp16 bias") == "bsr sm90 64x64 dense @ bsr fp16 bias"


def test_a_sample_is_seeded_spread_and_stable():
    keys = [f"gemm sm90 {n}" for n in range(600)] + [f"bsr sm90 {n}" for n in range(40)] + ["lists window"]
    chosen = sampled(keys, 60, seed=1)
    assert chosen == sampled(reversed(keys), 60, seed=1) != sampled(keys, 60, seed=2)
    assert 55 <= len(chosen) <= 65
    assert "lists window" in chosen
    assert sum(key.startswith("bsr") for key in chosen) >= 8
    assert len(chosen - sampled([*keys, "gemm sm90 new"], 60, seed=1)) <= 1
    assert sampled(keys, 20, seed=1) < chosen
    assert sampled(keys, None, seed=1) == set(keys) == sampled(keys, 10_000, seed=1)
    assert Choice(("window", "bsr sm90 7"), None, 0).names(keys) == ["bsr sm90 7", "lists window"]


def record(key: str, sha256: str, **facts: int) -> dict:
    return {"key": key, "sha256": sha256, **dict.fromkeys(machine_code.FACTS[1:], 0), **facts}


def test_records_are_paired_by_key_then_by_code(capsys):
    old = [record("a", "1"), record("b", "2"), record("b", "3"), record("c", "4"), record("d", "5")]
    new = [
        record("b", "3"),
        record("b", "2"),
        record("a", "1"),
        record("renamed", "4"),
        record("d", "6", spills=2),
    ]
    found = compared(old, new)
    assert (found.equal, found.renamed, found.missing, found.new) == (4, [("c", "renamed")], [], [])
    assert [(one["key"], other["spills"]) for one, other in found.differing] == [("d", 2)]
    assert machine_code.report(found) == 1
    shown = capsys.readouterr().out
    assert "differs: d" in shown
    assert "spills 0" in shown
    assert "spills 2" in shown
    assert machine_code.report(compared(old, [*new[:4], old[4]])) == 0
    assert machine_code.report(compared(old, old[1:])) == 1
    assert machine_code.report(compared(old[1:], old)) == 1
    assert machine_code.report(compared([{"key": "a", "error": "E"}], [{"key": "a", "error": "E"}])) == 1


def test_the_other_trees_kernels_are_found_under_other_names():
    there = ["gemm 1", "gemm turned", "fp8 x, f 8x8 #1", "fp8 x, g 8x8 #2"]
    here = ["gemm 1", "gemm swapped", "fp8 x, h 8x8 #7", "fp8 x, g 8x8 #9"]
    assert counterparts(here, here, there).names == [there[0], *there[2:], there[1]]
    assert counterparts(here[:1], here, there) == (["gemm 1"], [], [])
    assert counterparts(here[:1], here, there[:1]) == (["gemm 1"], [], here[1:])
    assert counterparts(here[:1], here[:2], there) == (["gemm 1"], there[1:], here[1:2])


def test_the_kernels_of_this_tree_are_listed():
    with machine_code.snapshot(ROOT) as tree:
        names = machine_code.listed(tree, "sm_80")
    assert len(names) > 200
    assert {name.split()[0] for name in names} >= {"gemm", "attention", "bsr", "lists"}


KERNELS = """
import cutlass
from cutlass import Float32, cute

def helper(value):
    return value * Float32(3.0)

@cute.kernel
def body(mX, factor: cutlass.Constexpr):
    i, _, _ = cute.arch.thread_idx()
    mX[i] = helper(mX[i]) + Float32(factor)

def host(mX: cute.Tensor, stream, factor: cutlass.Constexpr):
    body(mX, factor).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)
"""
SHIPPED = """
from typing import NamedTuple

class Shipped(NamedTuple):
    name: str
    factor: float

    def compile(self, arch):
        import torch
        from kernels_dsl.toy import host
        from lowering import jit
        return jit(host).compile(torch.empty(64, device="meta"), arch=arch, factor=self.factor)

def shipped(arch):
    return [Shipped("toy a", 1.0), Shipped("toy b", 2.0)]
"""


@pytest.fixture
def project(tmp_path):
    """A repository with this project's `lowering` and two kernels of its own, all committed."""
    tree = tmp_path / "project"
    shutil.copytree(ROOT / "lowering", tree / "lowering", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "kernels_dsl" / "cli").mkdir(parents=True)
    for name in ("__init__.py", "cli/__init__.py"):
        (tree / "kernels_dsl" / name).touch()
    (tree / "kernels_dsl/toy.py").write_text(KERNELS)
    (tree / "kernels_dsl/cli/kernels.py").write_text(SHIPPED)
    git = ["git", "-c", "user.name=Nobody", "-c", "user.email=nobody@example.com"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "kernels"]):
        subprocess.run([*git, *command], cwd=tree, check=True)
    return tree


def test_names_and_comments_are_no_difference_and_a_constant_is(project, tmp_path, capfd):
    """One kernel of the working tree differs from the commit's by a constant, the other by names alone."""
    text = KERNELS.replace("helper", "tripled").replace("mX", "mValues").replace("body", "add_to")
    (project / "kernels_dsl/toy.py").write_text("# A comment that moves the lines.\n\n" + text)
    (project / "kernels_dsl/cli/kernels.py").write_text(SHIPPED.replace('"toy b", 2.0', '"toy b", 2.5'))
    options = ["--tree", str(project), "--cache", str(tmp_path / "kept"), "--arch", "sm_90a", "--jobs", "1"]
    assert machine_code.main(["against", "HEAD", *options]) == 1
    out, err = capfd.readouterr()
    assert "differs: sm_90a toy b" in out
    assert "toy a" not in out
    assert "1 equal (0 renamed), 1 differ, 0 missing, 0 new" in out
    assert err.count("0 known, 2 to compile") == 2

    written = tmp_path / "taken.jsonl"
    assert machine_code.main(["take", str(written), *options, "--match", "toy a"]) == 0
    assert "1 known, 0 to compile" in capfd.readouterr().err
    (taken,) = map(json.loads, written.read_text().splitlines())
    assert taken["key"] == "sm_90a toy a"
    assert taken["threads"] == [32]
    assert taken["registers"][0] > 0
    assert machine_code.main(["compare", str(written), str(written)]) == 0


def test_a_kernel_that_does_not_compile_is_reported(project, tmp_path, capfd):
    """Also where the compiler ends the process: the kernels after it are still compiled."""
    dies = SHIPPED.replace("import torch", "import os; os._exit(9)")
    (project / "kernels_dsl/cli/kernels.py").write_text(dies)
    options = ["--tree", str(project), "--cache", str(tmp_path), "--jobs", "1"]
    assert machine_code.main(["take", str(tmp_path / "out"), *options]) == 1
    errors = [json.loads(line)["error"] for line in (tmp_path / "out").read_text().splitlines()]
    assert len(errors) == 2
    assert all("the process ended with 9" in error for error in errors)


def test_the_kernels_are_compiled_from_a_copy(project, tmp_path):
    """An edit while they are compiled would give results of neither version, kept as those of the first."""
    named = SHIPPED.replace("import torch", "raise RuntimeError(__file__)")
    (project / "kernels_dsl/cli/kernels.py").write_text(named)
    options = ["--tree", str(project), "--cache", str(tmp_path / "kept"), "--jobs", "1"]
    assert machine_code.main(["take", str(tmp_path / "out"), *options]) == 1
    places = [json.loads(line)["error"] for line in (tmp_path / "out").read_text().splitlines()]
    assert places
    assert not any(str(project) in place for place in places)
    with machine_code.snapshot(project) as copy:
        job = machine_code.Job(copy, "", "sm_90a", 1, tmp_path)
        before = job.kept()
        (project / "kernels_dsl/toy.py").write_text("edited")
        assert job.kept() == before
        assert (copy / "kernels_dsl/toy.py").read_text() == KERNELS
    with machine_code.snapshot(project) as copy:
        assert job._replace(tree=copy).kept() != before
