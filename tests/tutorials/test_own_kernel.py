"""The chapter 'Write your own kernel': its blocks, put together in an empty folder, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_chapters_file_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "tutorials" / "own_kernel.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    (tmp_path / "rms_norm.py").write_text("\n\n".join(blocks))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KERNELS_DSL_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "rms_norm.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("right;")
