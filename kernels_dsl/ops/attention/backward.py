"""From a checked call of attention and the gradient of its output to the gradients of q, k and v.

Three launches: row sums and clean sums of dQ, then dK, dV and the sums, then dQ. All that lies between is a
workspace of O(rows · D): the scores are computed again from the log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import lowering
from kernels_dsl.config.attention import split_of
from kernels_dsl.config.attention_backward import (
    Sm80BackwardConfig,
    Sm90BackwardConfig,
    sm80_backward_config,
    sm90_backward_config,
)
from kernels_dsl.config.attention_dq import Sm90DqConfig, sm90_dq_config
from kernels_dsl.config.derivative import derived
from kernels_dsl.config.problem import Device
from kernels_dsl.ops.attention.arguments import AttentionArguments, AttentionCall, Extras, describe
from kernels_dsl.ops.attention.cut_tiles import CutTiles, cut_tiles
from kernels_dsl.ops.attention.functions import unwrapped
from kernels_dsl.ops.attention.outputs import Step, is_empty, prepared_for_tma
from kernels_dsl.ops.attention.plan import kernel_extras
from kernels_dsl.ops.attention.query_lists import query_lists
from kernels_dsl.ops.launch import Launch
from kernels_dsl.ops.target import Target
from kernels_dsl.ops.tile_counter import tile_counter
from kernels_dsl.ops.tracing import constant_result
from lowering.records import NamedTuple, frozen

_MODULES = "kernels_dsl.kernels.attention."
PREPARE = lowering.jit(_MODULES + "backward_prepare:prepare_backward", name="attention_backward_prepare")
FINISH = lowering.jit(_MODULES + "backward_finish:finish_dq", name="attention_backward_finish")
FUNCTIONS = {
    "sm90": lowering.jit(_MODULES + "backward_sm90:attention_backward_sm90", name="attention_backward_sm90"),
    "sm80": lowering.jit(_MODULES + "backward_sm80:attention_backward_sm80", name="attention_backward_sm80"),
}
DQ = lowering.jit(_MODULES + "backward_dq_sm90:attention_dq_sm90", name="attention_dq_sm90")
BackwardConfig = Sm90BackwardConfig | Sm80BackwardConfig
NOT_DERIVED = "score_mod is more than +, -, * and / of its score: score_mod_bwd must be given"
LOG2_E = math.log2(math.e)
BLOCK_STEP = 64
"""Sizes of listed blocks are multiples of this: the least tile of the kernels."""
SHORT = 1024
"""Keys at which a query tile has few shares of dQ."""
LONG_WALK, LONG_WALK_CAUSAL, LONG_WALK_FULL, LONG_WALK_NARROW = 4608, 1536, 3072, 2304
"""Most query rows that a tile of keys is seen by where a CTA takes tile after tile, as measured on an H200;
the second under a causal mask where it else has V in registers, the third without a mask, the last with 128
queries a step, at head dimensions up to 64."""
KEYS_OF_A_TILE = 128
MAX_CTAS = 2**31 - 1
MAX_GRID = 65535
"""Heads and sequences of a launch whose grid has a mode for each."""


class Forward(NamedTuple):
    """The arguments and results of the forward pass that a backward pass needs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    extras: Extras


@frozen
class Needs:
    """Gradients that are asked for."""

    q: bool = True
    kv: bool = True
    sinks: bool = False
    mask: bool = False

    @property
    def scores(self) -> bool:
        """Says whether scores are computed again: a sink's gradient follows from the row sums."""
        return self.q or self.kv or self.mask


