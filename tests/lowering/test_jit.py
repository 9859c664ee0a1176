"""`jit` on a kernel in a user's own file: when it compiles, when it does not, and what it says."""

from __future__ import annotations

import logging
import threading

import cutlass
import pytest
import torch
import user_kernels
from cutlass import cute
from user_kernels import Config, affine, copy_column, negated, same

import lowering
from lowering import (
    ArgumentTypeError,
    ArgumentValueError,
    CompileError,
    CompileRefused,
    LoweringError,
    cache,
    function,
)

pytestmark = pytest.mark.usefixtures("cache_dir")
CONSTANTS = {"config": Config(), "function": same}


def spec(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_affine(jit=None, n=64, dtype=torch.float32, factor=2.0, arch="sm_90a", **constants):
    x = spec(n, dtype=dtype)
    return (jit or lowering.jit(affine)).compile(
        x, x, (factor, x), n, arch=arch, **{**CONSTANTS, **constants}
    )


def compiles() -> int:
    return cache.stats()["compiles"]


def test_one_compile_serves_memory_disk_and_other_sizes():
    start = compiles()
    first = compile_affine()
    assert first.source == "compiled"
    assert compile_affine(n=4096, factor=3.0).source == "memory"
    function.forget_loaded()
    again = compile_affine(n=128)
    assert (again.source, again.key) == ("disk", first.key)
    assert again.entry.library == first.entry.library
    assert (again.name, again.arch, again.seconds) == ("affine", "sm_90a", first.seconds)
    assert compiles() == start + 1


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"factor": 2},  # an Int32, not a Float32
        {"arch": "sm_89"},
        {"config": Config(threads=64)},
        {"function": negated},
        {"function": lambda v: v * v},
    ],
    ids=["dtype", "scalar", "arch", "config", "function", "lambda"],
)
def test_what_makes_another_kernel(change):
    start = compiles()
    first, second = compile_affine(), compile_affine(**change)
    assert second.key != first.key
    assert compiles() == start + 2
    assert compile_affine(**change).key == second.key
    assert compiles() == start + 2


def test_a_kernel_that_was_traced_before_keeps_its_key():
    """Tracing replaces the code of the kernel's function; a key made afterwards must not notice."""

    @cute.kernel
    def kernel(mX: cute.Tensor):
        tx, _, _ = cute.arch.thread_idx()
        if tx < 16:
            mX[tx] = mX[tx] + mX[tx]

    def host(mX: cute.Tensor, stream):
        kernel(mX).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    start = compiles()
    first = lowering.jit(host).compile(spec(32), arch="sm_90a")
    again = lowering.jit(host).compile(spec(32), arch="sm_90a")
    assert (again.key, compiles()) == (first.key, start + 1)


def test_options_make_another_kernel():
    start = compiles()
    keys = {compile_affine(lowering.jit(affine, options=o)).key for o in ("", "--opt-level 2")}
    assert (len(keys), compiles()) == (2, start + 2)


def test_variables_of_the_compiler_make_another_kernel(monkeypatch):
    before = lowering.jit(affine).key_parts((spec(4), spec(4), (1.0, spec(4)), 4), CONSTANTS, "sm_90a")
    monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "warnings")
    after = lowering.jit(affine).key_parts((spec(4), spec(4), (1.0, spec(4)), 4), CONSTANTS, "sm_90a")
    assert function.key_of(before) != function.key_of(after)
    assert after["environment"] == {"CUTE_DSL_COMPILER_OPT": "warnings"}


def test_string_target_gives_the_same_machine_code_and_reads_parameters_from_source():
    by_name = lowering.jit("user_kernels:affine")
    direct = compile_affine()
    named = compile_affine(by_name)
    assert [(p.name, p.is_runtime) for p in by_name.parameters] == [
        (p.name, p.is_runtime) for p in lowering.jit(affine).parameters
    ]
    assert named.entry.facts["parts"]["signature"] == direct.entry.facts["parts"]["signature"]
    assert named.launches == direct.launches


def test_none_strides_and_tuples():
    x, y, z = spec(32, 8), spec(32, 3), spec(32)
    assert copy_column.compile(x, y, z, arch="sm_80").key != copy_column.compile(x, y, None, arch="sm_80").key
    wide = torch.empty(1 << 33, device="meta").as_strided((32, 8), (1 << 27, 1))
    assert copy_column.compile(wide, y, z, arch="sm_80").source == "compiled"


def test_launch_facts():
    kernel = compile_affine(config=Config(threads=96, smem=4096))
    assert [(f.block, f.dynamic_smem) for f in kernel.launches] == [((96, 1, 1), 4096)]


