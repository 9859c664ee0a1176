"""The cache between processes: cold starts that coincide, processes that are killed, edited sources."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from user_project import process_environment, write_project

from lowering import cache
from lowering.store import unpack

COMPILE = """
import json, sys, time, torch, lowering
jit = lowering.jit("own_kernels:affine")
import own_config
x = torch.empty(64, device="meta")
started = time.process_time()
kernel = jit.compile(x, x, (2.0, x), 64, arch="sm_90a", config=own_config.Config(), function=own_config.same)
kernel.launch
seconds = time.process_time() - started
compiles = lowering.cache.stats()["compiles"]
print(json.dumps([kernel.source, kernel.key, "cutlass" in sys.modules, compiles, seconds]))
"""

# Everything is imported before a child is forked, so that a child only compiles.
FORKING = r"""
import json, os, signal, sys, time, torch, cutlass, tvm_ffi
from cutlass import cute
import lowering, own_kernels, own_config

x = torch.empty(64, device="meta")

def child(threads):
    config = own_config.Config(threads=threads)
    kernel = lowering.jit(own_kernels.affine).compile(
        x, x, (2.0, x), 64, arch="sm_90a", config=config, function=own_config.same
    )
    report = json.dumps([kernel.source, kernel.key, lowering.cache.stats()["compiles"]])
    os.write(1, report.encode() + b"\n")  # one write, so that lines of siblings do not mix

def fork(threads):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(threads)
            status = 0
        finally:
            os._exit(status)
    return pid

for line in sys.stdin:
    order, threads, *delay = line.split()
    if order == "together":
        pids = [fork(int(threads)) for _ in range(8)]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    else:
        pid = fork(int(threads))
        if order == "kill":
            time.sleep(float(delay[0]))
            os.kill(pid, signal.SIGKILL)
        statuses = [os.waitpid(pid, 0)[1]]
    print(json.dumps(["done", statuses]), flush=True)