class Gradients(NamedTuple):
    """Gradients of the loss, each of the shape and dtype of its tensor; None where nobody asks for one."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    sinks: torch.Tensor | None
    mask: torch.Tensor | None = None


def why_not_variant(call: AttentionCall) -> str | None:
    """Says why a call of attention has no gradient on any GPU; None where it may have."""
    if call.page:
        return "attention has no gradient with block_table: the cache is only read"
    if call.block is not None and (call.block[0] % BLOCK_STEP or call.block[1] % BLOCK_STEP):
        return f"attention has no gradient with blocks of {call.block}, only of multiples of {BLOCK_STEP}"
    if max(call.heads, call.batch) > MAX_GRID:
        sizes = f"{call.heads} heads and {call.batch} sequences"
        return f"attention has no gradient with more than {MAX_GRID} of either: {sizes}"
    return None


def why_not(call: AttentionCall, target: Target) -> str | None:
    """Says why a call of attention has no gradient on `target`; None where it has."""
    if not target.device.families():
        return f"attention has no gradient on {target.device.name}, only from compute capability 8.0 on"
    return why_not_variant(call)


def choose_tile(
    call: AttentionCall, device: Device, deterministic: bool, needs: Needs, family: str | None
) -> BackwardConfig:
    """The tile for a call: of the fastest family of kernels that the device has, whose tiles divide listed
    blocks. `family`: that of the forward pass where it is forced; "sm80" is then that of this one."""
    config: BackwardConfig
    hopper = device.families()[0] == "sm90"
    block_q, block_k = call.block or (128, 128)
    variant = call.variant
    config = sm90_backward_config(
        call.dim, call.dim_v, deterministic, block_q, block_k, needs.mask, variant.computes_scores
    )
    # With roles the one that has dP is not given P, but the factor of dS.
    lacks_probs = needs.mask and variant.bends_scores and config.cta_keys == 64
    if not hopper or family == "sm80" or block_k % config.tile_k or lacks_probs:
        config = sm80_backward_config(
            call.dim,
            call.dim_v,
            deterministic,
            device.smem_bytes,
            variant.by_elements,
            block_k,
            needs.mask,
            call.packed,
        )
        config = replace(config, sums_vector=4 if hopper else 1)
    return config if needs.q else alone(config)


def alone(config: BackwardConfig) -> BackwardConfig:
    """The tile where no dQ is summed: CTAs share a tile for its sake."""
    if isinstance(config, Sm90BackwardConfig):
        return replace(config, tile_k=config.cta_keys, ctas=1)
    return config


def complete(config: BackwardConfig, call: AttentionCall, needs: Needs) -> BackwardConfig:
    """The configuration of a call with the tile of `choose_tile`."""
    if isinstance(config, Sm90BackwardConfig):
        config = replace(config, many_tiles=takes_many_tiles(call, config))
        config = replace(config, stores_first=stores_first(call, config), **kept_operands(call, config))
        config = replace(config, sums_buffers=buffers_of_sums(call, config))
    return replace(config, gives_q=needs.q, gives_kv=needs.kv)


def walk_rows(call: AttentionCall) -> int:
    """Query rows, of all heads that share it, that see a tile of keys in the mean, as far as the host knows:
    lists are taken to see all."""
    rows, variant = min(call.q_len, call.longest_q), call.variant
    if variant.right and variant.left:
        rows = min(rows, max(0, call.left) + max(0, call.right) + KEYS_OF_A_TILE)
    elif variant.right or variant.left:
        rows //= 2
    return rows * (call.heads // max(1, call.kv_heads))


def takes_many_tiles(call: AttentionCall, config: Sm90BackwardConfig) -> bool:
    """Says whether a CTA takes tile after tile of keys, in place of one: where that was measured to pay on an
    H200, by how long a tile's walk is."""
    if config.cta_keys == 64:
        return False
    variant, most = call.variant, LONG_WALK
    if config.tile_q > 64:
        most = LONG_WALK_NARROW
    elif not (variant.right or variant.left):
        most = LONG_WALK_FULL
    elif not variant.left and fits_registers(call, config):
        most = LONG_WALK_CAUSAL
    return walk_rows(call) <= most


def stores_first(call: AttentionCall, config: Sm90BackwardConfig) -> bool:
    """Says whether the first share of a query tile's dQ is stored, in place of sums that are cleared before.

    In any order that takes an atomic operation for each share: it pays where there are few, as measured on an
    H200.
    """
    few = call.block is None and call.longest_k <= SHORT
    return config.deterministic or (config.many_tiles and few)


