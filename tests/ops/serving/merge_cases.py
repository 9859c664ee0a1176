"""States for the tests of `merge_states`, compared with float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import kernels_dsl


class States(NamedTuple):
    """States to merge."""

    out: torch.Tensor
    lse: torch.Tensor


def random_states(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> States:
    """States of which some have seen no key, and hold NaN there."""
    generator = torch.Generator().manual_seed(seed)
    out, lse = torch.randn(shape, generator=generator), 4 * torch.randn(shape[:-1], generator=generator)
    lse[0, ..., 0] = -math.inf
    lse[:, ..., -1] = -math.inf
    out[lse == -math.inf] = math.nan
    return States(out.to(dtype), lse)


def in_float64(states: States) -> States:
    """The merged state, in float64."""
    lse = states.lse.double()
    merged = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(merged == -math.inf, 0.0, merged))
    out = states.out.double().masked_fill(lse[..., None] == -math.inf, 0.0)
    return States((weights[..., None] * out).sum(0), merged)


def check(states: States, out_dtype: torch.dtype | None = None) -> None:
    """Merges and compares."""
    merged, expected = kernels_dsl.merge_states(*states, out_dtype=out_dtype), in_float64(states)
    assert merged.out.dtype == (out_dtype or states.out.dtype) and merged.lse.dtype == torch.float32
    ulp = torch.finfo(merged.out.dtype).eps
    torch.testing.assert_close(merged.out.double(), expected.out, rtol=ulp, atol=4e-6)
    torch.testing.assert_close(merged.lse.double(), expected.lse, rtol=1e-6, atol=1e-6)
    for h in (0, -1):  # no NaN of a state that nobody wrote
        assert not merged.out[..., h, :].isnan().any()
    assert not merged.out[..., -1, :].any() and (merged.lse[..., -1] == -math.inf).all()