"""


@pytest.fixture
def own_files(tmp_path) -> Path:
    write_project(tmp_path)
    return tmp_path


class Forker:
    """A process with everything imported, that forks children on demand."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            env=process_environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def order(self, *words: object) -> tuple[list, list[int]]:
        """The children's reports, and their exit statuses."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        reports = []
        while True:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            report = json.loads(line)
            if report[0] == "done":
                return reports, report[1]
            reports.append(report)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def forker(own_files):
    process = Forker(own_files)
    yield process
    process.close()


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "kernels").glob("??/*"))


def test_a_second_process_neither_compiles_nor_imports_the_compiler(own_files, run_python):
    first = json.loads(run_python(COMPILE).stdout)
    later = [json.loads(run_python(COMPILE, KERNELS_DSL_NO_COMPILE="1").stdout) for _ in range(2)]
    assert first[0] == "compiled"
    assert first[2:4] == [True, 1]
    for report in later:
        assert report[:4] == ["disk", first[1], False, 0]
    # CPU seconds for the key, the entry, its check and the loading of the library.
    assert min(report[4] for report in later) < 0.020


@pytest.mark.parametrize("edited", ["own_kernels.py", "own_config.py"])
def test_an_edited_source_compiles_again(own_files, run_python, edited):
    first = json.loads(run_python(COMPILE).stdout)
    path = own_files / edited
    path.write_text(path.read_text() + "\nEDITED = 1\n")
    second = json.loads(run_python(COMPILE).stdout)
    # The configuration is no part of the kernel's module, but its class is a key's type: any edit counts.
    assert (second[0], second[1] != first[1]) == ("compiled", True)
    assert len(entries(own_files)) == 2


def test_eight_cold_processes_compile_once(own_files):
    """Separate interpreters, started at once, as eight workers of a server would be."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILE],
            env=process_environment(own_files, OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [p.returncode for p in processes] == [0] * 8, outputs
    reports = [json.loads(out) for out, _ in outputs]
    assert sum(report[3] for report in reports) == 1
    assert sorted(report[0] for report in reports) == ["compiled"] + ["disk"] * 7
    assert len({report[1] for report in reports}) == 1
    assert len(entries(own_files)) == 1


def test_eight_forked_processes_compile_each_kernel_once(forker, own_files):
    for i, threads in enumerate((32, 64, 96)):
        reports, statuses = forker.order("together", threads)
        assert statuses == [0] * 8
        assert sum(report[2] for report in reports) == 1
        assert len(entries(own_files)) == i + 1


def test_killed_at_any_moment_the_next_call_works(forker, own_files, seed):
    """SIGKILL at moments spread over a compile and its store, each followed by a call that must work."""
    duration = 0.5
    generator = random.Random(seed)
    killed = 0
    for i in range(16):
        threads = 32 + i
        delay = duration * generator.uniform(0.0, 0.9)
        _, statuses = forker.order("kill", threads, delay)
        killed += statuses == [signal.SIGKILL]
        for path in entries(own_files):
            if path.suffix == ".so":
                unpack(path.read_bytes(), path.stem)  # whole, or not there
        started = time.perf_counter()
        reports, statuses = forker.order("run", threads)
        assert statuses == [0]
        assert reports[0][0] in ("compiled", "disk")
        if reports[0][0] == "compiled":
            duration = time.perf_counter() - started
    assert killed >= 4, "the delays were too long to kill anything"
    assert not (own_files / "cache" / "damaged").exists()


def test_killed_between_writing_and_renaming(own_files, run_python):
    script = "import os, signal\nos.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n" + COMPILE
    assert run_python(script, check=False).returncode == -signal.SIGKILL
    leftovers = entries(own_files)
    assert [p.suffix for p in leftovers] == [".tmp"]
    assert json.loads(run_python(COMPILE).stdout)[0] == "compiled"


def test_a_read_only_folder_still_serves_what_is_in_it(own_files, run_python):
    """As on a shared installation: entries are read, nothing is written, calls work."""
    read_only = (
        "import os, errno\nreal = os.open\n"
        "def guarded(path, flags, *a, **k):\n"
        "    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and 'cache' in str(path):\n"
        "        raise OSError(errno.EROFS, 'Read-only file system', str(path))\n"
        "    return real(path, flags, *a, **k)\n"
        "os.open = guarded\n"
    )
    cold = run_python(read_only + COMPILE)
    assert json.loads(cold.stdout)[0] == "compiled"
    assert "Read-only file system" in cold.stderr
    assert entries(own_files) == []
    assert json.loads(run_python(COMPILE).stdout)[0] == "compiled"
    assert json.loads(run_python(read_only + COMPILE).stdout)[0] == "disk"


def test_a_source_edited_while_it_is_in_use_is_not_kept(own_files, run_python):
    """The kernel may come from either text, so no later process may find it."""
    script = (
        "import sys, torch, lowering, own_kernels, own_config\n"
        "jit = lowering.jit('own_kernels:affine')\n"
        "jit.fingerprint\n"
        f"path = {str(own_files / 'own_kernels.py')!r}\n"
        "text = open(path).read()\n"
        "open(path, 'w').write(text + '# edited\\n')\n"
        "x = torch.empty(64, device='meta')\n"
        "constants = {'config': own_config.Config(), 'function': own_config.same}\n"
        "jit.compile(x, x, (2.0, x), 64, arch='sm_90a', **constants)\n"
    )
    done = run_python(script)
    assert "changed while" in done.stderr
    assert entries(own_files) == []


def test_the_cache_of_this_process_is_untouched_by_these_tests(tmp_path):
    assert not str(cache.dir()).startswith(str(tmp_path))
    assert "KERNELS_DSL_CACHE_DIR" not in os.environ or os.environ["KERNELS_DSL_CACHE_DIR"] != str(
        tmp_path / "cache"
    )
