"""Makes `kernels-dsl-kernels`, a wheel of compiled kernels that `kernels_dsl` finds where it is installed.

    python tools/kernels_package.py OUT [--arch sm_90a ...] [--all] [--name TEXT] [--jobs N]

OUT gets the package's source, one bundle an architecture, and the wheel. Without --all the kernels are those
of `python -m kernels_dsl compile --common`. They serve the releases of the DSL and of this library that they
were made with, so that the wheel requires these. No GPU is needed; how long it takes is said first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "kernels_dsl_kernels"
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a")
PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "kernels-dsl-kernels"
version = "{version}"
description = "Kernels of kernels-dsl {version}, compiled with CuTe DSL {dsl} for {arches}"
requires-python = ">=3.10"
dependencies = ["kernels-dsl=={version}", "nvidia-cutlass-dsl=={dsl}"]

[tool.setuptools]
packages = ["{package}"]

[tool.setuptools.package-data]
{package} = ["*.zip"]
"""


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.returncode)


def write_bundles(folder: Path, arches: Sequence[str], chosen: Sequence[str]) -> None:
    """A bundle an architecture, in `folder`. chosen: further arguments of `compile`."""
    for arch in arches:
        bundle = folder / f"{arch}.zip"
        _run(sys.executable, "-m", "kernels_dsl", "compile", "--arch", arch, "--bundle", bundle, *chosen)


def build_wheel(source: Path, out: Path) -> Path:
    """The wheel of the project in `source`, in `out`, which has no other afterwards."""
    for old in out.glob("*.whl"):
        old.unlink()
    here = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []  # works offline
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *here, "--wheel-dir", out, source)
    (wheel,) = out.glob("*.whl")
    return wheel


def make(out: Path, arches: Sequence[str], chosen: Sequence[str]) -> Path:
    """The wheel, in `out`. chosen: further arguments of `compile`."""
    folder = out / PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.zip"):
        old.unlink()
    write_bundles(folder, arches, chosen)
    (folder / "__init__.py").write_text('"""Compiled kernels, which `lowering.shipped` finds."""\n')
    versions = {name: importlib.metadata.version(name) for name in ("kernels-dsl", "nvidia-cutlass-dsl")}
    text = PROJECT.format(
        version=versions["kernels-dsl"], dsl=versions["nvidia-cutlass-dsl"], arches=", ".join(arches),
        package=PACKAGE,
    )  # fmt: skip
    (out / "pyproject.toml").write_text(text)
    return build_wheel(out, out)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """The options that all tools that make wheels of compiled kernels have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", action="append", help=f"may be repeated; default: {', '.join(ARCHES)}")
    parser.add_argument("--name", help="only kernels whose name contains this")
    parser.add_argument("--jobs", help="processes")
    return parser


def passed_on(options: argparse.Namespace) -> list[str]:
    """The options that are `compile`'s too, where given."""
    given = {f"--{name}": getattr(options, name) for name in ("name", "jobs")}
    return [text for option, value in given.items() if value is not None for text in (option, value)]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--all", action="store_true", help="every kernel, not the common ones alone")
    options = parser.parse_args(argv)
    chosen = [*([] if options.all or options.name else ["--common"]), *passed_on(options)]
    wheel = make(options.out.absolute(), options.arch or ARCHES, chosen)
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