def fits_registers(call: AttentionCall, config: Sm90BackwardConfig) -> bool:
    """Says whether there are registers for half of V, for which P has 16 bits: at head dimension 128 where no
    functions or masks of single scores need them."""
    return config.cta_keys == config.dim == config.dim_v == 128 and not call.variant.by_elements


def kept_operands(call: AttentionCall, config: Sm90BackwardConfig) -> dict[str, Any]:
    """Half of V in registers, where a CTA has one tile: as measured on an H200."""
    fits = fits_registers(call, config) and not config.many_tiles
    return {"short_probs": True, "v_registers": 64} if fits else {}


def buffers_of_sums(call: AttentionCall, config: Sm90BackwardConfig) -> int:
    """Buffers of a warpgroup's dQ in shared memory. Where CTAs have one tile of 128 keys, as measured on an
    H200: in any order none beside V in registers, whose warpgroups add to the sums themselves; in a fixed one
    two with 128 queries a step."""
    plain = config.cta_keys == 128 and not (config.many_tiles or call.variant.by_elements)
    if plain and config.v_registers and call.block is None and not config.deterministic:
        return 0
    return 2 if plain and config.tile_q > 64 and config.deterministic else config.sums_buffers


def is_by_queries(call: AttentionCall, config: BackwardConfig) -> bool:
    """Says whether dQ in a fixed order is computed by tiles of queries, in place of sums in turns: as
    measured on an H200, over lists, whose turns form long chains, and where 64 keys have wide heads."""
    return call.block is not None or (config.dim > 128 and config.tile_k == 64)


def is_faster_in_order(call: AttentionCall, config: BackwardConfig) -> bool:
    """Says whether a fixed order of dQ's sums is the faster one, too, as measured on an H200: where queries
    see few tiles of keys, so that turns are short, and where a kernel of its own has dQ of wide heads."""
    if config.family != "sm90" or call.block is not None:
        return False
    variant = call.variant
    narrow = config.tile_q > 64 and bool(variant.right)
    return narrow or bool(variant.left and variant.right) or is_by_queries(call, config)


def choose_dq(
    call: AttentionCall, config: BackwardConfig, deterministic: bool, needs: Needs
) -> Sm90DqConfig | None:
    """The configuration of the kernel of dQ by tiles of queries; None where dQ is summed beside dK and dV, by
    the kernel of `config`."""
    # With functions of single scores wide heads would spill.
    spills = call.variant.by_elements and max(call.dim, call.dim_v) > 128
    fits = config.family == "sm90" and needs.q and not (needs.mask or spills)
    if not (fits and deterministic and is_by_queries(call, config)):
        return None
    return sm90_dq_config(call.dim, call.dim_v, call.block or (128, 128), call.variant.by_elements)


def described(call: AttentionArguments) -> AttentionCall:
    """The call with the backward function of its `score_mod`, the caller's or a derived one.

    RuntimeError where neither is there.
    """
    found, function = describe(call), unwrapped(call.score_mod_bwd)
    if call.score_mod is None:
        return found
    if function is None:
        function = derived(unwrapped(call.score_mod), len(call.extras.aux))
    if function is None:
        raise RuntimeError(NOT_DERIVED)
    return replace(found, variant=replace(found.variant, score_mod_bwd=function))


@constant_result
def _is_derived(score_mod: Callable[..., Any], aux: int) -> bool:
    return derived(unwrapped(score_mod), aux) is not None


def check_gradient(call: AttentionArguments, asked: str, target: Target | None) -> None:
    """RuntimeError where there is no gradient of a call whose argument `asked` requires it.

    `target` is where it runs, None for a call that is only traced.
    """
    if asked not in (*call.names[:3], "sinks", "mask"):
        raise RuntimeError(f"{asked} requires grad, but attention has no gradient of it yet: detach it")
    if call.score_mod is not None and call.score_mod_bwd is None:
        if not _is_derived(call.score_mod, len(call.extras.aux)):
            raise RuntimeError(f"{asked} requires grad, but {NOT_DERIVED}")
    found = describe(call)
    reason = why_not_variant(found) if target is None else why_not(found, target)
    if reason is not None:
        raise RuntimeError(f"{asked} requires grad, but {reason}: call it under torch.no_grad()")


