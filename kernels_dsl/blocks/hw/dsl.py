"""Extensions of the DSL: names of kernels, and PTX instructions for which it has no function."""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def entry_name(name: str) -> Callable[[Any], Any]:
    """Decorator of a `@cute.kernel` that names its entry `name` and the number of the launch: `gemm_sm90_0`.

    The DSL's own names have every trace-time argument, truncated, and the word cutlass.
    """

    def rename(kernel: Any) -> Any:
        kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        return kernel

    return rename


def choose(condition: cutlass.Boolean, yes: Any, no: Any, kind: type[cutlass.Numeric] = Float32) -> Any:
    """`yes` where the condition holds, else `no`, as a `kind`: a select, never a branch."""
    return kind(cutlass.select_(condition, kind(yes).ir_value(), kind(no).ir_value()))


def inline_ptx(
    result: type[cutlass.Numeric] | None,
    values: Sequence[Any],
    text: str,
    constraints: str,
    *,
    effects: bool,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """Emits `text`, whose $0 is its result, if it has one, followed by the DSL numbers `values`.

    `constraints` as in LLVM's inline assembly: "=r,f" makes an int32 from a float32. `effects`: the compiler
    does not drop or repeat it, or move it across others with effects. Call it in a function with
    @dsl_user_op.
    """
    found = llvm.inline_asm(
        None if result is None else result.mlir_type,
        [value.ir_value(loc=loc, ip=ip) for value in values],
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return None if result is None else result(found)


@dsl_user_op
def permuted(low: Int32, high: Int32, selector: int, *, loc=None, ip=None) -> Int32:
    """The bytes of two words that the digits of `selector` name."""
    text = f"prmt.b32 $0, $1, $2, {selector};"
    return inline_ptx(Int32, (Int32(low), Int32(high)), text, "=r,r,r", effects=False, loc=loc, ip=ip)


def transposed(rows: Sequence[Int32]) -> list[Int32]:
    """The columns of four rows of four bytes: word n has byte n of each row."""
    pairs = [[permuted(rows[e], rows[e + 1], order) for e in (0, 2)] for order in (0x5140, 0x7362)]
    return [permuted(*pair, order) for pair in pairs for order in (0x5410, 0x7632)]
