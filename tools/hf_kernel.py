"""Writes attention in the layout of Hugging Face's `kernels`, from which transformers loads it by name.

    python tools/hf_kernel.py OUT

OUT gets `build.toml`, `torch-ext/` for kernel-builder, and `build/torch-cuda` and `build/torch-cpu` (for the
emulator), each whole: this library's sources, `metadata.json` with their digests, and FlashAttention-2's
functions under the names that transformers looks for. Nothing is compiled: kernels are at their first call.

    kernels.get_local_kernel(Path("OUT")).flash_attn_func(q, k, v, causal=True)
    LOCAL_KERNELS=me/attention=OUT python train.py    # and attn_implementation="me/attention"
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "kernels-dsl-attention"
MODULE = NAME.replace("-", "_")
# transformers asks for version 1 of a repository that it does not know.
VERSION = 1
ARCHS = ("8.0+PTX", "9.0a")
"""Compute capabilities: all from 8.0 on, since kernels are compiled where they run."""
DEPENDS = {"cuda": ("tvm-ffi", "nvidia-cutlass-dsl"), "cpu": ("tvm-ffi",)}
"""Backend -> what `kernels` checks before it imports. It knows the DSL with CUDA alone."""
PACKAGES = ("kernels_dsl", "lowering")
BUNDLED = "_packages"

ENTRY = '''"""Attention of kernels-dsl {release} under FlashAttention-2's names.

The packages `kernels_dsl` and `lowering` lie beside this file. Where `kernels_dsl` is installed in the same
release, that one is used; another release cannot be, since both would register the same operators.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

RELEASE = "{release}"
_NEEDED = {{
    "cutlass": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "cuda": "cuda-python",
    "numpy": "numpy",
}}

_missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
if _missing:
    raise ImportError(f"{name} needs packages that are not installed: pip install {{' '.join(_missing)}}")
if find_spec("kernels_dsl") is None:
    sys.path.append(str(Path(__file__).resolve().parent / "{bundled}"))

import kernels_dsl

if kernels_dsl.__version__ != RELEASE:
    raise ImportError(
        f"{name} is of kernels-dsl {{RELEASE}}, {{kernels_dsl.__file__}} is {{kernels_dsl.__version__}}: "
        "they must be of one release"
    )

from kernels_dsl.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''
EARLIER = '''"""The module of the folder above, where releases of `kernels` before 0.10 do not look."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location(f"{{__name__}}_above", Path(__file__).resolve().parents[1] / "__init__.py")
_module = module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)
__all__ = _module.__all__
globals().update({{name: getattr(_module, name) for name in __all__}})
'''
BUILD = """[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = ["cuda", "cpu"]
python-depends = ["tvm-ffi"]

[general.cuda]
python-depends = ["nvidia-cutlass-dsl"]

[torch-noarch]
cuda_capabilities = {archs}
"""


def release() -> str:
    """This library's version."""
    text = (ROOT / "kernels_dsl" / "_version.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("kernels_dsl/_version.py has no __version__")
    return found[1]


def write_module(folder: Path) -> None:
    """The module and the packages that it needs, in a new `folder`."""
    for package in PACKAGES:
        skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / package, folder / BUNDLED / package, ignore=skipped)
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
    entry = ENTRY.format(release=release(), name=NAME, bundled=BUNDLED)
    (folder / "__init__.py").write_text(entry)


def digests(folder: Path) -> dict[str, str]:
    """Path -> SHA-256 in base64 of each file but `metadata.json`, by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / "metadata.json")
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in paths
    }


def write_variant(folder: Path, backend: str) -> None:
    """A build for one backend, whole, with its metadata."""
    write_module(folder)
    (folder / MODULE).mkdir()
    (folder / MODULE / "__init__.py").write_text(EARLIER.format())
    files = digests(folder)
    content = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:8]
    about: dict[str, object] = {"type": backend}
    if backend == "cuda":
        about["archs"] = ARCHS
    metadata = {
        "name": NAME,
        "id": f"_{MODULE}_{backend}_{content}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": DEPENDS[backend],
        "kernel-depends": [],
        "backend": about,
        "digest": {"algorithm": "sha256", "files": files},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")


def make(out: Path) -> None:
    """The whole layout. FileExistsError where `out` holds anything."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    archs = json.dumps(ARCHS)
    (out / "build.toml").write_text(BUILD.format(name=NAME, version=VERSION, archs=archs))
    write_module(out / "torch-ext" / MODULE)
    for backend in DEPENDS:
        write_variant(out / "build" / f"torch-{backend}", backend)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder that is empty or not there")
    out = parser.parse_args(argv).out
    try:
        make(out)
    except FileExistsError as error:
        print(f"hf_kernel.py: {error}", file=sys.stderr)
        return 2
    files = [path for path in (out / "build" / "torch-cuda").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    print(f"{out}: {NAME} {release()}, {len(files)} files and {size:.1f} MiB a build")
    return 0


if __name__ == "__main__":
    sys.exit(main())
