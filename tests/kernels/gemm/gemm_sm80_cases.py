"""Cases of the SM80-class GEMM and how one is run and checked, on a GPU or in the emulator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import cutlass
import cutlass.cute as cute
import torch

import lowering
from kernels_dsl.blocks.epilogue.functions import LinearEpilogue, identity
from kernels_dsl.config.gemm import Sm80GemmConfig
from kernels_dsl.kernels.gemm.entry_views import Views
from kernels_dsl.kernels.gemm.sm80 import gemm_sm80
from kernels_dsl.kernels.gemm.splitk_reduce import splitk_reduce
from lowering.signature import tensor_class
from reference import buffers, inputs, tolerance
from reference.gemm import gemm as reference_gemm
from reference.gemm import gemm_same_dtype

SMALL = Sm80GemmConfig(64, 64, 32, 3, 2, 2)
"""The tile that most cases use: enough warps to get every partition wrong, few steps to compute."""


@lowering.jit
def GEMM(
    mA: cute.Tensor,
    mB: cute.Tensor,
    mD: cute.Tensor,
    operands: tuple,
    stream,
    config: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
):
    """The kernel on tensors in its own orientation."""
    columns = mD.shape[1]
    views = Views(a=mA, b=mB, d=mD, operands=operands, scales=None, promotion=None, columns=columns)
    gemm_sm80(views, stream, config, epilogue)


@lowering.jit
def REDUCE(
    mW: cute.Tensor,
    mD: cute.Tensor,
    operands: tuple,
    stream,
    split_k: cutlass.Constexpr,
    epilogue: cutlass.Constexpr,
):
    """The second kernel of split-K, on tensors in its own orientation."""
    splitk_reduce(mW, mD, operands, stream, split_k, epilogue)


@dataclass(frozen=True)
class Case:
    """One GEMM.

    `a_pad`, `b_pad`, `d_pad` are elements of gap behind rows, `*_offset` elements by which the tensor's start
    is shifted: both decide the alignment. `strided`: no mode of A or B is contiguous. `a_batched` and
    `b_batched` False broadcast.
    """

    m: int
    n: int
    k: int
    l: int = 1
    dtype: torch.dtype = torch.bfloat16
    d_dtype: torch.dtype = torch.bfloat16
    a_k_major: bool = True
    b_k_major: bool = True
    d_n_major: bool = True
    a_pad: int = 0
    b_pad: int = 0
    d_pad: int = 0
    a_offset: int = 0
    b_offset: int = 0
    d_offset: int = 0
    strided: bool = False
    a_batched: bool = True
    b_batched: bool = True
    epilogue: LinearEpilogue | None = None
    bias_mode: str = "n"
    config: Sm80GemmConfig = field(default=SMALL)

    def __str__(self) -> str:
        kinds = "".join("kr"[major] for major in (not self.a_k_major, not self.b_k_major))
        align = (
            "s" * self.strided
            + f"p{self.a_pad}.{self.b_pad}.{self.d_pad}o{self.a_offset}.{self.b_offset}.{self.d_offset}"
        )
        names = f"{self.dtype}-{self.d_dtype}".replace("torch.", "")
        tile = f"{self.config.tile_m}x{self.config.tile_n}x{self.config.tile_k}s{self.config.split_k}"
        activation = self.epilogue.activation if self.epilogue else None
        flags = "".join(
            letter
            for letter in ("alpha", "beta", "bias", "residual")
            if self.epilogue and getattr(self.epilogue, letter)
        )
        return f"{self.m}x{self.n}x{self.k}x{self.l}-{names}-{kinds}-{align}-{tile}-{flags}{activation}"


def kernel_view(batched: torch.Tensor) -> torch.Tensor:
    """(L, X, Y) as the kernel's (X, Y, L)."""
    return batched.permute(1, 2, 0)


def _operand(case: Case, name: str, values: torch.Tensor) -> torch.Tensor:
    """The operand (L, MN, K) surrounded by NaN, in the case's layout, broadcast over L where it says so."""
    k_major, pad, offset = (getattr(case, f"{name}_{what}") for what in ("k_major", "pad", "offset"))
    embedded = buffers.embed(values, contiguous=-1 if k_major else -2, pad=pad, offset=offset)
    if case.strided:
        # Every other element of rows and columns of something four times as large.
        large = torch.full((values.shape[0], 2 * values.shape[1], 2 * values.shape[2]), float("nan"))
        embedded = large.to(values.device, values.dtype)[:, ::2, ::2].copy_(values)
    return embedded.expand(case.l, -1, -1)


