"""NVIDIA's CuTe DSL examples, unmodified, through `python -m lowering.emulator run`.

Set ``CUTLASS_EXAMPLES`` to a checkout's ``examples/python/CuTeDSL``. Each example compares its own result and
must end with status 0; its findings are those that were judged, see benchmarks/journal/emulator.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cutlass")

ROOT = Path(__file__).parents[3]
EXAMPLES = os.environ.get("CUTLASS_EXAMPLES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(EXAMPLES, "cute", "hopper").is_dir(),
        reason="CUTLASS_EXAMPLES does not name a checkout of CUTLASS's examples/python/CuTeDSL",
    ),
]
ONCE = " --warmup_iterations 0 --iterations 1"
HOPPER = {
    "dense_gemm/dense_gemm.py --mnkl 256,136,128,1" + ONCE: set(),
    "dense_gemm/dense_gemm.py --mnkl 256,136,128,1 --cluster_shape_mn 2,1" + ONCE: set(),
    "dense_gemm/dense_gemm_persistent.py --mnkl 200,264,72,2 --tile_shape_mn 128,256" + ONCE: set(),
    "dense_gemm/dense_gemm_persistent.py --mnkl 200,264,72,2 --cluster_shape_mn 2,1" + ONCE: set(),
    "dense_gemm/dense_gemm_fp8_2xacc.py --mnkl 128,128,256,1" + ONCE: set(),
    "dense_gemm/dense_gemm_fp8_gelu_persistent.py --mnkl 128,128,128,1" + ONCE: set(),
    "cta_norm/cta_norm.py --M 5 --N 2048 --norm_type rms" + ONCE: set(),
    "cta_norm/cta_norm.py --M 5 --N 2048 --norm_type layer" + ONCE: set(),
    # The kernel ends without waiting for the bulk stores of its output.
    "attention/fmha.py --q_shape 1,128,1,64 --k_shape 1,128,1,64 --mma_tile_shape_mn 64,128" + ONCE: {
        "OVERWRITE_IN_USE"
    },
    # The operands of its benchmark are freed before the kernel runs.
    "grouped_gemm/grouped_gemm.py --num_groups 2 --problem_sizes_mnkl (128,64,72,1),(200,72,136,1) "
    "--cluster_shape_mn 1,1" + ONCE: {"OUT_OF_BOUNDS"},
}
AMPERE = {
    "dense_gemm/tensorop_gemm.py --mnkl 136,264,72,1" + ONCE: set(),
    "dense_gemm/sgemm.py --mnk 130,132,24" + ONCE: set(),
    "attention/flash_attention_v2.py --batch_size 1 --seqlen_q 96 --seqlen_k 96 --num_head 2 --head_dim 64 "
    "--m_block_size 64 --n_block_size 64" + ONCE: set(),
    "attention/hstu_attention.py --batch_size 1 --seqlen_q 64 --seqlen_kv 64 --num_head 1 --head_dim 64 "
    "--m_block_size 64 --n_block_size 64": set(),
    "elementwise/elementwise_add.py --M 64 --N 128" + ONCE: set(),
    "elementwise/elementwise_apply.py --M 64 --N 256" + ONCE: set(),
    # It computes a predicate for what lies outside, and does not use it.
    "elementwise/elementwise_apply.py --M 64 --N 128" + ONCE: {"OUT_OF_BOUNDS"},
}  # fmt: skip
RUNS = [("sm_90a", "cute/hopper/kernel/" + line, found) for line, found in HOPPER.items()] + [
    ("sm_80", "cute/ampere/kernel/" + line, found) for line, found in AMPERE.items()
]


@pytest.mark.parametrize(("arch", "line", "found"), RUNS, ids=[line.split("/", 3)[3] for _, line, _ in RUNS])
def test_an_example_runs(arch: str, line: str, found: set[str], tmp_path: Path) -> None:
    script, *arguments = line.split()
    record = tmp_path / "found.json"
    command = [sys.executable, "-m", "lowering.emulator", "run", "--arch", arch, "--sms", "4"]
    command += ["--fail-on", "never", "--json", str(record), str(Path(EXAMPLES, script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    findings = json.loads(record.read_text())["findings"]
    kinds = {f["kind"] for f in findings if f["severity"] == "error"}
    # What lies out of bounds may be another argument of the kernel, by the allocator's mood.
    assert kinds - ({"RACE"} if "OUT_OF_BOUNDS" in found else set()) == found, findings
