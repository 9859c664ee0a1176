"""Common to all tests: markers that skip with a reason, a seed each, a line to reproduce a failure."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Iterator

import pytest


@functools.cache
def _missing_gpu() -> str | None:
    """Says why GPU tests cannot run here; None where they can."""
    import torch

    if not torch.backends.cuda.is_built():
        return "this torch is a CPU build: no GPU here"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU here"
    return None


@functools.cache
def _missing_hopper() -> str | None:
    import torch

    reason = _missing_gpu()
    if reason is not None:
        return reason
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Tests keep their kernels apart from the user's, and no setting of the user's changes what they see.

    The folder outlives the run, so that a second run compiles less; KERNELS_DSL_CACHE_DIR chooses another.
    """
    for name in ("CACHE", "CACHE_BYTES", "NO_COMPILE", "EMULATE"):
        os.environ.pop(f"KERNELS_DSL_{name}", None)
    os.environ.setdefault("KERNELS_DSL_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "kernels"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        type=int,
        metavar="SEED",
        help="of each long test run a part of its cases, chosen by the seed (see tests/sampling.py)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--sample")
    if seed is None:
        return
    from tests import sampling

    kept = sampling.chosen([item.nodeid for item in items], sampling.long_functions(), seed)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in (("gpu", _missing_gpu), ("sm90", _missing_hopper)):
        if item.get_closest_marker(marker) is not None:
            reason = missing()
            if reason is not None:
                pytest.skip(reason)
    if item.get_closest_marker("alone") is not None and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other workers take the CPU: run it alone")


def _seed_of(nodeid: str) -> int:
    from reference.inputs import case_seed

    return case_seed(nodeid) & 0xFFFF_FFFF


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that follows from the test's name and parameters alone."""
    return _seed_of(request.node.nodeid)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """The global generators start from the test's seed, so that the order of the tests does not matter."""
    start = _seed_of(request.node.nodeid)
    random.seed(start)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(start)


PATCHING = ("quack.", "flash_attn.cute.")  # modules of these replace parts of the DSL when they are imported


def _patching() -> set[str]:
    return {name for name in tuple(sys.modules) if name.startswith(PATCHING)}


@pytest.fixture(autouse=True)
def _dsl_is_not_patched(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test patches the DSL for those after it by an import; `strangers.py` has a process of its own."""
    before = _patching()
    yield
    found = _patching() - before
    if found and request.path.name != "strangers.py":
        pytest.fail(f"imported {sorted(found)}, which patch the DSL: run it in a process of its own")


@pytest.fixture(autouse=True)
def _torch_is_imported_once() -> Iterator[None]:
    """No test drops modules of torch, as pytester does with what a run in this process imported first."""
    yield
    from tests.imported_once import dropped_modules

    lost = dropped_modules()
    if lost:
        pytest.fail(f"dropped {sorted(lost)} from sys.modules: run what imports them in a process of its own")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    if report.failed and report.when == "call":
        line = f"python -m pytest '{item.nodeid}'    (seed {_seed_of(item.nodeid)})"
        report.sections.append(("reproduce", line))