def copy_bytes(tensor: torch.Tensor) -> int:
    """The alignment class that the kernel may use for an operand (MN, K, L)."""
    found = tensor_class("operand", tensor)
    return found.align if 1 in found.strides[:2] else tensor.element_size()


@dataclass(frozen=True)
class Operands:
    """The epilogue's operands, as the kernel and as the reference take them."""

    kernel: tuple
    reference: dict


def _epilogue_operands(case: Case, make, device: str) -> Operands:
    """Operands for the case's epilogue; `make(shape, number)` makes values."""
    shape = (case.l, case.m, case.n)
    kernel: list = []
    reference: dict = {}
    epilogue = case.epilogue
    if epilogue is None:
        return Operands((), {})
    if epilogue.alpha:
        kernel.append(0.5)
        reference["alpha"] = 0.5
    if epilogue.beta:
        reference["c"] = buffers.embed(make(shape, 3), offset=case.d_offset, pad=case.d_pad)
        reference["beta"] = 2.0
        kernel += [2.0, kernel_view(reference["c"])]
    if epilogue.bias:
        bias = buffers.embed(make((1, 1, case.n) if case.bias_mode == "n" else (1, case.m, 1), 4))
        strides = (0, 0, 1) if case.bias_mode == "n" else (0, 1, 0)
        reference["bias"] = bias.as_strided(shape, strides)
        kernel.append(kernel_view(reference["bias"]))
    if epilogue.residual:
        reference["residual"] = buffers.embed(make(shape, 5), offset=case.d_offset, pad=case.d_pad)
        kernel.append(kernel_view(reference["residual"]))
    reference["activation"] = epilogue.activation
    return Operands(tuple(kernel), reference)


def launch(case: Case, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, operands: tuple) -> None:
    """Run the case on (L, M, K), (L, N, K), (L, M, N)."""
    mA, mB, mD = kernel_view(a), kernel_view(b), kernel_view(d)
    config = replace(case.config, copy_bytes_a=copy_bytes(mA), copy_bytes_b=copy_bytes(mB))
    epilogue = case.epilogue or identity
    if config.split_k == 1:
        GEMM(mA, mB, mD, operands, config=config, epilogue=epilogue)
        return
    shape = (case.l * config.split_k, case.m, case.n)
    work = buffers.poisoned(shape, torch.float32, device=d.device)
    mW = kernel_view(work.tensor)
    GEMM(mA, mB, mW, (), config=config, epilogue=identity)
    REDUCE(mW, mD, operands, split_k=config.split_k, epilogue=epilogue)
    buffers.check_output(work)


def run(case: Case, *, device: str, exact: bool) -> None:
    """Run a case and check it: every element of D written and nothing else, and its values.

    exact: small integers, compared bit for bit; else normal values by the tolerance rule.
    """
    seed = inputs.case_seed(str(case))

    def make(shape, number: int) -> torch.Tensor:
        source = inputs.integers if exact else inputs.normal
        dtype = case.d_dtype if number > 2 else case.dtype
        return source(shape, dtype, seed=seed + number, device=device)

    a = _operand(case, "a", make((case.l if case.a_batched else 1, case.m, case.k), 1))
    b = _operand(case, "b", make((case.l if case.b_batched else 1, case.n, case.k), 2))
    operands = _epilogue_operands(case, make, device)
    output = buffers.poisoned(
        (case.l, case.m, case.n),
        case.d_dtype,
        device=device,
        contiguous=-1 if case.d_n_major else -2,
        pad=case.d_pad,
        offset=case.d_offset,
    )
    launch(case, a, b, output.tensor, operands.kernel)
    if device == "cuda":
        torch.cuda.synchronize()
    buffers.check_output(output)
    expected = reference_gemm(a, b.mT, **operands.reference)
    if exact:
        tolerance.check_exact(output.tensor, expected, case=str(case))
    else:
        peer = gemm_same_dtype(a, b.mT, out_dtype=case.d_dtype, **operands.reference)
        tolerance.check(output.tensor, expected, peer, case=str(case))