@pytest.mark.parametrize(
    ("arch", "smem", "fits"),
    [("sm_89", 101376, True), ("sm_89", 101377, False), ("sm_90a", 232448, True), ("sm_90a", 232449, False)],
)
def test_shared_memory_over_the_budget_is_an_error(arch, smem, fits):
    if fits:
        assert compile_affine(arch=arch, config=Config(smem=smem)).launches[0].dynamic_smem == smem
    else:
        with pytest.raises(CompileError, match=rf"'affine'.*{smem} bytes.*{arch} has {smem - 1}"):
            compile_affine(arch=arch, config=Config(smem=smem))


def test_too_many_threads_is_an_error():
    with pytest.raises(CompileError, match=r"1025|1056"):
        compile_affine(config=Config(threads=1056))


def test_a_failed_compile_is_said_with_its_cause_and_leaves_nothing_wrong():
    def broken(value):
        return value.no_such_method()

    with pytest.raises(CompileError, match=r"'affine' for sm_90a.*no_such_method"):
        compile_affine(function=broken)
    assert compile_affine().source == "compiled"


class TestArguments:
    """Bad input is an error before anything is launched, naming the argument."""

    def call(self, *args, **constants):
        return lowering.jit(affine)(*args, **{**CONSTANTS, **constants})

    def test_cpu_tensor(self):
        x = torch.zeros(4)
        with pytest.raises(ArgumentTypeError, match=r"'mX' is on the CPU.*lowering\.emulator\.run"):
            self.call(x, x, (1.0, x), 4)

    def test_meta_tensor(self):
        x = spec(4)
        with pytest.raises(ArgumentTypeError, match=r"'mX' is on device meta.*compile"):
            self.call(x, x, (1.0, x), 4)

    def test_mixed_devices(self):
        with pytest.raises(ArgumentTypeError, match=r"'operands\[1\]' is on device meta"):
            self.call(torch.zeros(4), torch.zeros(4), (1.0, spec(4)), 4)

    def test_unknown_configuration(self):
        with pytest.raises(ArgumentTypeError, match=r"keyword 'tile' is unknown.*'config', 'function'"):
            compile_affine(tile=3)

    def test_runtime_argument_by_keyword(self):
        x = spec(4)
        with pytest.raises(ArgumentTypeError, match="keyword 'n' is a runtime argument"):
            lowering.jit(affine).compile(x, x, (1.0, x), n=4, arch="sm_90a", **CONSTANTS)

    def test_missing_configuration(self):
        x = spec(4)
        with pytest.raises(ArgumentTypeError, match=r"misses the configuration \['function'\]"):
            lowering.jit(affine).compile(x, x, (1.0, x), 4, arch="sm_90a", config=Config())

    def test_missing_argument(self):
        with pytest.raises(
            ArgumentTypeError, match=r"expected 4 runtime arguments \(mX, mY, operands, n\), got 1"
        ):
            lowering.jit(affine).compile(spec(4), arch="sm_90a", **CONSTANTS)

    def test_changing_configuration(self):
        with pytest.raises(ArgumentTypeError, match=r"'config'.*list"):
            compile_affine(config=[1])

    def test_wrong_arch(self):
        with pytest.raises(ArgumentValueError, match=r"arch must be one of sm_80.*'sm_9'"):
            compile_affine(arch="sm_9")

    def test_not_a_function(self):
        with pytest.raises(ArgumentTypeError, match="module:qualname"):
            lowering.jit(3)
        with pytest.raises(ArgumentTypeError, match="module:qualname"):
            lowering.jit("user_kernels")

    def test_starred_parameters(self):
        def host(*tensors, stream):
            pass

        with pytest.raises(ArgumentTypeError, match=r"'\*tensors'"):
            lowering.jit(host).compile(spec(4), arch="sm_90a")

    def test_own_check(self):
        def check(x, y, operands, n, **constants):
            if x.shape != y.shape:
                raise ValueError(f"mY has shape {tuple(y.shape)}, expected {tuple(x.shape)}")

        x = spec(4)
        with pytest.raises(ValueError, match=r"mY has shape \(5,\), expected \(4,\)"):
            lowering.jit(affine, check=check).compile(x, spec(5), (1.0, x), 4, arch="sm_90a", **CONSTANTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_arch_must_be_said():
    with pytest.raises(LoweringError, match=r"without a GPU.*arch='sm_90a'"):
        compile_affine(arch=None)


def test_the_raw_callable_checks_what_the_key_assumed():
    kernel = compile_affine(dtype=torch.bfloat16)
    x = torch.zeros(64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"argument #0.*expected device_type=cuda"):
        kernel.launch(x, x, (2.0, x), 64)


def test_refusing_to_compile():
    cache.refuse_compile()
    try:
        with pytest.raises(
            CompileRefused, match=r"'affine' is not compiled for sm_90a.*KERNELS_DSL_NO_COMPILE"
        ):
            compile_affine()
    finally:
        cache.refuse_compile(False)
    compile_affine()
    function.forget_loaded()
    cache.refuse_compile()
    try:
        assert compile_affine().source == "disk"
    finally:
        cache.refuse_compile(False)


def test_without_the_disk_cache():
    cache.disable()
    try:
        assert compile_affine().source == "compiled"
        function.forget_loaded()
        assert compile_affine().source == "compiled"
    finally:
        cache.disable(False)
    assert cache.stats()["entries"] == 0


def test_a_folder_that_cannot_be_written_is_said_once_and_calls_go_on(monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lowering.store.os.fsync", full)
    with caplog.at_level(logging.WARNING, "lowering"):
        kernels = [compile_affine(), compile_affine(function=negated)]
    assert [k.source for k in kernels] == ["compiled", "compiled"]
    assert caplog.text.count("cannot be kept") == 1
    assert "No space left" in caplog.text
    with pytest.raises(ValueError, match="device_type=cuda"):  # loaded from memory
        kernels[0].launch(torch.zeros(4), torch.zeros(4), (1.0, torch.zeros(4)), 4)


@pytest.mark.parametrize("damage", ["cut", "empty", "zeroed"])
def test_a_damaged_entry_is_compiled_again(damage, caplog):
    first = compile_affine()
    path = cache.store().path(first.key)
    data = path.read_bytes()
    middle = len(data) // 2
    code = data.index(b"kernel")
    zeroed = data[:code] + bytes(64) + data[code + 64 :]
    path.write_bytes({"cut": data[:middle], "empty": b"", "zeroed": zeroed}[damage])
    function.forget_loaded()
    with caplog.at_level(logging.WARNING, "lowering"):
        assert compile_affine().source == "compiled"
    assert "damaged" in caplog.text
    function.forget_loaded()
    assert compile_affine().source == "disk"


def test_threads_that_want_one_kernel_compile_it_once():
    start = compiles()
    found, errors = [], []
    jit = lowering.jit(affine)

    def work(i: int) -> None:
        try:
            found.append(compile_affine(jit, n=8 * i + 8, config=Config(threads=32 * (i % 2) + 32)).key)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (len(found), len(set(found)), compiles()) == (8, 2, start + 2)


def test_a_long_compile_is_announced_once(monkeypatch, caplog):
    monkeypatch.setattr("lowering.compile.ANNOUNCE_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING, "lowering"):
        compile_affine()
        compile_affine()
    assert len([r for r in caplog.records if "affine for sm_90a" in r.message]) == 1


def test_a_short_compile_is_silent(monkeypatch, caplog):
    monkeypatch.setattr("lowering.compile.ANNOUNCE_SECONDS", 100.0)
    before = set(threading.enumerate())  # other tests may have left some
    with caplog.at_level(logging.WARNING, "lowering"):
        compile_affine()
    assert caplog.text == "" and set(threading.enumerate()) <= before


def test_a_kernel_inside_a_function_with_its_closure():
    def make(amount: float):
        @cute.kernel
        def kernel(mX: cute.Tensor):
            tx, _, _ = cute.arch.thread_idx()
            mX[tx] = mX[tx] + cutlass.Float32(amount)

        def host(mX: cute.Tensor, stream):
            kernel(mX).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

        return lowering.jit(host)

    first, same_again, other = make(1.0), make(1.0), make(2.0)
    keys = [f.compile(spec(32), arch="sm_90a").key for f in (first, same_again, other)]
    assert keys[0] == keys[1] != keys[2]
    assert "0f3F800000" in first.compile(spec(32), arch="sm_90a").ptx()
    assert "0f40000000" in other.compile(spec(32), arch="sm_90a").ptx()


def test_a_global_that_changed_makes_another_kernel(monkeypatch):
    before = compile_affine().key
    monkeypatch.setattr(user_kernels, "BIAS", 5.0)
    after = compile_affine()
    assert after.key != before
    assert "0f40A00000" in after.ptx()


def test_a_host_function_with_control_flow_of_its_own():
    """Under ``@cute.jit`` the host function branches on a runtime value."""
    kernel = user_kernels.branching.compile(spec(64), 3, arch="sm_90a")
    assert len(kernel.launches) == 2


def test_an_entry_that_vanishes_before_it_is_loaded():
    kernel = compile_affine()
    cache.store().path(kernel.key).unlink()
    x = torch.zeros(4)
    with pytest.raises(ValueError, match=r"device_type=cuda"):
        kernel.launch(x, x, (1.0, x), 4)


def test_an_entry_that_cannot_be_loaded_is_named(monkeypatch):
    kernel = compile_affine()
    monkeypatch.setattr("tvm_ffi.core._get_global_func", lambda name, allow_missing: None)
    monkeypatch.setattr("tvm_ffi.load_module", lambda path: (_ for _ in ()).throw(OSError("no exec")))
    with pytest.raises(LoweringError, match=r"'affine' could not be loaded: no exec"):
        _ = kernel.launch
