"""Orders of addition that do not depend on what else is in a batch, and the configurations that keep them."""

from __future__ import annotations

from enum import Enum

from kernels_dsl.config.gemm import GemmConfig, Sm80GemmConfig
from kernels_dsl.config.reductions import CallReduction


class Order(Enum):
    """Sums whose order must be the same whatever M, the batch and the alignments are."""

    ANY = "none"
    SUMS = "those of an element's products"
    ROW_SUMS = "these, and those of the elements of a row"


def order_of(batch_invariant: bool, reduction: CallReduction | None) -> Order:
    """The order that a call needs, with the reduction of its result if it has one."""
    if not batch_invariant:
        return Order.ANY
    return Order.ROW_SUMS if reduction is not None and reduction.dim == -1 else Order.SUMS


INVARIANT_K_BYTES = 64
"""Bytes of K in a tile of the SM80-class kernels with batch_invariant: what the largest tiles have."""
INVARIANT_TILE_N = 128
"""Columns of a tile with batch_invariant and sums of rows: a sum begins anew with every tile."""


def why_not_in_order(config: GemmConfig, order: Order, ab_bytes: int = 2) -> str | None:
    """Says why `config` would add in another order than others of its family; None where it does not.

    Clusters and schedules do not change an order, and tiles not that of an element: it is one chain of matrix
    instructions, with K upwards. Pieces of K are separate chains, and a turned tile exchanges the
    instruction's operands. The SM80-class kernels begin with the last K tile, which may be a part of one.
    """
    if order is Order.ANY:
        return None
    if isinstance(config, Sm80GemmConfig) and config.tile_k * ab_bytes != INVARIANT_K_BYTES:
        return f"tile_k is {config.tile_k}, must be {INVARIANT_K_BYTES // ab_bytes} with batch_invariant"
    if config.split_k > 1:
        return f"split_k is {config.split_k}, must be 1 with batch_invariant"
    if config.cluster_k > 1:
        return f"cluster_k is {config.cluster_k}, must be 1 with batch_invariant"
    if config.stream_k:
        return "stream_k is True, must be False with batch_invariant"
    if order is Order.ROW_SUMS and config.tile_n != INVARIANT_TILE_N:
        return f"tile_n is {config.tile_n}, must be {INVARIANT_TILE_N} with batch_invariant and sums of rows"
    return "turned is True, must be False with batch_invariant" if config.turned else None