def _alignments() -> list[Case]:
    """Every alignment class of each operand, by padding and by shifting the start."""
    cases = []
    for k_major in (True, False):
        for pad, offset in ((0, 0), (4, 0), (2, 0), (1, 0), (0, 4), (0, 2), (0, 1)):
            # 72 and 40 are multiples of 8: the padding alone decides.
            cases.append(Case(72, 72, 40, a_k_major=k_major, a_pad=pad, a_offset=offset))
            cases.append(Case(72, 72, 40, b_k_major=k_major, b_pad=pad, b_offset=offset))
        for pad, offset in ((2, 0), (1, 0), (0, 1)):
            dtypes = {"dtype": torch.float32, "d_dtype": torch.float32}
            cases.append(
                Case(40, 72, 36, a_k_major=k_major, b_k_major=k_major, a_pad=pad, b_offset=offset, **dtypes)
            )
    for pad, offset in ((4, 0), (2, 0), (1, 0), (0, 2), (0, 1)):
        cases.append(Case(70, 72, 40, d_pad=pad, d_offset=offset))
        cases.append(Case(70, 72, 40, d_pad=pad, d_offset=offset, d_dtype=torch.float32))
    cases.append(Case(70, 50, 40, d_n_major=False))
    cases.append(Case(70, 50, 40, strided=True))
    cases.append(Case(70, 50, 40, strided=True, dtype=torch.float32))
    # Rows that are aligned but not a whole number of vectors long.
    cases.append(Case(70, 67, 45, a_pad=3, b_pad=3, d_pad=5))
    cases.append(Case(69, 67, 45, a_k_major=False, b_k_major=False, a_pad=3, b_pad=5))
    return cases


def _shapes() -> list[Case]:
    """Ragged in every mode, single elements, K of 0, and K tiles from none to more than the stages."""
    shapes = [(1, 1, 1), (1, 64, 64), (65, 1, 33), (64, 64, 1), (3, 130, 96), (128, 128, 160), (97, 61, 0)]
    shapes += [(64, 64, k) for k in (31, 32, 33, 64, 95, 224)]
    shapes += [(200, 90, 70)]
    return [
        Case(*shape, a_k_major=a, b_k_major=b) for shape in shapes for a, b in ((True, True), (False, False))
    ]


def _dtypes() -> list[Case]:
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    cases = []
    for dtype, d_dtype in ((bf16, f32), (f16, f16), (f16, bf16), (f32, f32), (f32, bf16), (bf16, f16)):
        for a, b in ((True, True), (True, False), (False, True), (False, False)):
            cases.append(Case(80, 72, 56, dtype=dtype, d_dtype=d_dtype, a_k_major=a, b_k_major=b))
    return cases


def _epilogues() -> list[Case]:
    cases = []
    for activation in (None, "relu", "gelu", "gelu_tanh", "silu"):
        cases.append(Case(70, 90, 40, epilogue=LinearEpilogue(bias=True, activation=activation)))
    everything = LinearEpilogue(alpha=True, beta=True, bias=True, residual=True, activation="relu")
    for bias_mode in ("n", "m"):
        cases.append(Case(70, 88, 40, l=2, epilogue=everything, bias_mode=bias_mode))
        cases.append(Case(70, 91, 40, l=2, epilogue=everything, bias_mode=bias_mode, d_dtype=torch.float32))
        cases.append(Case(70, 91, 0, epilogue=everything, bias_mode=bias_mode))
    return cases


def _batches() -> list[Case]:
    return [
        Case(70, 40, 50, l=3),
        Case(70, 40, 50, l=3, a_batched=False),
        Case(70, 40, 50, l=3, b_batched=False, b_k_major=False),
    ]


def _splits() -> list[Case]:
    everything = LinearEpilogue(alpha=True, beta=True, bias=True, residual=True, activation="relu")
    cases = []
    for split, k in ((2, 130), (3, 96), (4, 64), (5, 300)):
        config = replace(SMALL, split_k=split)
        cases.append(Case(40, 72, k, l=2, config=config))
        cases.append(Case(40, 71, k, epilogue=everything, config=config))
    return cases


def _tiles() -> list[Case]:
    """Other tiles and warp grids than the small one, among them all that are shipped."""
    from kernels_dsl.config.gemm_table import SM80_CANDIDATES

    cases = []
    for candidate in SM80_CANDIDATES:
        config = candidate.config
        # Multiples of 8: wide tiles are for wide loads.
        m, n, k = config.tile_m + 8, config.tile_n + 24, 3 * config.tile_k + 8
        for a, b in ((True, True), (False, False)):
            cases.append(Case(m, n, k, a_k_major=a, b_k_major=b, config=config))
        half = replace(config, tile_k=config.tile_k // 2)
        cases.append(Case(m, n, k, dtype=torch.float32, d_dtype=torch.float32, config=half))
    return cases


EXACT = _alignments() + _shapes() + _dtypes() + _batches() + _splits() + _tiles()
EXACT += [c for c in _epilogues() if c.epilogue and c.epilogue.activation in (None, "relu")]
NORMAL = _epilogues() + _dtypes() + _tiles()
