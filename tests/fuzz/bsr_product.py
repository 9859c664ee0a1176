"""Cases of `bsr_gemm` and `bsr_scaled_gemm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels_dsl.config.bsr import Sm90BsrConfig
from kernels_dsl.ops.bsr.product import BSR_GEMM
from kernels_dsl.ops.bsr.scaled_product import BSR_SCALED_GEMM
from reference import inputs, tolerance
from reference.bsr import Bsr, to_dense
from reference.gemm import activation_function, tensor_core_sums
from tests.fuzz.bsr_matrix import FORMS, Matrix, draw_matrix, unread_columns, unread_rows
from tests.fuzz.case import Call, Mode, Settings, described
from tests.fuzz.draw import Draw
from tests.fuzz.epilogues import clamped
from tests.fuzz.memory import Arena, Layout
from tests.fuzz.planted import Operations
from tests.fuzz.values import filler

FAMILIES = ("sm90", "sm80")
EXTENTS = (1, 2, 7, 8, 16, 40, 64, 65, 128, 129, 200, 264, 520, 1000)
SMALL_EXTENTS = (1, 7, 16, 40, 64, 72, 129)
_FAR_EVERY = 150
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = ("a", "b", "scale_a", "scale_b", "c", "bias", "bias_axis", "residual", "alpha", "beta", "activation",
         "epilogue", "epilogue_args", "out", "out_dtype", "family", "config", "check", "values",
         "block")  # fmt: skip


@dataclass(frozen=True)
class ProductCase:
    """One product. `x`: extent of the dense mode. `batch`: the sparse and the dense factor have one.
    `dtypes`: of the sparse and the dense factor. `scaled`: fp8 with scales. `extras`: names of the epilogue's
    tensors. `uncut`: the configuration is forced to be the chosen one without pieces."""

    draw: Draw = field(repr=False)
    matrix: Matrix
    form: str
    x: int
    batch: tuple[bool, bool]
    dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype
    dense: Layout
    out: Layout | None
    extras: tuple[str, ...]
    activation: str | None
    own_epilogue: bool
    family: str | None
    uncut: bool
    check: bool
    from_torch: bool
    scale_a_row: bool
    exact: bool
    mode: Mode

    def __str__(self) -> str:
        return described(self)

    @property
    def scaled(self) -> bool:
        """fp8 factors."""
        return self.dtypes[0].itemsize == 1

    @property
    def left(self) -> bool:
        """The dense factor is the left one."""
        return self.form.startswith("b")

    @property
    def transposed(self) -> bool:
        """The sparse factor is used transposed."""
        return self.form.endswith("t") or self.form.startswith("at")

    @property
    def features(self) -> tuple[str, ...]:
        """For coverage."""
        name = "bsr_scaled_gemm" if self.scaled else "bsr_gemm"
        names = [name, f"mode {self.mode.value}", f"form {self.form}", f"{name} {self.family or 'chosen'}"]
        names += [f"pattern {self.matrix.pattern}", f"block {self.matrix.block[0]}x{self.matrix.block[1]}"]
        names += ["BsrTensor.from_torch"] if self.from_torch else []
        names += ["uncut"] if self.uncut else []
        names += ["beyond 2^31 elements"] if self.dense.gap > 1 << 20 else []
        return tuple(names)

    def build(self, arena: Arena, settings: Settings) -> Call:
        """The call on tensors in `arena`."""
        seeds, device = Draw("bsr values", self.draw.number, self.draw.settings), settings.device
        lead = [(2,) if has else () for has in self.batch]
        sparse = self.matrix.lay_out(arena, self.dtypes[0], lead[0], seeds.value_seed(), self.exact)
        inner = self.matrix.shape[0 if self.transposed != self.left else 1]
        unread = (unread_rows if self.transposed != self.left else unread_columns)(sparse)
        panel = filler((*lead[1], self.x, inner), self.dtypes[1], seeds.value_seed(), device, self.exact)
        if len(self.dense.order) - 1 in self.dense.expanded:
            unread = torch.zeros_like(unread)  # all of K has one value, which some block reads
        dense = arena.input("dense", _with_nan(panel, unread), self.dense)
        dense = dense if self.left else dense.mT
        rows, columns = self.matrix.shape[::-1] if self.transposed else self.matrix.shape
        shape: tuple[int, ...] = (self.x, columns) if self.left else (rows, self.x)
        shape = ((2,) if any(self.batch) else ()) + shape
        scales = self._scales(arena, sparse, lead[1], seeds) if self.scaled else ()
        options = self._options(arena, shape, seeds, device)
        out = None if self.out is None else arena.output("out", shape, self.out_dtype, self.out)
        forced: dict[str, Any] = {"out": out, "family": self.family, "check": self.check}
        forced.update({} if out is not None else {"out_dtype": self.out_dtype})
        used = sparse.t() if self.transposed else sparse
        given: Any = sparse.to_torch() if self.from_torch else used
        factors = (dense, given) if self.left else (given, dense)
        pair = scales[::-1] if self.left else scales
        chosen = self._chosen(used, dense, scales, forced, options)
        operations = Operations(settings)
        if self.scaled:
            call, supports = operations.bsr_scaled_gemm, operations.bsr_scaled_supports
        else:
            call, supports = operations.bsr_gemm, operations.bsr_supports
        return Call(
            run=lambda: (call(*factors, *pair, **options, **forced),),
            check=lambda results: self._check(results[0], sparse, dense, scales, options, unread),
            arguments=NAMES,
            supports=lambda: supports(*factors, *pair, **options, **forced),
            may_refuse=self.uncut or self.family is not None,
            must_refuse="blocks" if self._too_narrow else None,
            chosen=chosen,
        )

    @property
    def _too_narrow(self) -> bool:
        """True where blocks of fp8 are no multiple of 32 along the summed mode, which only Hopper's take."""
        summed = self.matrix.block[0 if self.transposed != self.left else 1]
        return self.scaled and summed % 32 != 0 and (self.family == "sm80" or self.draw.arch() != "sm_90a")

    def _chosen(
        self, used: Any, dense: Any, scales: tuple, forced: dict[str, Any], options: dict[str, Any]
    ) -> tuple[str, ...]:
        """Features of the configuration that the call gets; it is forced without pieces if that was drawn."""
        operation: Any = BSR_SCALED_GEMM if scales else BSR_GEMM
        more = {**options, **dict(zip(("scales", "dense_scale"), scales))}
        if "out_dtype" in forced:
            more["out_dtype"] = forced["out_dtype"]
        try:
            plan = operation.new_plan(
                operation.call_of(
                    sparse=used, dense=dense, dense_left=self.left, out=forced["out"], family=self.family,
                    **more,
                )
            )  # fmt: skip
        except (TypeError, ValueError):
            return ()
        if not isinstance(plan.config, Sm90BsrConfig):
            return ()
        if self.uncut:
            forced["config"] = replace(plan.config, split=False)
        names = ["list in pieces"] if plan.config.split and not self.uncut else []
        return tuple(names + (["pairs of block rows"] if plan.config.pairs else []))

    def _options(self, arena: Arena, shape: tuple[int, ...], seeds: Draw, device: str) -> dict[str, Any]:
        if self.own_epilogue:
            return {"epilogue": clamped}
        options: dict[str, Any] = {}
        for name in self.extras:
            extent = (shape[-1],) if name == "bias" else shape
            fill = filler(extent, self.out_dtype, seeds.value_seed(), device, self.exact)
            options[name] = arena.input(name, fill)
        options.update({"beta": 2.0} if "c" in options else {})
        options.update({"activation": self.activation} if self.activation else {})
        return options

    def _scales(self, arena: Arena, sparse: Any, lead: tuple[int, ...], seeds: Draw) -> tuple:
        """(of the kept blocks, of the dense factor): powers of two, so that products stay exact."""

        def fill(shape: tuple[int, ...], seed: int) -> Callable[[int], torch.Tensor]:
            return lambda generation: torch.exp2(
                inputs.integers(shape, torch.float32, seed=seed + generation, limit=2, zeros=0.2)
            )

        shape = (*sparse.values.shape[:-2], 1, 1) if self.check else tuple(sparse.values.shape[:-2])
        blocks = arena.input("scales of blocks", fill(shape, seeds.value_seed()))
        other_shape = (*lead, self.x, 1) if self.scale_a_row else ()
        other = arena.input("scale of the dense factor", fill(other_shape, seeds.value_seed()))
        return blocks, (other if self.left or not self.scale_a_row else other.mT)

    def _check(
        self,
        result: torch.Tensor,
        sparse: Any,
        dense: torch.Tensor,
        scales: tuple,
        options: dict,
        unread: torch.Tensor,
    ) -> None:
        values = sparse.values.double()
        if scales:
            blocks = scales[0].double()
            values = values * (blocks if blocks.dim() == values.dim() else blocks[..., None, None])
        whole = to_dense(Bsr(sparse.crow_indices, sparse.col_indices, values, sparse.shape))
        whole = whole.mT if self.transposed else whole
        mask = unread.to(dense.device)
        panel = dense.resolve_neg().double().masked_fill(mask if self.left else mask[:, None], 0.0)
        panel = panel * scales[1].double() if scales else panel
        factors = (panel, whole) if self.left else (whole, panel)
        exact = self._finish(factors[0] @ factors[1], options)
        assert result.dtype == self.out_dtype
        if self.exact:
            tolerance.check_exact(result, exact)
        else:
            like = self._finish(tensor_core_sums(*factors), options)
            tolerance.check(result, exact, like.to(self.out_dtype))

    def _finish(self, product: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        dtype = product.dtype
        if self.own_epilogue:
            return product.clamp(-2.0, 2.0)
        if "c" in options:
            product = product + options["beta"] * options["c"].to(dtype)
        if "bias" in options:
            product = product + options["bias"].to(dtype)
        product = activation_function(self.activation)(product)
        return product + options["residual"].to(dtype) if "residual" in options else product


def _with_nan(panel: Callable[[int], torch.Tensor], unread: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """The panel (…, x, K) with NaN where nothing may be read."""

    def fill(generation: int) -> torch.Tensor:
        values = panel(generation)
        nan = torch.full((), torch.nan, device=values.device)
        return torch.where(unread.to(values.device), nan, values.float()).to(values.dtype)

    return fill


def draw_product(draw: Draw) -> ProductCase:
    """A case of `bsr_gemm` or `bsr_scaled_gemm`."""
    pick, data, small = draw.kernel, draw.data, draw.settings.small
    scaled = pick.random() < 0.3
    dtype = pick.choice((torch.bfloat16, torch.float16))
    dtypes = (pick.choice((E4M3, E5M2)), pick.choice((E4M3, E5M2))) if scaled else (dtype, dtype)
    batch = draw.often((False, False), (True, True), (True, False), (False, True))
    out_dtype = draw.often(torch.bfloat16 if scaled else dtype, torch.float32, torch.float16, torch.bfloat16)
    own = pick.random() < 0.06
    extras = tuple(x for x in ("c", "bias", "residual") if pick.random() < 0.25)
    activation = pick.choice((None, None, "relu") if scaled else (None, None, "relu", "gelu"))
    form = pick.choice(FORMS)
    layout = draw.layout(3 if batch[1] else 2, negate=not scaled)
    out = draw.layout(3 if any(batch) else 2, negate=False, expand=False) if pick.random() < 0.7 else None
    family, uncut = draw.family_of_kernels(), pick.random() < 0.1
    from_torch = pick.random() < 0.1 and not scaled and not batch[0] and form in ("a b", "b a")
    matrix = draw_matrix(draw)
    x = draw.extent(SMALL_EXTENTS if small else EXTENTS, draw.often(1, 8, 16, odds=0.5))
    if not small and data.random() < 0.02:
        x = 4096
    check, wide = pick.random() < 0.1, pick.random() < 0.03
    if draw.settings.device == "cuda" and wide and not scaled and not own:
        # So many tiles of small blocks that block rows may go in pairs, which of blocks of 64 they do where
        # the dense factor's K is strided, of smaller ones where it is contiguous.
        block = pick.choice((64, 64, 32, 48))
        grid = (data.choice((50, 63)), data.choice((50, 61)))
        matrix = replace(matrix, block=(block, block), grid=grid, kept=data.randint(2, 6), pattern="uniform")
        x, batch, from_torch, out = 8192, (False, False), False, None
        layout, form = Layout((1, 0) if block == 64 else (0, 1)), pick.choice(FORMS)
        family, uncut = None, False
    if draw.settings.device == "cuda" and draw.block % _FAR_EVERY == 7:
        # Rows so far apart that the last one lies past 2³¹ elements.
        x = data.randint(3, 5)
        layout, out = Layout((0, 1), gap=(1 << 31) // (x - 1) // 64 * 64), None
        batch, check = (False, False), False
    return ProductCase(
        draw, matrix, form, x, batch, dtypes, out_dtype, dense=layout, out=out, extras=() if own else extras,
        activation=None if own else activation, own_epilogue=own, family=family, uncut=uncut,
        check=check and not matrix.twice, from_torch=from_torch, scale_a_row=pick.random() < 0.5,
        exact=scaled or (data.random() < 0.5 and activation != "gelu"),
        mode=draw.mode(graph=not (from_torch or check)),
    )  # fmt: skip
