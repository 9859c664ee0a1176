"""The layout of Hugging Face's `kernels`: written, loaded from its folder, and called in the emulator."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reference import tolerance
from reference.attention import Masking
from reference.attention import attention as reference_attention

ROOT = Path(__file__).parents[2]
# No tree of ours is on the path, neither the checkout nor where it is installed.
ALONE = """
import sys
from pathlib import Path
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path = [place for place in sys.path if place and not (Path(place) / "kernels_dsl").exists()]
"""
# As `kernels` does it: the file by its path, under the metadata's name.
LOAD = """
import importlib.util, json
variant = Path({variant!r})
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules[name] = kernel
spec.loader.exec_module(kernel)
"""
CALL = """
import torch, kernels_dsl
from lowering import emulator
assert Path(kernels_dsl.__file__).is_relative_to(variant), kernels_dsl.__file__
q, k, v, starts, caches, queries, lengths = torch.load({inputs!r})
with emulator.run(arch="sm_80"):
    dense = kernel.flash_attn_func(q, k, v, causal=True, softmax_scale=0.2)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    varlen = kernel.flash_attn_varlen_func(*packed, starts, starts, 48, 48, causal=True)
    decoded = kernel.flash_attn_with_kvcache(queries, *caches, cache_seqlens=lengths, causal=True)
torch.save((dense, varlen, decoded), {outputs!r})
"""


def _python(text: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", text]
    return subprocess.run(command, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> Path:
    """The layout, in a folder outside of the checkout."""
    out = tmp_path_factory.mktemp("hf") / "attention"
    command = [sys.executable, "tools/hf_kernel.py", str(out)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and "is not empty" in again.stderr
    return out


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_a_build_is_whole_and_its_digests_hold(layout, backend):
    variant = layout / "build" / f"torch-{backend}"
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "kernels-dsl-attention" and metadata["backend"]["type"] == backend
    assert metadata["id"].isidentifier() and metadata["version"] == 1
    files = {
        path.relative_to(variant).as_posix(): path
        for path in variant.rglob("*")
        if path.is_file() and path.name != "metadata.json" and "__pycache__" not in path.parts
    }
    assert set(metadata["digest"]["files"]) == set(files)
    for name in ("__init__.py", "_packages/lowering/__init__.py", "kernels_dsl_attention/__init__.py"):
        found = base64.b64encode(hashlib.sha256(files[name].read_bytes()).digest()).decode()
        assert metadata["digest"]["files"][name] == found


def test_the_description_for_the_builder(layout):
    tomllib = pytest.importorskip("tomllib")
    described = tomllib.loads((layout / "build.toml").read_text())
    assert described["general"]["name"] == "kernels-dsl-attention"
    assert {path.name for path in (layout / "build").iterdir()} == {
        f"torch-{backend}" for backend in described["general"]["backends"]
    }
    assert (layout / "torch-ext" / "kernels_dsl_attention" / "__init__.py").is_file()


def test_its_functions_run_from_the_folder(layout, tmp_path):
    torch.manual_seed(5)
    q = torch.randn(2, 48, 4, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 48, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    starts, lengths = torch.tensor([0, 48, 96], dtype=torch.int32), torch.tensor([40, 17], dtype=torch.int32)
    queries, caches = q[:, :1].contiguous(), [k.clone(), v.clone()]
    for cache in caches:
        cache[1, 17:] = float("nan")  # keys that the second sequence does not have
    inputs, outputs = str(tmp_path / "in.pt"), str(tmp_path / "out.pt")
    torch.save((q, k, v, starts, caches, queries, lengths), inputs)
    variant = str(layout / "build" / "torch-cpu")
    text = ALONE + LOAD.format(variant=variant) + CALL.format(inputs=inputs, outputs=outputs)
    done = _python(text, tmp_path)
    assert done.returncode == 0, done.stderr
    dense, varlen, decoded = torch.load(outputs)
    causal = Masking(right=0)
    _check(dense, q, k, v, causal, scale=0.2)
    _check(varlen.view_as(q), q, k, v, causal)
    for row, length in enumerate(lengths.tolist()):
        keys, values = (x[row : row + 1, :length] for x in (k, v))
        _check(decoded[row : row + 1], queries[row : row + 1], keys, values, Masking())


def _check(found, q, k, v, masking, scale=None):
    """`found` is attention by the tolerance rule, whose measure is attention in bf16."""
    expected, peer = (
        reference_attention(q, k, v, masking, scale=scale, dtype=dtype)[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    tolerance.check(found, expected, peer)


HIDDEN = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "tvm_ffi" else real(name, *more)
"""


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (HIDDEN, "needs packages that are not installed: pip install apache-tvm-ffi"),
        ("sys.path.insert(0, '.')", "__init__.py is 9.9: they must be of one release"),
    ],
    ids=["a package is missing", "another release is installed"],
)
def test_refusals_say_why(layout, tmp_path, before, message):
    (tmp_path / "kernels_dsl").mkdir()
    (tmp_path / "kernels_dsl" / "__init__.py").write_text('__version__ = "9.9"')
    variant = str(layout / "build" / "torch-cpu")
    done = _python(f"{ALONE}\n{before}\n{LOAD.format(variant=variant)}", tmp_path)
    assert done.returncode == 1 and message in done.stderr


def test_earlier_releases_find_the_module_in_the_inner_folder(layout, tmp_path):
    inner = layout / "build" / "torch-cpu"
    text = f"{ALONE}\nsys.path.insert(0, {str(inner)!r})\nimport kernels_dsl_attention as kernel\n"
    done = _python(text + "print(sorted(kernel.__all__), kernel.flash_attn_func.__name__)", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("'flash_attn_with_kvcache'] flash_attn_func\n")
