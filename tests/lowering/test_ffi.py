"""The part of `tvm_ffi` that a launch needs, and the rest of it when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = """
import sys, threading, types
import torch
from lowering import ffi, launch
launch.load_runtime()
package = sys.modules["tvm_ffi"]
assert type(package) is ffi.DeferredPackage
assert "tvm_ffi.cpp" not in sys.modules and "tvm_ffi.dataclasses" not in sys.modules
"""
PROGRAMS = {
    "a tuple of arguments": """
from tvm_ffi.core import _get_global_func
assert _get_global_func("ffi.ArraySize", False)((1, torch.ones(2), "a")) == 3
assert type(package) is ffi.DeferredPackage; package.Array
""",
    "a name": "import tvm_ffi; assert list(tvm_ffi.Array([1, 2])) == [1, 2]",
    "a name of a submodule": "from tvm_ffi import cpp, Shape; assert Shape((3,)) == (3,)",
    "a submodule": "import tvm_ffi.structural; assert package.structural_equal([1], [1])",
    "a dtype": "import tvm_ffi; assert tvm_ffi.convert(lambda x: x)(torch.int8) == tvm_ffi.dtype('int8')",
    "a private submodule": "from tvm_ffi import _dtype; assert _dtype.dtype('int8') == 'int8'; package.Array",
    "its version": "assert package.__version__[0].isdigit()",
    "its names": "assert 'from_dlpack' in dir(package)",
    "a dunder that it has not": (
        "assert not hasattr(package, '__wrapped__') and type(package) is ffi.DeferredPackage; package.Array"
    ),
    "many threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda i: len(package.from_dlpack(torch.arange(i)).shape), range(1, 9)))
assert found == [1] * 8
""",
}
END = """
import tvm_ffi
assert tvm_ffi is package and type(tvm_ffi) is types.ModuleType
assert tvm_ffi.Module is sys.modules["tvm_ffi.module"].Module
"""


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_rest_is_imported_when_it_is_asked_for(program):
    command = [sys.executable, "-W", "ignore", "-c", "\n".join((START, program, END))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_package_that_lacks_a_part_is_imported_whole():
    program = f"""
import sys
import torch
from lowering import ffi
ffi.NEEDED = (*ffi.NEEDED, "no_such_part")
ffi.load()
package = sys.modules["tvm_ffi"]
import types
{END}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_its_dataclasses_are_made_here_and_nobody_elses():
    program = """
import dataclasses, sys, threading
import torch
from lowering import ffi, records
with ffi._quick_dataclasses():
    import dataclasses as quick
    found = []
    other = threading.Thread(target=lambda: found.append(quick.dataclass))
    other.start(); other.join()
    assert quick.dataclass is not found[0] is dataclasses.dataclass and quick.field is dataclasses.field
assert sys.modules["dataclasses"] is dataclasses
ffi.load()
for name in ("TypeSchema", "TypeField", "TypeMethod", "TypeInfo"):
    made = getattr(sys.modules["tvm_ffi.core"], name)
    assert dataclasses.is_dataclass(made) and made.__init__.__code__.co_filename == records.__file__
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# torch of some versions imports cuda-python itself: kept from it here.
WITHOUT_CUDA_PYTHON = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("cuda"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
import torch
del sys.meta_path[0]
from lowering import ffi
ffi.load()
"""
DRIVER_PROGRAMS = {
    "not imported": """
assert "cuda.bindings" not in sys.modules and ffi._DRIVER not in sys.modules
""",
    "the same later": """
from cuda.bindings import driver
import cuda.bindings
assert cuda.bindings.driver is driver and cuda.bindings.__version__
assert sys.modules["tvm_ffi.core"].cuda_driver.CUstream is driver.CUstream
""",
    "a launch": """
import tvm_ffi
echo = tvm_ffi.convert(lambda x: x)
assert echo(3) == 3 and echo("a") == "a" and ffi._DRIVER not in sys.modules
from cuda.bindings import driver
assert int(getattr(echo(driver.CUstream(5)), "value", 5)) == 5
""",
}


@pytest.mark.parametrize("program", DRIVER_PROGRAMS.values(), ids=DRIVER_PROGRAMS)
def test_the_driver_is_left_until_a_stream_can_be_one_of_its(program):
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_CUDA_PYTHON + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
