"""The arguments of a call of `gemm`: checked once, described as plain data.

Every error is a TypeError or ValueError that names the argument, what it was and what it must be. The checks
look at shapes, dtypes and devices only, so they serve real tensors, fake ones and symbolic shapes alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from kernels_dsl.blocks.epilogue.functions import LinearEpilogue
from kernels_dsl.checks import options
from kernels_dsl.checks.eager_path import asks_gradients, check_output, check_tensor
from kernels_dsl.config.promotion import Promotion
from kernels_dsl.config.reductions import CallReduction
from kernels_dsl.ops.gemm import product_options
from kernels_dsl.ops.operation import Arguments, Named
from lowering.records import frozen

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPE_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip
MAX_EXTENT = 2**31 - 1
BLOCK_SCALE = "block"
GROUP_ENDS = "ends"


class ProductArguments(Arguments):
    """The common part of the call records of all products."""

    operands: ClassVar[tuple[str, ...]]
    """The sources of operands, in the order in which `Plan.operands` takes them: alpha, beta, c, bias,
    residual, and what else the operation has; `epilogue_args` follow."""
    configs: ClassVar[tuple[type, ...]] = product_options.CONFIGS
    epilogue_args: tuple[Any, ...]
    alpha: float
    config: Named
    family: str | None
    out: torch.Tensor | None

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two factors as a plan takes them."""
        raise NotImplementedError

    def check(self) -> None:
        """TypeError or ValueError for an option that is wrong."""
        product_options.check(vars(self))
        product_options.check_forced(self.config, self.family, self.configs)

    def operand_values(self) -> tuple[Any, ...]:
        """The values that `Plan.operands` takes."""
        fields = vars(self)
        scalars = (float(self.alpha), float(fields.get("beta", 1.0)))
        return (*scalars, *map(fields.get, self.operands[2:]), *self.epilogue_args)

    def likes(self) -> tuple[tuple[torch.Size, torch.dtype] | None, ...]:
        """Shape and dtype of c, bias and residual, None for those that are not given."""
        return tuple(None if x is None else (x.shape, x.dtype) for x in self.operand_values()[2:5])


class DenseArguments(ProductArguments):
    """Those of products of dense factors."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b."""
        return self.a, self.b


@frozen
class GemmArguments(DenseArguments):
    """The arguments of `gemm`."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    epilogue_args: tuple[Any, ...] = ()
    bias_axis: str = "n"
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    epilogue: Named = None
    out_dtype: torch.dtype | None = None
    config: Named = None
    family: str | None = None
    batch_invariant: bool = False
    out: torch.Tensor | None = None

    operands: ClassVar[tuple[str, ...]] = ("alpha", "beta", "c", "bias", "residual")

    def refuse_gradients(self) -> None:
        """ValueError where gradients are asked for that do not exist."""
        if asks_gradients((*self.read().values(), self.out)):
            from kernels_dsl.ops.gemm.grad import refuse_functions

            refuse_functions(self.epilogue, self.activation)


@frozen
class OperandSpec:
    """The form in which one operand of the epilogue goes to the kernel.

    `source`: the argument that it is, one of `ProductArguments.operands`, or "epilogue_args" with `index`.
    `modes` are the modes the tensor has, in its own order, as `EntryLayout.operand_modes` says; `expand` is
    the shape that it must be expanded to first, None for as it is.
    """

    source: str
    modes: str
    index: int = 0
    expand: tuple[int, ...] | None = None


@frozen
class GemmCall:
    """A checked call: D (`d_shape`, `d_dtype`) = epilogue(A @ B, operands). `ab_dtype` is A's, and B's
    except for fp8 operands, whose formats may be mixed. `promotion`: how partial sums of fp8 products are
    added; where it has scales, the first two operands are those of a and b, with `BLOCK_SCALE` for modes.
    `groups`: None, or of how many groups of rows a and D consist, each with a matrix of b; the operand before
    all others says where they end, with `GROUP_ENDS` for modes. `batch_invariant`: the order of an element's
    sum depends on neither M, the batch nor any alignment. `gated`: D has N / 2 columns, one for two
    neighbours of the product. `reduction`: D is reduced too, to float32 numbers, whose place is the
    last operand."""

    m: int
    n: int
    k: int
    batch: int | None
    ab_dtype: torch.dtype
    d_dtype: torch.dtype
    epilogue: Any
    operands: tuple[OperandSpec, ...]
    promotion: Promotion | None = None
    groups: int | None = None
    batch_invariant: bool = False
    gated: bool = False
    reduction: CallReduction | None = None

    @property
    def not_epilogue(self) -> int:
        """The number of operands, the first ones, that are not the epilogue's but the main loop's."""
        scales = 2 if self.promotion is not None and self.promotion.scaled else 0
        return scales + (self.groups is not None)

    @property
    def d_shape(self) -> tuple[int, ...]:
        """(M, N), or (L, M, N) where a or b has a batch mode."""
        columns = self.n // 2 if self.gated else self.n
        return (self.m, columns) if self.batch is None else (self.batch, self.m, columns)


def check_dtype(name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype] = INPUT_DTYPES) -> None:
    """TypeError for a dtype that is not `allowed`."""
    if dtype not in allowed:
        raise TypeError(f"{name} has dtype {dtype}, must be one of {', '.join(str(x) for x in allowed)}")


def check_device(name: str, value: torch.Tensor, device: torch.device) -> None:
    """ValueError for a tensor elsewhere than a."""
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, must be on a's device, {device}")


def check_matrices(
    a: torch.Tensor, b: torch.Tensor, allowed: Sequence[torch.dtype] = INPUT_DTYPES, mixed: bool = False
) -> None:
    """Check that a (M, K) or (L, M, K) and b can be multiplied; `mixed`: their dtypes may differ."""
    for name, value in (("a", a), ("b", b)):
        check_tensor(name, value)
        check_dtype(name, value.dtype, allowed)
        if value.dim() not in (2, 3):
            modes = "(M, K) or (L, M, K)" if name == "a" else "(K, N) or (L, K, N)"
            raise ValueError(f"{name} has shape {tuple(value.shape)}, must be {modes}")
    if a.dtype != b.dtype and not mixed:
        raise TypeError(f"b has dtype {b.dtype}, must be a's dtype, {a.dtype}")
    check_device("b", b, a.device)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"b has shape {tuple(b.shape)}, must have {a.shape[-1]} rows: a has shape {tuple(a.shape)}"
        )


def check_extents(m: int, n: int, k: int) -> None:
    """ValueError where an extent is beyond what a kernel's 32-bit coordinates reach."""
    for name, extent in (("M", m), ("N", n), ("K", k)):
        if extent > MAX_EXTENT:
            raise ValueError(f"{name} is {extent}, must be at most {MAX_EXTENT}")


