"""Names of compiled kernels: what profilers, disassemblers and error messages show."""

from collections.abc import Callable
from typing import Any


def entry_name(name: str) -> Callable[[Any], Any]:
    """Decorator of a `@cute.kernel`: its entry is called `name` and the number of the launch, `gemm_sm90_0`.

    The DSL's own names hold every trace-time argument, cut off at some length, and the word cutlass.
    """

    def rename(kernel: Any) -> Any:
        kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        return kernel

    return rename
