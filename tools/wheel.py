"""Makes the wheel that is released: it carries compiled kernels, so that most first calls compile nothing.

    python tools/wheel.py OUT [--arch sm_90a ...] [--name TEXT] [--jobs N]

The kernels are those of `python -m kernels_dsl compile --core`. They serve where the wheel meets the release
of the DSL that it was made with, on processors of this one's level or above; elsewhere they are of no effect.
No GPU is needed; how long each architecture takes is said first.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernels_package import ARCHES, ROOT, build_wheel, parser_of, passed_on, write_bundles

from lowering import toolchain
from lowering.shipped import CARRIED

SOURCES = ("kernels_dsl", "lowering", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def make(out: Path, arches: Sequence[str], chosen: Sequence[str]) -> Path:
    """The wheel, in `out`. chosen: further arguments of `compile`."""
    with tempfile.TemporaryDirectory() as temporary:
        copied = Path(temporary)  # nothing that a build leaves behind gets into the checkout, or from there
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, copied)
        folder = copied.joinpath(*CARRIED)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_bundles(folder, arches, chosen)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(build_wheel(copied, copied / "dist"), out))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    options = parser_of(__doc__).parse_args(argv)
    wheel = make(options.out.absolute(), options.arch or ARCHES, ["--core", *passed_on(options)])
    size = f"{wheel.stat().st_size / 2**20:.1f} MiB"
    print(f"{wheel}: {size}, whose kernels run on {toolchain.host_isa()} processors and above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
