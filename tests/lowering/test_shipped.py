"""Bundles at hand: found after a miss of the cache, by a variable or an installed package."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest
import torch
from user_kernels import Config, affine, same

import lowering
from lowering import bundle, cache, function, shipped, toolchain
from lowering.archive import MANIFEST

pytestmark = pytest.mark.usefixtures("cache_dir")


def compile_one(threads=128):
    x = torch.empty(64, device="meta")
    constants = {"config": Config(threads=threads), "function": same}
    return lowering.jit(affine).compile(x, x, (2.0, x), 64, arch="sm_90a", **constants)


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A bundle of one kernel; then an empty cache, where compiling is an error."""
    made = compile_one()
    folder = tmp_path / "bundles"
    folder.mkdir(mode=0o755)
    path = folder / "kernels.zip"
    bundle.export(path, [made])
    path.chmod(0o644)
    function.forget_loaded()
    monkeypatch.setattr(shipped, "_index", {})
    monkeypatch.setattr(cache, "_warned", set())
    cache.refuse_compile()
    with cache.use(tmp_path / "other"):
        yield path
    cache.refuse_compile(False)


@pytest.mark.parametrize("named", ["file", "folder", "second"])
def test_a_bundle_that_the_variable_names_serves(archive, monkeypatch, tmp_path, named):
    value = {
        "file": str(archive),
        "folder": str(archive.parent),
        "second": os.pathsep.join((str(tmp_path / "nothing.zip"), str(archive))),
    }[named]
    monkeypatch.setenv(shipped.VARIABLE, value)
    found = compile_one()
    assert found.source == "disk" and found.cubin()
    monkeypatch.delenv(shipped.VARIABLE)
    function.forget_loaded()
    assert compile_one().key == found.key  # of the cache now
    with pytest.raises(lowering.CompileRefused):
        compile_one(threads=64)


def test_a_package_serves(archive, monkeypatch, tmp_path):
    package = tmp_path / "site" / shipped.PACKAGE
    package.mkdir(parents=True, mode=0o755)
    (package / "__init__.py").write_text("raise RuntimeError('it is looked for, not imported')")
    archive.rename(package / "common.zip")
    monkeypatch.syspath_prepend(package.parent)
    assert compile_one().source == "disk"


@pytest.fixture
def carried(archive, monkeypatch):
    """The bundle as one that this project's wheel carries."""
    monkeypatch.setattr(shipped, "carried", lambda: (archive,))
    return archive


def test_one_that_the_wheel_carries_serves(carried):
    assert compile_one().source == "disk"


def test_of_one_that_the_wheel_carries_nothing_is_said(carried, monkeypatch, caplog):
    changed = {**toolchain.identity(), "dsl": "9.9.9"}
    monkeypatch.setattr(toolchain, "identity", lambda: changed)
    with pytest.raises(lowering.CompileRefused):
        compile_one()
    assert caplog.text == ""
    keys, reason = shipped.keys_of(carried)
    assert len(keys) == 1 and reason is not None and "here is 9.9.9" in reason


def test_one_for_another_compiler_hides_none_that_fits(carried, monkeypatch, tmp_path):
    other = tmp_path / "bundles" / "other.zip"
    with zipfile.ZipFile(carried) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data.replace(b'"dsl": "', b'"dsl": "9') if name == MANIFEST else data)
    other.chmod(0o644)
    monkeypatch.setenv(shipped.VARIABLE, str(other))
    assert compile_one().source == "disk"
    assert "9" in str(shipped.keys_of(other)[1]) and shipped.keys_of(carried)[1] is None


def test_a_damaged_one_that_the_wheel_carries_is_told(carried):
    carried.write_bytes(b"no archive")
    with pytest.raises(lowering.LoweringError, match="not a zip file"):
        shipped.keys_of(carried)


def test_the_wheel_carries_what_is_beside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "kernels_dsl"
    (package / "precompiled").mkdir(parents=True)
    (package / "precompiled" / "sm_80.zip").touch()
    monkeypatch.setattr(shipped, "CARRIED", ("another_package", "precompiled"))
    package.rename(tmp_path / "another_package")
    monkeypatch.syspath_prepend(tmp_path)
    assert shipped.carried() == (tmp_path / "another_package" / "precompiled" / "sm_80.zip",)


def test_it_serves_without_a_cache(archive, monkeypatch):
    monkeypatch.setenv(shipped.VARIABLE, str(archive))
    cache.disable()
    try:
        assert compile_one().source == "disk"
    finally:
        cache.disable(False)


def _refused(monkeypatch, path, caplog):
    monkeypatch.setenv(shipped.VARIABLE, str(path))
    with pytest.raises(lowering.CompileRefused):
        compile_one()
    return caplog.text


def test_one_that_others_can_write_is_refused(archive, monkeypatch, caplog):
    archive.chmod(0o666)
    assert "others can have written it" in _refused(monkeypatch, archive, caplog)


def test_one_in_a_folder_that_others_can_write_is_refused(archive, monkeypatch, caplog):
    archive.parent.chmod(0o777)
    assert "others can have written it" in _refused(monkeypatch, archive, caplog)


def test_damage_is_refused(archive, monkeypatch, caplog):
    with zipfile.ZipFile(archive) as source:
        members = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(archive, "w") as target:
        for name, data in members.items():
            target.writestr(name, data if name == MANIFEST else data[:100] + b"x" + data[101:])
    assert "does not match its SHA-256" in _refused(monkeypatch, archive, caplog)


def test_what_is_no_bundle_is_refused(archive, monkeypatch, caplog):
    archive.write_bytes(b"no archive")
    assert "is not used: File is not a zip file" in _refused(monkeypatch, archive, caplog)


def test_another_compiler_finds_nothing(archive, monkeypatch):
    changed = {**toolchain.identity(), "dsl": "9.9.9"}
    monkeypatch.setattr(toolchain, "identity", lambda: changed)
    monkeypatch.setenv(shipped.VARIABLE, str(archive))
    with pytest.raises(lowering.CompileRefused):
        compile_one()


def test_a_kernel_of_the_cache_asks_for_no_bundle():
    program = "import sys, lowering, lowering.function; print('lowering.shipped' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
