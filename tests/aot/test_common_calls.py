"""The common calls: every operation has some, and what they would launch is what they launch.

Small calls of the same makers run in the emulator; the calls themselves, in a process that may not compile,
on a GPU alone (`test_common_calls_gpu.py`).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kernels_dsl
from kernels_dsl.aot import common
from kernels_dsl.aot.calls.call import Result, Source
from kernels_dsl.aot.recorded import kernel_of, recorded
from kernels_dsl.aot.shipped import iter_all
from kernels_dsl.config.problem import DEVICES_BY_ARCH
from kernels_dsl.sparse import pattern
from lowering import emulator
from tests.aot import references
from tests.aot.small_calls import MERGE, SMALL
from tests.aot.worker import Values, run_calls
from tests.ops import public_operations

WITHIN = {
    "ScaledLinear": "scaled_linear", "BsrTensor": "bsr_gemm",
    "BlockLists": "attention", "register_torch_attention": "scaled_dot_product_attention",
    "register_transformers_attention": "attention",
    "register_transformers_paged_attention": "attention_varlen",
}  # fmt: skip
"""Public names whose kernels are those of another one's calls."""
COMPILERS = {
    "autotune_gemm": "tries configurations, which it compiles",
    "advise": "compares operations, whose kernels it compiles",
}
LAUNCH_NOTHING = {
    "__version__", "checked", "sm_margin", "kernel_function", "register_epilogue", "Schedule", "GemmConfig",
    "Sm80AttentionConfig", "Sm90AttentionConfig", "Sm80GemmConfig", "Sm90GemmConfig", "LinearEpilogue",
    *(name for name in kernels_dsl.__all__ if name.endswith("supports")),
}  # fmt: skip


def test_every_operation_has_common_calls():
    named = {call.name for call in common.common_calls("sm_90a")}
    wanted = set(kernels_dsl.__all__) - LAUNCH_NOTHING - COMPILERS.keys() - WITHIN.keys()
    assert named == wanted, "an operation of kernels_dsl.__all__ gets calls in kernels_dsl/aot/calls"
    assert set(WITHIN.values()) <= named
    assert {operation.name for operation in public_operations.OPERATIONS} <= named | WITHIN.keys()
    assert named == references.REFERENCES.keys()


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_calls_that_need_fp8_are_left_out_without_it(arch):
    names = {call.name for call in common.common_calls(arch)}
    assert ("scaled_gemm" in names) == ("attention_fp8" in names) == DEVICES_BY_ARCH[arch].has_fp8
    assert {"gemm", "attention", "attention_decode", "bsr_gemm"} <= names


def test_labels_are_unique():
    labels = [call.label for call in common.common_calls("sm_90a")]
    assert len(set(labels)) == len(labels)


def test_the_whole_list_has_the_common_kernels():
    def keys(kernels):
        return [kernel.function.key(*kernel.args, arch="sm_80", **kernel.constants) for kernel in kernels]

    few, every = common.common_kernels("sm_80", ("gemm",)), list(iter_all("sm_80", ("gemm",)))
    found = keys(every)
    assert set(keys(few)) < set(found) and len(set(found)) == len(found)
    assert len({kernel.name for kernel in every}) == len(every)


ARCH = "sm_90a"


def _key(kernel) -> str:
    return kernel.function.key(*kernel.args, arch=ARCH, **kernel.constants)


def _keys(calls) -> list[tuple[str, str]]:
    return [(f.name, f.key(*args, arch=ARCH, **constants)) for f, args, constants in calls]


@pytest.mark.parametrize("call", SMALL, ids=lambda call: call.label.strip().replace(" ", "-"))
def test_calls_launch_what_their_recording_lists(call, monkeypatch):
    kernels = [kernel_of("", made) for made in recorded(ARCH, partial(call.run, Source()))]
    listed = [(kernel.function, kernel.args, kernel.constants) for kernel in kernels]
    launched = []
    launch = emulator.launch

    def seen(function, args, constants, arch):
        launched.append((function, args, constants))
        launch(function, args, constants, arch)

    monkeypatch.setattr(emulator, "launch", seen)
    torch.manual_seed(0)
    with emulator.run(arch=ARCH, check=False):
        result = call.run(Values("cpu"))
    assert _keys(listed) == _keys(launched) != []
    references.check(call, result)


def test_lists_that_kernels_make_on_gpus_ask_for_no_other_kernels(monkeypatch):
    """On the CPU, PyTorch makes the lists of a pattern; here kernels do, and what they write is filled in."""
    made = pattern.row_lists

    def filled(first, columns, extent):
        found, kept = made(first, columns, extent), torch.arange(len(columns), dtype=torch.int32)
        exact = pattern._lists(first, columns, kept, extent)
        for name in ("table", "first", "across"):
            getattr(found, name).copy_(getattr(exact, name))
        found.kept[: len(kept)].copy_(exact.kept)
        return found

    shipped = {_key(kernel) for kernel in common.common_kernels(ARCH, ("bsr",))}
    monkeypatch.setattr(pattern, "runs_kernels", lambda device: True)
    monkeypatch.setattr(pattern, "row_lists", filled)
    calls = [call for call in common.common_calls(ARCH, ("bsr",)) if "fp16" not in call.label]
    launches = [made for call in calls for made in recorded(ARCH, partial(call.run, Source()))]
    assert [x.function.name for x in launches if _key(kernel_of("", x)) not in shipped] == []
    assert {"row_lists", "row_chunks"} < {x.function.name for x in launches}


def test_small_calls_cover_every_operation():
    assert {call.name for call in SMALL} == references.REFERENCES.keys()


def test_a_wrong_result_is_seen():
    arguments = MERGE.arguments(Values("cpu"))
    exact = references.REFERENCES["merge_states"]({name: x.double() for name, x in arguments.items()})
    references.check(MERGE._replace(gradients=()), Result(arguments, exact))
    exact[0][:, 3] = 0.0
    with pytest.raises(AssertionError, match="result is off by"):
        references.check(MERGE._replace(gradients=()), Result(arguments, exact))


def test_the_worker_goes_on_after_a_failure(capsys):
    calls = [MERGE._replace(operation=lambda **_: None), MERGE]
    with emulator.run(arch=ARCH, check=False):
        assert run_calls(calls, Values("cpu"), 100.0) == 1
    shown = capsys.readouterr().out
    assert "FAILED merge_states" in shown and "2 calls ran, 1 failed" in shown
    assert "merge_states: largest relative error 0.0" in shown
    run_calls([MERGE], Values("cpu"), -1.0)
    assert "0 calls ran" in capsys.readouterr().out
