"""Messages: no colours in errors, announcements that are true, counters that count."""

from __future__ import annotations

import logging
import traceback

import pytest
import torch
from user_kernels import Config, affine, same

import lowering
from lowering import CompileError, CompileRefused, cache, compile, function
from lowering.errors import plain, without_colours
from lowering.store import Store

pytestmark = pytest.mark.usefixtures("cache_dir")
RED, RESET = "\x1b[91m", "\x1b[0m"


def compile_affine(**constants):
    x = torch.empty(64, device="meta")
    given = {"config": Config(), "function": same, **constants}
    return lowering.jit(affine).compile(x, x, (2.0, x), 64, arch="sm_90a", **given)


def no_such_operation(value):
    return value + "text"


def raises_in_colour(value):
    from cutlass.base_dsl.common import DSLCudaRuntimeError

    raise DSLCudaRuntimeError(1, "CUDA_ERROR_INVALID_DEVICE")


@pytest.mark.parametrize("mistake", [no_such_operation, raises_in_colour])
def test_a_compile_error_has_no_colours(mistake):
    with pytest.raises(CompileError) as caught:
        compile_affine(function=mistake)
    assert caught.value.__cause__ is not None
    text = "".join(traceback.format_exception(caught.value))
    assert "\x1b" not in text
    assert "compiling 'affine' for sm_90a failed" in text


def test_an_error_whose_text_is_made_anew_each_time_is_plain_too():
    class Coloured(Exception):
        def __str__(self):
            return f"{RED}red{RESET}"

    cause, context = Coloured("a"), KeyError(f"{RED}key{RESET}")
    error = ValueError(f"{RED}value{RESET}", 3)
    error.__cause__, cause.__context__ = cause, context
    context.__context__ = error  # a circle
    if hasattr(error, "add_note"):
        error.add_note(f"{RED}note{RESET}")
    assert without_colours(error) is error
    assert "\x1b" not in "".join(traceback.format_exception(error))
    assert (str(cause), type(cause).__name__, isinstance(cause, Coloured)) == ("red", "Coloured", True)
    assert error.args == ("value", 3)


@pytest.mark.parametrize(
    "text",
    [f"{RED}a{RESET}", "\x1b[1;31ma\x1b[K", "\x1b]0;title\x07a", "\x1b]8;;x\x1b\\a", "a\x1b"],
)
def test_plain(text):
    assert plain(text) == "a"


def test_a_launch_error_has_no_colours(monkeypatch):
    kernel = compile_affine()

    def fails(*args):
        raise RuntimeError(f"{RED}launch failed{RESET}")

    kernel.launch = fails
    with pytest.raises(RuntimeError, match=r"^launch failed$"):
        kernel()
    jit = lowering.jit(affine)
    jit._memo[()] = (fails, ())
    with pytest.raises(RuntimeError, match=r"^launch failed$"):
        jit()


def test_a_load_error_has_no_colours(monkeypatch):
    def fails(*args):
        raise RuntimeError(f"{RED}no{RESET}")

    kernel = compile_affine()
    monkeypatch.setattr("lowering.sealed.load_function", fails)
    with pytest.raises(lowering.LoweringError, match=r"could not be loaded: no$") as caught:
        _ = kernel.launch
    assert str(caught.value.__cause__) == "no"


def test_damaged_entries_are_counted(cache_dir):
    key = compile_affine().key
    before = cache.stats()["damaged"]
    Store(cache_dir).path(key).write_bytes(b"cut")
    function.forget_loaded()
    assert compile_affine().source == "compiled"
    assert cache.stats()["damaged"] == before + 1


def test_every_counter_counts(cache_dir, tmp_path, monkeypatch):
    before = cache.stats()

    def since() -> dict[str, int]:
        now = cache.stats()
        return {name: now[name] - before[name] for name in vars(cache.Stats()) if now[name] != before[name]}

    kernel = compile_affine()
    assert since() == {"compiles": 1, "stores": 1}
    compile_affine()
    function.forget_loaded()
    compile_affine()
    assert since() == {"compiles": 1, "stores": 1, "memory_hits": 1, "disk_hits": 1}
    lowering.bundle.export(tmp_path / "bundle", [kernel])
    lowering.bundle.load(tmp_path / "bundle")
    assert since()["stores"] == 2
    function.forget_loaded()
    Store(cache_dir).path(kernel.key).unlink()
    monkeypatch.setattr(Store, "write", lambda *args: (_ for _ in ()).throw(OSError(28, "No space")))
    compile_affine()
    assert (since()["compiles"], since()["store_failures"]) == (2, 1)


def said_of_a_compile(monkeypatch, caplog, run) -> str:
    monkeypatch.setattr(compile, "ANNOUNCE_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING, "lowering"):
        run()
    return caplog.text


def test_the_announcement_is_true(cache_dir, monkeypatch, caplog):
    assert "later runs take it from the cache" in said_of_a_compile(monkeypatch, caplog, compile_affine)
    function.forget_loaded()
    assert compile_affine().source == "disk"


@pytest.mark.parametrize("reason", ["off", "refused"])
def test_without_a_disk_cache_the_announcement_says_so(cache_dir, monkeypatch, caplog, reason):
    if reason == "off":
        cache.disable()
    else:
        cache_dir.mkdir()
        cache_dir.chmod(0o777)
    text = said_of_a_compile(monkeypatch, caplog, compile_affine)
    assert "there is no disk cache to keep it" in text
    assert "later runs take it" not in text


def emulate():
    x = torch.ones(8)
    y = torch.empty(8)
    with lowering.emulator.run(arch="sm_90a"):
        lowering.jit(affine)(x, y, (2.0, x), 8, config=Config(threads=32), function=same)
    assert y.tolist() == [3.0] * 8


def test_the_emulator_compiles_once_as_well(cache_dir, monkeypatch, caplog):
    from lowering.emulator import session

    monkeypatch.setattr(session, "_loaded", {})
    before = cache.stats()["compiles"]
    text = said_of_a_compile(monkeypatch, caplog, emulate)
    assert "later runs take it from the cache" in text
    monkeypatch.setattr(session, "_loaded", {})
    emulate()
    assert cache.stats()["compiles"] == before + 1


def test_the_emulator_obeys_a_refusal_to_compile(cache_dir, monkeypatch):
    from lowering.emulator import session

    monkeypatch.setattr(session, "_loaded", {})
    cache.refuse_compile()
    with pytest.raises(CompileRefused, match=r"'affine'.*emulator"):
        emulate()
