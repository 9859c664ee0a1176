"""The chapters on kernels of one's own: their blocks, put together in an empty folder, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = {"own_kernel.md": "rms_norm.py", "own_gemm.md": "two_outputs.py"}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_chapters_file_runs(chapter, tmp_path):
    text = (ROOT / "tutorials" / chapter).read_text()
    assert f"`{CHAPTERS[chapter]}`" in text
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    (tmp_path / CHAPTERS[chapter]).write_text("\n\n".join(blocks))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KERNELS_DSL_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, CHAPTERS[chapter]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right;")
