"""A user's project in a folder of its own, and the environment of processes that use it."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

CONFIG = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    threads: int = 128
    smem: int = 0

def same(value):
    return value
"""


def write_project(folder: Path) -> None:
    """A kernel file, and its configuration in a file that needs no compiler."""
    (folder / "own_kernels.py").write_text((HERE / "user_kernels.py").read_text())
    (folder / "own_config.py").write_text(CONFIG)


def process_environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """``tmp_path`` first on the path, and its cache there."""
    path = os.pathsep.join([str(tmp_path), str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "KERNELS_DSL_CACHE_DIR": str(tmp_path / "cache"), **more}
