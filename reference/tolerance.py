"""The tolerance rule: a kernel may be twice as far from float64 as PyTorch in the same dtype is.

Checked tile by tile, so that a few wrong tiles cannot hide in an average. For each tile

    max |actual - reference|  <=  2 · max |peer - reference|  +  ulps · ulp(max |reference|)

where `reference` is float64, `peer` is what PyTorch computes from the same inputs in the kernel's dtype
(`reference.gemm.gemm_same_dtype`; float32 inputs rounded to tf32, as the kernels do), and the last term is
the floor for tiles in which the peer happens to be exact. A tile with few elements has too few peer errors
to know their maximum, so there the maximum over the whole output stands in. Over the whole output the root
mean square is held to the same factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FEW = 256  # elements below which a tile's own peer maximum says little
_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


class ToleranceError(AssertionError):
    """The error is over the bound; the message has the worst coordinate and the bad tiles."""


@dataclass(frozen=True)
class Report:
    """Result of `measure`. `worst` is the coordinate with the largest error in relation to its bound."""

    worst: tuple[int, ...] = ()
    actual: float = 0.0
    expected: float = 0.0
    error: float = 0.0
    peer_error: float = 0.0
    bound: float = 0.0
    bad_tiles: int = 0
    tiles: int = 0
    rms: float = 0.0
    peer_rms: float = 0.0
    rms_bound: float = 0.0

    @property
    def ok(self) -> bool:
        return self.bad_tiles == 0 and self.rms <= self.rms_bound

    def __str__(self) -> str:
        return (
            f"{self.bad_tiles} of {self.tiles} tiles over the bound; worst at {self.worst}: {self.actual!r}, "
            f"reference {self.expected!r}, error {self.error:.4g}, bound {self.bound:.4g} "
            f"(PyTorch's error in that tile {self.peer_error:.4g}); rms {self.rms:.4g}, "
            f"PyTorch's {self.peer_rms:.4g}, bound {self.rms_bound:.4g}"
        )


def _tile_max(values: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """(L, M, N) -> (L, ceil(M / tile m), ceil(N / tile n)): the maximum of each tile. Values are >= 0."""
    bm, bn = tile
    _, m, n = values.shape
    padded = torch.nn.functional.pad(values, (0, -n % bn, 0, -m % bm))
    return padded.unflatten(2, (-1, bn)).unflatten(1, (-1, bm)).amax(dim=(2, 4))


def _tile_counts(shape: tuple[int, int], tile: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Elements in each tile, (ceil(M / tile m), ceil(N / tile n))."""
    (m, n), (bm, bn) = shape, tile
    rows = (m - torch.arange(0, m, bm, device=device)).clamp(max=bm)
    columns = (n - torch.arange(0, n, bn, device=device)).clamp(max=bn)
    return rows[:, None] * columns[None, :]