def batch_of(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """The batch of the product, None where neither has one; ValueError where they do not go together."""
    if a.dim() == 2 and b.dim() == 2:
        return None
    sizes = [x.shape[0] for x in (a, b) if x.dim() == 3]
    if len(sizes) == 1 or sizes[0] == sizes[1]:
        return sizes[0]
    if sizes[0] == 1:
        return sizes[1]
    if sizes[1] == 1:
        return sizes[0]
    raise ValueError(f"b has batch {sizes[1]}, must be a's batch, {sizes[0]}, or 1 (or a's must be 1)")


def _broadcast_spec(
    source: str, index: int, value: torch.Tensor, d_shape: tuple[int, ...], label: str
) -> OperandSpec:
    """The spec of a tensor that broadcasts to D by PyTorch's rules."""
    shape = tuple(value.shape)
    if len(shape) > len(d_shape) or any(
        size != 1 and size != full for size, full in zip(shape[::-1], d_shape[::-1])
    ):
        raise ValueError(f"{label} has shape {shape}, must broadcast to the result's shape {d_shape}")
    if len(shape) == 0:
        return OperandSpec(source, "n", index, expand=(d_shape[-1],))
    full = tuple(d_shape[len(d_shape) - len(shape) :])
    modes = "lmn"[3 - len(shape) :]
    return OperandSpec(source, modes, index, expand=None if shape == full else full)


def _bias_spec(bias: torch.Tensor, bias_axis: str, m: int, n: int) -> OperandSpec:
    extent = n if bias_axis == "n" else m
    if bias.dim() != 1 or bias.shape[0] != extent:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, must be ({extent},) with bias_axis={bias_axis!r}"
        )
    return OperandSpec("bias", bias_axis)


def _check_operand(label: str, value: torch.Tensor, device: torch.device) -> None:
    check_tensor(label, value)
    check_dtype(label, value.dtype)
    check_device(label, value, device)


