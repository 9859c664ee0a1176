"""Bundles: compiled here, loaded into another cache, refused with a reason where they cannot run."""

from __future__ import annotations

import re
import zipfile
from dataclasses import replace

import pytest
import torch
from user_kernels import Config, affine, same

import lowering
from lowering import LoweringError, bundle, cache, function, toolchain
from lowering.store import unpack

pytestmark = pytest.mark.usefixtures("cache_dir")


def compile_one(arch="sm_90a", threads=128):
    x = torch.empty(64, device="meta")
    constants = {"config": Config(threads=threads), "function": same}
    return lowering.jit(affine).compile(x, x, (2.0, x), 64, arch=arch, **constants)


@pytest.fixture
def made(tmp_path):
    """A bundle of two kernels, and an empty cache in place of the one that they were compiled into."""
    kernels = [compile_one(), compile_one("sm_89")]
    path = tmp_path / "kernels.bundle"
    assert bundle.export(path) == sorted(k.key for k in kernels)
    function.forget_loaded()
    with cache.use(tmp_path / "other"):
        yield path, kernels


def test_a_loaded_bundle_serves_without_a_compile(made):
    path, kernels = made
    report = bundle.load(path)
    assert sorted(report.loaded) == sorted(k.key for k in kernels)
    assert report.refused == {}
    cache.refuse_compile()
    try:
        again = compile_one()
        assert (again.source, again.key) == ("disk", kernels[0].key)
        assert again.cubin() == kernels[0].cubin()
        with pytest.raises(lowering.CompileRefused):
            compile_one(threads=64)
    finally:
        cache.refuse_compile(False)


def test_choosing_kernels(tmp_path):
    first, second = compile_one(), compile_one("sm_89")
    path = tmp_path / "b"
    assert bundle.export(path, [first]) == [first.key]
    assert bundle.export(path, [second.key]) == [second.key]
    assert bundle.export(path, arch="sm_89") == [second.key]
    with pytest.raises(LoweringError, match="no kernels"):
        bundle.export(path, [first], arch="sm_80")
    with pytest.raises(LoweringError, match=r"not in the cache"):
        bundle.export(path, ["ab" * 32])
    assert zipfile.is_zipfile(path)
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        ({"dsl": "9.9.9"}, r"nvidia-cutlass-dsl .*, here is 9\.9\.9"),
        ({"tvm_ffi": "9.9"}, r"apache-tvm-ffi"),
        ({"lowering": "0"}, r"lowering layer"),
    ],
)
def test_another_toolchain_is_refused_with_the_reason(made, monkeypatch, here, reason):
    changed = {**toolchain.identity(), **here}
    monkeypatch.setattr(toolchain, "identity", lambda: changed)
    report = bundle.load(made[0])
    assert report.loaded == []
    assert len(report.refused) == 2
    for text in report.refused.values():
        assert re.search(reason, text)
    assert "0 kernels loaded, 2 refused" in str(report)


def test_a_lower_processor_refuses_and_a_higher_one_adopts(made, monkeypatch):
    path, kernels = made
    monkeypatch.setattr(toolchain, "host_isa", lambda: "x86-64")
    if kernels[0].entry.facts["parts"]["toolchain"]["host"] > "x86-64":
        assert all("processors" in reason for reason in bundle.load(path).refused.values())
    monkeypatch.setattr(toolchain, "host_isa", lambda: "x86-64-v9")
    here = {**toolchain.identity(), "host": "x86-64-v9"}
    monkeypatch.setattr(toolchain, "identity", lambda: here)
    report = bundle.load(path)
    assert len(report.loaded) == 2
    assert not set(report.loaded) & {k.key for k in kernels}
    assert compile_one().source == "disk"


def test_another_flavour_needs_the_driver(made, monkeypatch):
    path, _ = made
    monkeypatch.setattr(bundle.arch_module, "driver_version", lambda: (11, 8))
    assert all("the driver here supports CUDA 11" in reason for reason in bundle.load(path).refused.values())
    monkeypatch.setattr(bundle.arch_module, "driver_version", lambda: (13, 0))
    here = {**toolchain.identity(), "flavour": "cu13"}
    monkeypatch.setattr(toolchain, "identity", lambda: here)
    assert len(bundle.load(path).loaded) == 2
    assert compile_one().source == "disk"


def test_a_damaged_kernel_is_refused_and_the_others_are_loaded(made, tmp_path):
    path, kernels = made
    damaged = tmp_path / "damaged"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if kernels[0].key in name:
                data = data[:1000] + b"\xff" + data[1001:]
            target.writestr(name, data)
    report = bundle.load(damaged)
    assert report.loaded == [kernels[1].key]
    (reason,) = report.refused.values()
    assert reason.startswith("damaged")


@pytest.mark.parametrize("content", [b"", b"text", "cut"])
def test_other_files_are_refused(made, tmp_path, content):
    path = tmp_path / "other.bundle"
    path.write_bytes(made[0].read_bytes()[:-100] if content == "cut" else content)
    with pytest.raises(LoweringError, match="is not a bundle"):
        bundle.load(path)


def test_there_must_be_a_cache(made):
    cache.disable()
    try:
        with pytest.raises(LoweringError, match="off or unusable"):
            bundle.load(made[0])
    finally:
        cache.disable(False)


def test_an_entry_knows_where_it_came_from(made):
    with zipfile.ZipFile(made[0]) as archive:
        entry = unpack(archive.read(f"{made[1][0].key}.so"))
    assert function.key_of(entry.facts["parts"]) == entry.facts["key"]
    other = replace(entry, facts={**entry.facts, "arch": "sm_80"})
    assert other.pack() != entry.pack()
