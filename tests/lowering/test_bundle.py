"""Bundles: compiled here, loaded into another cache, refused with a reason where they cannot run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from dataclasses import replace

import pytest
import torch
from user_kernels import Config, affine, same

import lowering
from lowering import LoweringError, archive, bundle, cache, function, toolchain
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
    monkeypatch.setattr(archive.arch_module, "driver_version", lambda: (11, 8))
    assert all("the driver here supports CUDA 11" in reason for reason in bundle.load(path).refused.values())
    monkeypatch.setattr(archive.arch_module, "driver_version", lambda: (13, 0))
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


needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen")


@pytest.fixture
def keys(tmp_path):
    """Two key pairs, as paths of the private keys."""
    paths = [tmp_path / "key", tmp_path / "other_key"]
    for path in paths:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return paths


@needs_ssh_keygen
class TestSignatures:
    def test_a_signed_bundle_is_verified(self, made, keys, tmp_path):
        path = tmp_path / "signed"
        bundle.export(path, made[1], sign=keys[0])
        report = bundle.load(path, verify=keys[0].with_suffix(".pub"))
        assert len(report.loaded) == 2
        both = tmp_path / "both.pub"
        both.write_text("# ours\n" + "".join(key.with_suffix(".pub").read_text() for key in keys))
        assert len(bundle.load(path, verify=both).loaded) == 2

    @pytest.mark.parametrize("fault", ["unsigned", "altered", "other key", "other purpose", "no signature"])
    def test_others_are_refused_whole(self, made, keys, tmp_path, fault):
        path = tmp_path / "signed"
        bundle.export(path, made[1], sign=None if fault == "unsigned" else keys[0])
        signature = tmp_path / "signed.sig"
        if fault == "altered":
            with zipfile.ZipFile(path, "a") as archive:
                archive.writestr("more", b"x")
        elif fault == "other purpose":
            signature.unlink()
            subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-n", "file", "-f", keys[0], path], check=True)
        elif fault == "no signature":
            signature.write_text("text")
        key = keys[fault == "other key"].with_suffix(".pub")
        with pytest.raises(lowering.Untrusted, match=rf"{path} is refused: .*sign"):
            bundle.load(path, verify=key)
        assert cache.store().entries() == []

    def test_a_new_bundle_takes_the_old_signature_away(self, made, keys, tmp_path):
        path = tmp_path / "signed"
        bundle.export(path, made[1], sign=keys[0])
        bundle.export(path, made[1])
        assert not (tmp_path / "signed.sig").exists()

    @pytest.mark.parametrize("key", ["absent", "text"])
    def test_keys_that_are_none(self, made, tmp_path, key):
        (tmp_path / "text").write_text("no key\n")
        with pytest.raises(LoweringError, match=key):
            bundle.export(tmp_path / "b", made[1], sign=tmp_path / key)
        assert not (tmp_path / "b").exists()
        with pytest.raises(LoweringError, match=key):
            bundle.load(made[0], verify=tmp_path / key)

    def test_without_ssh_keygen(self, made, keys, monkeypatch):
        monkeypatch.setenv("PATH", "")
        with pytest.raises(LoweringError, match="need the program ssh-keygen"):
            bundle.export(made[0], made[1], sign=keys[0])


def rewritten(path, target, change):
    """A copy of a bundle with its manifest changed."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            data = source.read(name)
            if name == bundle.MANIFEST:
                manifest = json.loads(data)
                change(manifest)
                data = json.dumps(manifest)
            archive.writestr(name, data)
    return target


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(kernels={"a": 1}),
        lambda m: m.update(kernels=[1]),
        lambda m: m.update(kernels=None),
        lambda m: m["kernels"][0].pop("name"),
    ],
)
def test_a_manifest_of_another_form_is_refused(made, tmp_path, change):
    with pytest.raises(LoweringError, match="is not a bundle"):
        bundle.load(rewritten(made[0], tmp_path / "changed", change))


def test_names_of_members_lead_nowhere(made, tmp_path):
    """A key is a path only after it was computed here; what is listed is a name in the archive."""
    outside = "../../../escaped"
    changed = rewritten(made[0], tmp_path / "changed", lambda m: m["kernels"][0].update(key=outside))
    report = bundle.load(changed)
    assert len(report.loaded) == 1
    assert not list(tmp_path.rglob("escaped*"))


def test_names_are_shown_without_escape_sequences(made, tmp_path):
    changed = rewritten(
        made[0], tmp_path / "changed", lambda m: m["kernels"][0].update(name="\x1b]0;title\x07", key="absent")
    )
    assert "\x1b" not in str(bundle.load(changed))


@pytest.mark.parametrize("missing", ["launches", "kind", "seconds", "parts", "toolchain"])
def test_an_entry_without_its_facts_is_refused(made, tmp_path, missing):
    entry = made[1][0].entry
    facts = {k: v for k, v in entry.facts.items() if k != missing}
    if missing == "toolchain":
        facts["parts"] = {k: v for k, v in facts["parts"].items() if k != missing}
    changed = tmp_path / "changed"
    with zipfile.ZipFile(made[0]) as source, zipfile.ZipFile(changed, "w") as archive:
        for name in source.namelist():
            own = facts["key"] in name
            archive.writestr(name, replace(entry, facts=facts).pack() if own else source.read(name))
    (reason,) = bundle.load(changed).refused.values()
    assert reason.startswith("damaged")


def test_a_member_of_a_made_up_size_is_not_unpacked(made, monkeypatch):
    monkeypatch.setattr(archive, "MEMBER_LIMIT", 5000)
    assert all(reason.startswith("damaged") for reason in bundle.load(made[0]).refused.values())