def _linear_operands(
    d_shape: tuple[int, ...], device: torch.device, arguments: Mapping[str, Any]
) -> tuple[LinearEpilogue, tuple[OperandSpec, ...]]:
    """The ready-made epilogue with the operands in the order that `LinearEpilogue` documents."""
    c, bias, residual = (arguments.get(name) for name in ("c", "bias", "residual"))
    specs: list[OperandSpec] = []
    if arguments.get("alpha", 1.0) != 1.0:
        specs.append(OperandSpec("alpha", ""))
    if c is not None:
        _check_operand("c", c, device)
        spec = _broadcast_spec("c", 0, c, d_shape, "c")
        if arguments.get("beta", 1.0) != 0.0:
            specs += [OperandSpec("beta", ""), spec]
    if bias is not None:
        _check_operand("bias", bias, device)
        specs.append(_bias_spec(bias, arguments.get("bias_axis", "n"), d_shape[-2], d_shape[-1]))
    if residual is not None:
        _check_operand("residual", residual, device)
        specs.append(_broadcast_spec("residual", 0, residual, d_shape, "residual"))
    sources = {spec.source for spec in specs}
    epilogue = LinearEpilogue(
        alpha="alpha" in sources,
        beta="beta" in sources,
        bias="bias" in sources,
        residual="residual" in sources,
        activation=arguments.get("activation"),
    )
    return epilogue, tuple(specs)


def _custom_operands(
    d_shape: tuple[int, ...], device: torch.device, epilogue_args: Sequence[Any]
) -> tuple[OperandSpec, ...]:
    """Operands of a user's own epilogue: tensors that broadcast to D, and Python numbers."""
    specs = []
    for index, value in enumerate(epilogue_args):
        label = f"epilogue_args[{index}]"
        if isinstance(value, (int, float)):
            options.number(label, float(value) if isinstance(value, bool) else value)
            specs.append(OperandSpec("epilogue_args", "", index))
        else:
            _check_operand(label, value, device)
            specs.append(_broadcast_spec("epilogue_args", index, value, d_shape, label))
    return tuple(specs)


def check_out(out: torch.Tensor, call: GemmCall, device: torch.device) -> None:
    """TypeError or ValueError where `out` cannot take the result of `call`."""
    check_output("out", out)
    check_device("out", out, device)
    if tuple(out.shape) != call.d_shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, must be {call.d_shape}")
    if out.dtype != call.d_dtype:
        raise TypeError(f"out has dtype {out.dtype}, must be {call.d_dtype}")


def result_dtype(
    out: Any, out_dtype: Any, default: torch.dtype, allowed: Sequence[torch.dtype] = INPUT_DTYPES
) -> torch.dtype:
    """The result's dtype: what is asked for, else that of `out`, else the default. TypeError where it is not
    `allowed`."""
    if out is not None:
        check_output("out", out)
    if options.instance("out_dtype", out_dtype, torch.dtype, type(None)) is None:
        out_dtype = default if out is None else out.dtype
        check_dtype("out_dtype" if out is None else "out", out_dtype, allowed)
    check_dtype("out_dtype", out_dtype, allowed)
    return out_dtype


def describe_epilogue(
    d_shape: tuple[int, ...], device: torch.device, arguments: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[OperandSpec, ...]]:
    """The epilogue function of a product of shape `d_shape` and its operands; the errors of `describe`.

    `arguments`: those of the call by name, as of `GemmArguments`; those that are missing have its defaults.
    """
    product_options.check(arguments)
    epilogue, epilogue_args = arguments.get("epilogue"), arguments.get("epilogue_args", ())
    if epilogue is None:
        if epilogue_args:
            raise ValueError(
                f"epilogue_args has {len(epilogue_args)} entries, must be empty without epilogue"
            )
        return _linear_operands(d_shape, device, arguments)
    others = ("c", "bias", "residual", "activation")
    beside = [name for name in others if arguments.get(name) is not None]
    beside += ["alpha"] * (arguments.get("alpha", 1.0) != 1.0)
    if beside:
        raise ValueError(f"{beside[0]} is given beside epilogue, must not be: let the epilogue do it")
    operands = _custom_operands(d_shape, device, epilogue_args)
    from kernels_dsl.ops.epilogues import resolve_epilogue  # here, since most calls have none of their own

    return resolve_epilogue(epilogue, len(operands)), operands


def extents_of(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    """(M, N, K) of factors that fit. ValueError where an extent is beyond what kernels reach."""
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    check_extents(m, n, k)
    return m, n, k


def describe(call: GemmArguments) -> GemmCall:
    """Check the arguments of `gemm` and say what they ask for. TypeError or ValueError says what is wrong."""
    a, b, out = call.a, call.b, call.out
    check_matrices(a, b)
    m, n, k = extents_of(a, b)
    batch = batch_of(a, b)
    d_shape = (m, n) if batch is None else (batch, m, n)
    function, operands = describe_epilogue(d_shape, a.device, vars(call))
    d_dtype = result_dtype(out, call.out_dtype, a.dtype)
    found = GemmCall(
        m, n, k, batch, a.dtype, d_dtype, function, operands, batch_invariant=call.batch_invariant
    )
    if out is not None:
        check_out(out, found, a.device)
    return found
