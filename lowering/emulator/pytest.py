"""A pytest plugin, ``pytest -p lowering.emulator.pytest``: tests whose kernels run in the emulator.

::

    @pytest.mark.emulated(arch="sm_90a", sms=2, seeds=4)
    def test_my_kernel():
        x = torch.randn(256, device="cuda")
        my_kernel(x)

A marked test, or one that takes the fixture ``emulator`` (the session), sees one GPU of ``arch`` that is the
CPU. Findings fail it, with their reports. The marker takes what `lowering.emulator.run` takes, and
``fail_on="warning"``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from lowering import emulator as emulation

_SESSION = pytest.StashKey[emulation.Session]()
_FAIL_ON = pytest.StashKey[str]()
_MARKER = "emulated(arch='sm_90a', sms=None, seeds=1, fail_on='error', ...): kernels run in the emulator"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give marked tests the fixture."""
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and item.get_closest_marker("emulated") and "emulator" not in names:
            names.insert(0, "emulator")


@pytest.fixture
def emulator(request: pytest.FixtureRequest) -> Iterator[emulation.Session]:
    """The session in which the test's kernels run."""
    marker = request.node.get_closest_marker("emulated")
    settings: dict[str, Any] = {"torch_cuda": True, **(marker.kwargs if marker else {})}
    if marker and marker.args:
        raise pytest.UsageError("emulated takes keyword arguments only, such as arch='sm_90a'")
    fail_on = settings.pop("fail_on", "error")
    if fail_on not in ("error", "warning"):
        raise pytest.UsageError(f"emulated: fail_on is {fail_on!r}, must be 'error' or 'warning'")
    with emulation.run(raise_on_report=False, **settings) as session:
        request.node.stash[_SESSION], request.node.stash[_FAIL_ON] = session, fail_on
        yield session


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Fail a test that passed although the emulator found something."""
    try:
        result = yield
    except BaseException:
        found = _found(pyfuncitem)
        if found:
            pyfuncitem.add_report_section("call", "emulator", found)
        raise
    found = _found(pyfuncitem)
    if found:
        pytest.fail(found, pytrace=False)
    return result


def _found(item: pytest.Item) -> str:
    session = item.stash.get(_SESSION, None)
    if session is None:
        return ""
    every = item.stash[_FAIL_ON] == "warning"
    return "\n\n".join(str(r) for r in session.reports if every or not r.warning)
