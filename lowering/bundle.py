"""Bundles: compiled kernels in one file, made on one machine and loaded into the cache of another.

A bundle is a zip archive of cache entries with a manifest that names them. The machine that makes it needs
no GPU. Each entry is checked when it is loaded: its content against its hash, and what it was made with
against what is installed. A kernel of another DSL release is refused, with the reason in the report; one
made on a CPU of a lower level, or with the other CUDA flavour, is taken where it can run.

These checks find damage and mistakes, not malice: a bundle is code, which its first call runs with all that
this user may do. Who made it is told by a signature (`lowering.signing`), where one is asked for.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lowering import cache, scratch, signing
from lowering.archive import FORMAT, MALFORMED, MANIFEST, adopt, manifest, member
from lowering.errors import LoweringError, Untrusted, plain
from lowering.launch import CompiledKernel
from lowering.store import Entry, unpack


@dataclass
class LoadReport:
    """Result of `load`: keys of the kernels that are now in the cache, and why others are not."""

    loaded: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} kernels loaded, {len(self.refused)} refused"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.refused.items()])


def export(
    path: str | os.PathLike[str],
    kernels: Iterable[CompiledKernel | str] | None = None,
    *,
    arch: str | None = None,
    sign: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Write kernels into a bundle.

    :param path: the file to write; it is there whole or not at all.
    :param kernels: compiled kernels, or keys of kernels in the cache; None takes the whole cache.
    :param arch: keep only the kernels of this architecture.
    :param sign: an SSH key to sign it with; the signature is written beside it, to ``path`` + ".sig".
    :returns: their keys.
    :raises LoweringError: if a key is not in the cache, or nothing is left to write.
    """
    entries = [e for e in _chosen(kernels) if arch is None or e.facts["arch"] == arch]
    if not entries:
        raise LoweringError("no kernels to put into the bundle" + (f" for {arch}" if arch else ""))
    listing = [{k: e.facts[k] for k in ("key", "name", "arch", "parts")} for e in entries]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, json.dumps({"format": FORMAT, "kernels": listing}, indent=1))
        for entry in entries:
            archive.writestr(f"{entry.facts['key']}.so", entry.pack())
    target, signature = Path(path).absolute(), signing.signature_of(Path(path).absolute())
    signed = signing.sign(packed.getvalue(), sign) if sign is not None else None
    scratch.sweep(target.parent, f".{target.name}.*.tmp")
    signature.unlink(missing_ok=True)  # of what was there before
    scratch.replace_file(target, packed.getvalue(), mode=0o666)
    if signed is not None:
        scratch.replace_file(signature, signed, mode=0o666)
    return [e.facts["key"] for e in entries]


def _chosen(kernels: Iterable[CompiledKernel | str] | None) -> list[Entry]:
    store = cache.store()
    if kernels is None:
        kernels = sorted(stored.key for stored in store.entries()) if store is not None else []
    found: dict[str, Entry] = {}
    for kernel in kernels:
        if isinstance(kernel, CompiledKernel):
            found[kernel.key] = kernel.entry
            continue
        entry = store.read(kernel) if store is not None else None
        if entry is None:
            raise LoweringError(f"kernel {kernel} is not in the cache {cache.dir()}")
        found[kernel] = entry
    return list(found.values())


def load(path: str | os.PathLike[str], *, verify: str | os.PathLike[str] | None = None) -> LoadReport:
    """Put the kernels of a bundle into the cache, where the next call finds them.

    A bundle holds machine code: load only one that you trust as much as a program.

    :param verify: a file of SSH public keys; the bundle must have been signed with one of them.
    :raises LoweringError: if it is not a bundle, or there is no cache to put it into.
    :raises Untrusted: if ``verify`` is given and it is unsigned, signed by another key, or altered.
    """
    store = cache.store()
    if store is None:
        why = cache.refusal() if cache.enabled() else f"{cache.dir()}: switched off"
        raise LoweringError(f"a bundle is loaded into the disk cache, which is off or unusable ({why})")
    # Read once, so that what is verified is what is loaded.
    data = Path(path).read_bytes()
    if verify is not None:
        try:
            signing.verify(data, signing.signature_of(path), verify)
        except Untrusted as error:
            raise Untrusted(f"{os.fspath(path)} is refused: {error}") from None
    report = LoadReport()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for listed in manifest(path, archive):
                label = plain(f"{listed['name']} {listed['arch']} {listed['key'][:12]}")
                try:
                    entry = adopt(unpack(member(archive, f"{listed['key']}.so"), listed["key"]))
                except MALFORMED as error:
                    report.refused[label] = f"damaged: {error}"
                    continue
                except LoweringError as error:
                    report.refused[label] = str(error)
                    continue
                store.write(entry.facts["key"], entry, cache.size_limit())
                cache.count("stores")
                report.loaded.append(entry.facts["key"])
    except MALFORMED as error:
        raise LoweringError(f"{path} is not a bundle of compiled kernels: {error}") from error
    return report
