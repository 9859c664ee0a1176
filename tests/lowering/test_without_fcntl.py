"""Systems without file locks, as Windows: what is imported, refused and emulated there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# tvm-ffi and torch know Windows by its name, so that they get `fcntl` back.
PROGRAM = """
import sys
sys.modules["fcntl"] = None
import kernels_dsl, lowering, lowering.locks
del sys.modules["fcntl"]
assert lowering.locks.fcntl is None
import torch
from lowering import cache, emulator, scratch, sealed
a, b = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16()
with emulator.run(arch="sm_80"):
    d = kernels_dsl.gemm(a, b)
torch.testing.assert_close(d.float(), a.float() @ b.float(), rtol=2e-2, atol=2e-2)
assert cache.store() is None and not cache.kept()
print(cache.refusal())
with scratch.folder() as folder:
    (folder / "file").write_text("text")
assert not folder.exists()
try:
    sealed.sealed_copy(b"", "kernel")
except OSError as error:
    print(error)
import os
from lowering import LoweringError, trust
del os.geteuid
try:
    trust.check_folder(os.getcwd())
except LoweringError as error:
    print(error)
"""
RECORD = """
import sys
sys.modules["fcntl"] = None
from pathlib import Path
from kernels_dsl.config.tuned import RecordFile
record = RecordFile(Path("tuned.json"))
record.put("one", {"x": 1})
record.put("two", {"x": 2})
assert record.get("one") == {"x": 1} and record.get("two") == {"x": 2}
"""


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    cache = str(folder / "cache")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KERNELS_DSL_CACHE_DIR": cache}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_kernels_are_emulated_and_none_is_kept(tmp_path):
    done = _run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    refusal, sealed, trust = done.stdout.splitlines()
    assert refusal.endswith("is not used: this system has no file locks (Python's fcntl)")
    assert sealed == "this system has no sealed files"
    assert trust == "this system has no owners of files that can be checked"
    assert not (tmp_path / "cache").exists()
    assert done.stderr.count("kernels are kept in memory only") == 1


def test_measured_winners_are_kept(tmp_path):
    done = _run(RECORD, tmp_path)
    assert done.returncode == 0, done.stderr