def summed_like(gradients: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Gradients (B, H, Sq, Sk) of a mask that broadcasts there, summed where it does: in a fixed order."""
    if gradients.numel() == mask.numel():
        return gradients.view(mask.shape)
    return gradients.sum_to_size(mask.shape).to(mask.dtype)


class Workspace(NamedTuple):
    """Numbers of each query row and head between the kernels, by tiles; see `backward_work.Sums`."""

    lse: torch.Tensor
    row_sums: torch.Tensor
    dq: torch.Tensor | None
    turns: torch.Tensor | None


class BackwardPlan:
    """The computation of gradients of calls like one that was seen; `run(forward, do, d_lse)`."""

    def __init__(
        self,
        call: AttentionCall,
        forward: Forward,
        do: torch.Tensor,
        target: Target,
        deterministic: bool,
        needs: Needs,
        family: str | None = None,
    ) -> None:
        reason = why_not(call, target)
        if reason is not None:
            raise ValueError(reason)
        self.call, self.needs = call, needs
        config = choose_tile(call, target.device, deterministic, needs, family)
        in_order = deterministic or is_faster_in_order(call, config)
        self.dq_config = choose_dq(call, config, in_order, needs)
        of_keys = needs
        if self.dq_config is not None:
            in_order, of_keys, config = False, replace(needs, q=False), alone(config)
        self.config = complete(replace(config, deterministic=in_order), call, of_keys)
        steps = [prepared_for_tma(x) for x in (forward.q, forward.k, forward.v, forward.out, do)]
        self.steps: list[Step | None] | None = steps if any(steps) else None
        self.sums_q = needs.q and self.dq_config is None
        self.sizes = self._workspace_sizes()
        self.cut_tiles: CutTiles | None = None
        if isinstance(self.config, Sm90BackwardConfig):
            self.cut_tiles = cut_tiles(call, self.config, target.device.sm_count)
        tile = (self.config.row_tile, self.config.dim)
        common = {"layout": call.layout, "tile": tile}
        variant = call.variant
        if call.block is not None:
            variant = replace(variant, lists=(1, call.block[1] // self.config.tile_k))
        self.prepare = Launch(PREPARE, target, common)
        self.main = Launch(
            FUNCTIONS[self.config.family],
            target,
            {"layout": call.layout, "config": self.config, "variant": variant},
        )
        self.finish = Launch(FINISH, target, {**common, "order": self.config.sums})
        if self.dq_config is not None:
            variant = call.variant
            if call.block is not None:
                variant = replace(variant, lists=split_of(self.dq_config, call.block))
            facts = {"config": self.dq_config, "variant": variant, "row_tile": self.config.row_tile}
            self.dq = Launch(DQ, target, {"layout": call.layout, **facts})

    def run(self, forward: Forward, do: torch.Tensor, d_lse: torch.Tensor | None = None) -> Gradients:
        """The gradients. do: like the output; d_lse: float32 like the log-sum-exp, or None."""
        call, extras, needs, config = self.call, forward.extras, self.needs, self.config
        new: Callable[..., torch.Tensor] = torch.zeros_like if self._leaves_rows(extras) else torch.empty_like
        asked = zip((forward.q, forward.k, forward.v), (needs.q, needs.kv, needs.kv))
        dq, dk, dv = (new(x, memory_format=torch.contiguous_format) if need else None for x, need in asked)
        q, k, v, out, *_ = forward
        if self.steps is not None:
            steps = zip((q, k, v, out, do), self.steps)
            q, k, v, out, do = (x if step is None else step(x) for x, step in steps)
        seqlens, longest_q, key_lists, _, mask, aux = kernel_extras(call, extras)
        sums = self._workspace(q)
        cu_q = None if seqlens is None else seqlens[0]
        if d_lse is not None:
            d_lse = d_lse.float()
        if not is_empty(call) or (needs.sinks and 0 not in (call.batch, call.heads, longest_q)):
            cleared = sums if config.clears_sums else sums._replace(dq=None)
            self.prepare(out, do, forward.lse, d_lse, *cleared, cu_q, longest_q)
        d_mask = self._mask_gradients(mask, extras.mask) if needs.mask else None
        if not is_empty(call) and needs.scores:
            numbers = (call.scale, call.softcap, call.left, call.right)
            results = (k, v) if dk is None else (dk, dv)  # which are not written then
            if needs.kv or self.dq_config is None:
                lists = None if call.block is None else query_lists(call, extras, self.config.tile_q)
                launch = self.main
                launch(
                    q, k, v, do, *results, *sums, *numbers, seqlens, call.longest_k, mask, aux, lists, d_mask,
                    *self.queue(q.device),
                )  # fmt: skip
            if self.dq_config is not None:
                of_rows = sums.lse, sums.row_sums
                launch = self.dq
                launch(q, k, v, do, dq, *of_rows, *numbers, seqlens, longest_q, key_lists, mask, aux)
            elif needs.q:
                self.finish(
                    sums.dq, None if config.clears_sums else sums.turns, dq, call.scale, cu_q, longest_q
                )
        d_sinks = self._sinks(extras.sinks, sums) if needs.sinks else None
        if d_mask is not None and extras.mask is not None:
            d_mask = summed_like(d_mask, extras.mask)
        return Gradients(dq, dk, dv, d_sinks, d_mask)

    def queue(self, device: torch.device) -> tuple[Any, ...]:
        """Arguments of Hopper's kernels: a counter of tiles and most CTAs, or memory for cut tiles."""
        config, target = self.config, self.main.target
        if not isinstance(config, Sm90BackwardConfig):
            return ()
        if config.many_tiles:
            return tile_counter(target.index), target.device.sm_count, None
        return None, MAX_CTAS, None if self.cut_tiles is None else self.cut_tiles.memory(device)

    def _leaves_rows(self, extras: Extras) -> bool:
        """Kernels leave rows that belong to no sequence, and keys that do not count."""
        return extras.seqlens is not None or is_empty(self.call)

    def _mask_gradients(self, expanded: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The gradient of the mask of each head: float32 where several are summed."""
        call, several = self.call, expanded.numel() > mask.numel()
        variant = call.variant
        hides = variant.right or variant.left or call.block is not None  # kernels leave what no tile reaches
        new = torch.zeros if hides or call.packed or is_empty(call) else torch.empty
        return new(expanded.shape, dtype=torch.float32 if several else mask.dtype, device=mask.device)

    def _workspace_sizes(self) -> list[int]:
        """Numbers of row sums, log-sum-exps, elements of dQ's sums and turns."""
        call, row_tile = self.call, self.config.row_tile
        if call.packed:
            tiles = call.heads * (call.q_len // row_tile + call.batch)
        else:
            tiles = call.batch * call.heads * -(-call.q_len // row_tile)
        rows = tiles * row_tile
        return [rows, rows, rows * self.config.dim if self.sums_q else 0, 4 * tiles]

    def _workspace(self, q: torch.Tensor) -> Workspace:
        """Numbers of query tiles, as the kernels take them."""
        memory = torch.empty(sum(self.sizes), dtype=torch.float32, device=q.device)
        row_sums, lse, dq_sums, turns = torch.split_with_sizes(memory, self.sizes)
        call, config = self.call, self.config
        if self.needs.sinks and (call.packed or is_empty(call)):  # some rows belong to no sequence
            lse.fill_(math.inf)
            row_sums.zero_()
        if not self.sums_q:
            return Workspace(lse, row_sums, None, None)
        return Workspace(lse, row_sums, dq_sums, turns.view(torch.int32) if config.counts_shares else None)

    def _sinks(self, sinks: torch.Tensor | None, sums: Workspace) -> torch.Tensor:
        """A sink is the score of a key whose value is 0: its gradient is P (0 - row sum)."""
        assert sinks is not None
        if not sums.lse.numel():
            return torch.zeros_like(sinks)
        lead = 1 if self.call.packed else self.call.batch
        lse, row_sums = (x.view(lead, len(sinks), -1) for x in (sums.lse, sums.row_sums))
        probs = torch.exp2(sinks.float()[:, None] * LOG2_E - lse)
        return -(probs * row_sums).sum((0, 2)).to(sinks.dtype)