def _ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at `magnitude`, down to its subnormal step."""
    smallest = torch.finfo(dtype).tiny
    exponent = torch.floor(torch.log2(magnitude.clamp(min=smallest)))
    return torch.exp2(exponent - _MANTISSA_BITS[dtype])


def _as_matrices(tensor: torch.Tensor) -> torch.Tensor:
    """(…, M, N) -> (L, M, N); fewer modes than two become rows."""
    if tensor.dim() < 2:
        return tensor.reshape(1, 1, -1)
    return tensor.reshape(-1, *tensor.shape[-2:])


def _require_same_shape(actual: torch.Tensor, reference: torch.Tensor, peer: torch.Tensor) -> None:
    if not actual.shape == reference.shape == peer.shape:
        raise ValueError(
            f"actual, reference and peer must have one shape, are {tuple(actual.shape)}, "
            f"{tuple(reference.shape)}, {tuple(peer.shape)}"
        )


def _check_non_finite(actual: torch.Tensor, reference: torch.Tensor) -> None:
    """Check that the output is the same where the reference, rounded to its dtype, is NaN or infinite."""
    rounded = reference.to(actual.dtype)
    same = torch.where(torch.isnan(rounded), torch.isnan(actual), actual == rounded)
    wrong = ~torch.where(torch.isfinite(rounded), torch.isfinite(actual), same)
    if bool(wrong.any()):
        place = tuple(int(index) for index in wrong.nonzero()[0])
        raise ToleranceError(
            f"{int(wrong.sum())} elements differ in being finite; the first is at {place}: "
            f"{actual[place].item()!r}, reference {reference[place].item()!r}"
        )


def measure(
    actual: torch.Tensor,
    reference: torch.Tensor,
    peer: torch.Tensor,
    *,
    factor: float = 2.0,
    ulps: float = 1.0,
    tile: tuple[int, int] = (64, 64),
) -> Report:
    """Compare `actual` (…, M, N) with `reference` (float64) by the module's rule, without raising for errors.

    actual: the kernel's output, in its dtype. peer: PyTorch's result for the same inputs, any dtype.
    Raises ToleranceError where an element is finite in one and not in the other, ValueError for shapes.
    """
    _require_same_shape(actual, reference, peer)
    if actual.numel() == 0:
        return Report()
    _check_non_finite(actual, reference)
    exact = _as_matrices(reference.double())
    finite = torch.isfinite(_as_matrices(reference.to(actual.dtype)))  # the rest is compared already
    error = ((_as_matrices(actual).double() - exact).abs()).where(finite, 0.0)
    peer_error = ((_as_matrices(peer).double() - exact).abs()).nan_to_num(0.0, 0.0, 0.0).where(finite, 0.0)

    peer_max = _tile_max(peer_error, tile)
    few = _tile_counts((exact.shape[1], exact.shape[2]), tile, exact.device) < _FEW
    peer_max = torch.where(few, peer_error.max(), peer_max)
    ulp = _ulp(_tile_max(exact.abs().where(finite, 0.0), tile), actual.dtype)
    bound = factor * peer_max + ulps * ulp
    found = _tile_max(error, tile)

    where = int((found / bound).argmax())
    batch, row, column = (int(index) for index in torch.unravel_index(torch.tensor(where), found.shape))
    top, left = row * tile[0], column * tile[1]
    part = error[batch, top : top + tile[0], left : left + tile[1]]
    inner_row, inner_column = divmod(int(part.argmax()), part.shape[1])
    flat = (batch * exact.shape[1] + top + inner_row) * exact.shape[2] + left + inner_column
    worst = tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), actual.shape))
    rms, peer_rms = (float(values.square().mean().sqrt()) for values in (error, peer_error))
    return Report(
        worst=worst,
        actual=float(actual[worst]),
        expected=float(reference[worst]),
        error=float(found.flatten()[where]),
        peer_error=float(peer_max.flatten()[where]),
        bound=float(bound.flatten()[where]),
        bad_tiles=int((found > bound).sum()),
        tiles=found.numel(),
        rms=rms,
        peer_rms=peer_rms,
        rms_bound=factor * peer_rms + ulps * float(ulp.double().square().mean().sqrt()),
    )


def check(
    actual: torch.Tensor,
    reference: torch.Tensor,
    peer: torch.Tensor,
    *,
    factor: float = 2.0,
    ulps: float = 1.0,
    tile: tuple[int, int] = (64, 64),
    case: str = "",
) -> Report:
    """`measure`, and ToleranceError where a tile or the root mean square is over its bound.

    case: what the message starts with.
    """
    report = measure(actual, reference, peer, factor=factor, ulps=ulps, tile=tile)
    if not report.ok:
        raise ToleranceError(f"{case}: {report}" if case else str(report))
    return report


def check_exact(actual: torch.Tensor, expected: torch.Tensor, *, case: str = "") -> None:
    """Bit-for-bit equality of values (for `inputs.integers`); names the first coordinate that differs.

    expected: any dtype; it is rounded once to the output's. NaN equals nothing, as in torch.equal.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"actual has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    rounded = expected.to(actual.dtype)
    if torch.equal(actual, rounded):
        return
    wrong = actual != rounded
    place = tuple(int(index) for index in wrong.nonzero()[0])
    head = f"{case}: " if case else ""
    raise ToleranceError(
        f"{head}{int(wrong.sum())} of {wrong.numel()} elements differ; the first is at {place}: "
        f"{actual[place].item()!r}, must be {rounded[place].item()!r}"
    )
